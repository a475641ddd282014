"""`whole_file`: a file that takes its name when it is complete, so that a reader never finds half of it.

It belongs to its user alone (mode 0600): records show lines of the user's code. Other users may write into the folder,
so the name of the unfinished file cannot be guessed, and no link that they made is followed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """The file to write to within `with`, in the same folder. At the end it gets its name, and replaces one that had
    it; after an exception it is gone. Raises OSError if it cannot be made or renamed."""
    descriptor, name = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    part = Path(name)
    try:
        with open(descriptor, "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a reader of the exception needs its cause, not this one
            part.unlink()
        raise
