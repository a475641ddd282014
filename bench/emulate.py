"""Runs a command under an emulated network: the same as `commlayer emulate`, from a checkout.

python bench/emulate.py bench/scenarios/loss1.toml -- python examples/train_gpt.py
"""

from __future__ import annotations

import sys

from commlayer.tools.cli import app

if __name__ == "__main__":
    app(["emulate", *sys.argv[1:]], prog_name="commlayer")
