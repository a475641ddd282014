"""Places in the user's own code, for texts: where an operation was called, and where the main thread is."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from .call import Call
from .flight import callers

CALLERS_MAX = 3
"""Callers that the place of a thread has."""

STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
PACKAGE = str(Path(__file__).parents[1]) + os.sep
PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages: their files, and those of Python itself, are not the user's own code."""


def own(frames: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """The frames of the user's own code, as `train (train.py:63)`. A frame: file, line, function."""
    for file, line, name in frames:
        if not file.startswith((STANDARD_LIBRARY, PACKAGE, "<frozen")) and not any(
            package in file for package in PACKAGES
        ):
            yield f"{name} ({file}:{line})"


def place_of(call: Call) -> str:
    """The place where the user's own code has called an operation; empty if that is not known."""
    return next(own(callers(call)), "")


def where() -> str:
    """The place where the main thread of this process is."""
    is_collecting = gc.isenabled()
    gc.disable()  # CPython holds a lock of threads here, for which a collection waits for ever (gh-106883)
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if is_collecting:
            gc.enable()
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    inner = [f"{name} ({file}:{line})" for file, line, name in found[:1]]
    return ", called by ".join(dict.fromkeys([*inner, *list(own(found))[:CALLERS_MAX]])) or "no Python code"
