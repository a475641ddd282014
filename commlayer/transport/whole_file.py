"""`whole_file`: a file that takes its name when it is complete, so that a reader never finds half of it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_numbers = itertools.count()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path to write to within `with`, in the same folder. At the end the file gets its name, and replaces one that
    had it; after an exception it is gone. Raises OSError if it cannot be renamed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
