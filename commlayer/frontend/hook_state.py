"""The former name of `gradients.hook_state`: pickles of a HookState by commlayer 0.1 name this module."""

from __future__ import annotations

from .gradients.hook_state import HookState as HookState
