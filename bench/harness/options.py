"""The options of the benchmarks: one that several of them have has the same name and meaning in all."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any


def options(
    about: str | None,
    *,
    only: Collection[Any] = (),
    rounds: int | None = None,
    seeds: int | None = None,
    quick: str = "",
    table: bool = False,
    ranks: bool = False,
) -> argparse.ArgumentParser:
    """The parser of a benchmark, to which it adds options of its own. `about`: its docstring.

    `only`: the names or numbers of its cases. `rounds`, `seeds`: their number by default. `quick`: what a quick run,
    which keeps nothing, leaves out. `table`: it can write the tables of its page from the kept results.
    `ranks`: it starts itself again on emulated hosts, where it serves jobs (`turns.serve`).
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(only=None, quick=False, table=False, rank=None)
    if only:
        kind = type(next(iter(only)))
        text = "measure this case alone (may be repeated)"
        parser.add_argument("--only", action="append", type=kind, choices=list(only), help=text)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of all systems (default: %(default)s)")
    if seeds is not None:
        parser.add_argument("--seeds", type=int, default=seeds, help="at most this many (default: %(default)s)")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; keeps nothing")
    if table:
        text = "measure nothing, only write the tables and pictures of the kept results"
        parser.add_argument("--table", action="store_true", help=text)
    if ranks:
        parser.add_argument("--rank", nargs=2, type=Path, metavar=("JOBS", "LOGS"), help=argparse.SUPPRESS)
    return parser
