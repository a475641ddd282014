"""`tell_torchrun`: torchrun ends its output with the uncaught error of commlayer that ended a process.

Without that, torchrun's summary, which is the last thing on the screen, gives an exit code and a link. torchrun reads
the text from a file, whose name it gives to each process.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from ...errors import CommError
from ...transport.places import own
from ...transport.whole_file import whole_file

FILE = "TORCHELASTIC_ERROR_FILE"

_hooked = False


def tell_torchrun() -> None:
    """From now on, an uncaught error of this package is written into the file of torchrun, if that runs. Idempotent."""
    global _hooked
    if _hooked or not os.environ.get(FILE):
        return
    _hooked = True
    previous, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = text_of(error)
        if text and os.getpid() == owner:  # torchrun shows the first record: not that of a forked child
            record(text, error, Path(os.environ.get(FILE, "")))
        previous(kind, error, trace)

    sys.excepthook = hook


def text_of(error: BaseException) -> str:
    """The kind and text of an error of this package, also of one that torch raises anew as RuntimeError, as it does
    within backward(); empty for any other."""
    if isinstance(error, CommError):
        return f"{type(error).__name__}: {error}"
    kinds = "|".join(kind.__name__ for kind in CommError.__subclasses__())
    found = re.search(rf"\b({kinds}): rank .*", str(error))
    return found[0] if found else ""


def record(text: str, error: BaseException, path: Path) -> None:
    """Writes the text as torchrun reads it, unless there is one, and where the error was raised. Never raises."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    place = next(own(reversed(frames)), "")
    text += f"\nraised in {place}" * bool(place)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    if path.exists():  # torch's decorator `record` was first
        return
    try:
        with whole_file(path) as file:  # torchrun may end this process meanwhile, and reads the file then
            file.write(json.dumps({"message": message}).encode())
    except OSError:  # the folder is gone, or the disk is full
        return
