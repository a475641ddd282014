"""Finds and reads the files of all ranks, told apart by their content."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from . import flight, kineto
from .operation import Record

MERGED = "commlayer trace"
"""Names the program in traces that this package wrote."""

REMEDY = "name flight records of commlayer (docs/hang.md) or traces of torch.profiler"

PICKLE = "a pickle, which a stranger may have made to run code: write the record as JSON (commlayer does), or, if you \
trust whoever wrote this file, add --pickles"


class NoRecordError(ValueError):
    """A file that is not one of ours. In a folder, such files are left out."""


class _Plain(pickle.Unpickler):
    """Loads dicts, lists, text and numbers only: other pickles name functions to call."""

    def find_class(self, module: str, name: str) -> Any:
        raise NoRecordError(f"a pickle with objects ({module}.{name})")


def read_all(paths: Sequence[Path], warn: Callable[[str], None], pickles: bool = False) -> list[Record]:
    """The records in these files and folders, sorted by rank. `pickles`: also those in pickles, which the user trusts.
    Raises ValueError, which names the file."""
    listed = list(_files(paths))
    console = Console(stderr=True)
    found = []
    shown = track(listed, "reading", console=console, transient=True, disable=not console.is_terminal)
    for path, is_named in shown:
        try:
            found.append(read(path, pickles))
        except NoRecordError:
            if is_named:
                raise
        except ValueError as error:
            if is_named:
                raise
            warn(f"left out: {error}")
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no file of a rank is there; {REMEDY}")
    found.sort(key=lambda record: (record.rank, record.kind, record.written_ns))
    return _latest(found)


def read(path: Path, pickles: bool = False) -> Record:
    """The record in one file. Raises NoRecordError or ValueError, which name the file."""
    try:
        return _parse(path, content(path, pickles))
    except NoRecordError as error:
        raise NoRecordError(f"{path}: {error}; {REMEDY}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {REMEDY}") from error
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:  # int() of 1e999 overflows
        raise ValueError(f"{path}: its entries are not those of version 2.10 ({error!r}); {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def content(path: Path, pickles: bool = False) -> Any:
    """The content of a file: JSON, perhaps compressed, or a pickle where those may be read."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"the compressed file is cut off ({error}); copy or export it again") from error
    if data[:1] == b"\x80":
        if not pickles:
            raise ValueError(PICKLE)
        try:
            return _Plain(io.BytesIO(data)).load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise NoRecordError(f"the pickle cannot be read ({error})") from error
    start = data[:1024].lstrip()[:1]
    if start not in (b"{", b"["):
        raise NoRecordError("not JSON" if data else "an empty file")
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise NoRecordError("not JSON") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON ends or breaks off in line {error.lineno}; copy or export it again") from error
    except RecursionError as error:
        raise NoRecordError("JSON in more levels than a record has") from error


def _parse(path: Path, content: Any) -> Record:
    if not isinstance(content, dict):
        raise NoRecordError("JSON without the fields of a record")
    if "entries" in content and "pg_config" in content:
        return flight.read(path, content)
    if "traceEvents" not in content:
        raise NoRecordError("JSON without the fields of a record")
    if content.get("otherData", {}).get("program") == MERGED:
        raise NoRecordError("a trace that `commlayer trace` wrote")
    return kineto.read(path, content)


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """The files, with those in folders, and whether the caller named them."""
    for path in paths:
        if path.is_dir():
            yield from ((file, False) for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != ".")
        else:
            yield path, True


def _latest(records: Sequence[Record]) -> list[Record]:
    """The records without flight records that a later one of the same process replaces. Raises ValueError if a rank has
    two processes."""
    latest: dict[int, Record] = {}
    for record in records:
        if record.kind == "flight":
            before = latest.get(record.rank)
            if before is not None and (before.host, before.pid) != (record.host, record.pid):
                raise ValueError(
                    f"{before.path} and {record.path}: both are of rank {record.rank}, of two processes "
                    f"({before.host} {before.pid}, {record.host} {record.pid}); name the files of one run"
                )
            latest[record.rank] = record
    return [record for record in records if record.kind != "flight" or latest[record.rank] is record]
