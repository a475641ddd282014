"""The names of commlayer that are needed before the package is imported, the variables that are read then, and the path
of the job's file of settings.

It is a module beside the package, and imports nothing but `os`: every process that imports torch loads it.
"""

from __future__ import annotations

import os

NAME = "commlayer"
"""The name of the backend."""
REPLACED = "gloo"
"""The backend whose place commlayer takes, if COMMLAYER_INSTEAD_OF names it."""
INSTEAD_OF = "COMMLAYER_INSTEAD_OF"
TRIAL = "COMMLAYER_TRIAL"
"""The folder of a trial, which `commlayer.tools.job` hands to the processes of the job that it starts: no setting."""
TORCHCOMMS = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
"""torch's own variable: have the package torchcomms make the groups."""
CONFIG = "COMMLAYER_CONFIG"
FILE = "commlayer.toml"
DDP_PREFIX = "COMMLAYER_DDP_"


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  # pathlib is not imported here
    except OSError:  # the folder has been removed
        return os.sep


STARTED_IN = _folder()
"""The working directory of the job: a script may change it later."""


def variable(name: str) -> str:
    """The value of an environment variable, without spaces around it; empty if it is not set."""
    return os.environ.get(name, "").strip()


def has_ddp_variables() -> bool:
    """Whether a variable asks for a hook, overlap or buckets for DDP models whose script does not know commlayer."""
    return any(name.startswith(DDP_PREFIX) for name in os.environ)


def path_of_file(named: str) -> str:
    """The path of the job's file of settings, which may not exist. `named`: what COMMLAYER_CONFIG says, or nothing."""
    return os.path.join(STARTED_IN, os.path.expanduser(named or FILE))  # noqa: PTH111, PTH118


def job_file() -> str:
    """The path of the job's file of settings; empty if it was not named and does not exist."""
    named = variable(CONFIG)
    path = path_of_file(named)
    return path if named or os.path.exists(path) else ""  # noqa: PTH110
