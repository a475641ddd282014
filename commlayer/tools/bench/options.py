"""The command lines of `commlayer bench codec` and `commlayer bench select`, which measure kernels on one core."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..complaint import fail
from ..json_output import STDOUT, JsonOption, check, deliver
from .sizes import parse_size

Spec = TypeVar("Spec")

_SIZES = typer.Option(help="Comma-separated sizes of the float32 values")


def codec(
    sizes: Annotated[str, _SIZES] = "256K,64M",
    codecs: Annotated[str | None, typer.Option(help="Comma-separated codecs (default: all)")] = None,
    levels: Annotated[
        str | None, typer.Option(help="Comma-separated instruction sets: avx512, avx2, scalar (default: this CPU's)")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often the kernels take turns")] = 7,
    json_path: JsonOption = None,
) -> None:
    """Measure speed and error of the codecs on one core, beside memcpy.

    Example: commlayer bench codec --codecs int8,int4 --sizes 256K --json codec.json

    Exit status: 0; 2 if an option is wrong.
    """
    from . import codec as measured

    given = {"codecs": codecs, "levels": levels}

    def spec() -> measured.CodecSpec:
        return measured.CodecSpec(
            sizes=_parsed(sizes),
            rounds=rounds,
            command=("commlayer", *sys.argv[1:]),
            **{name: tuple(value.split(",")) for name, value in given.items() if value is not None},
        )

    _measure("bench codec", spec, measured.run, json_path)


def select(
    sizes: Annotated[str, _SIZES] = "256K,64M",
    share: Annotated[float, typer.Option(help="Share of the values that are selected")] = 0.01,
    rounds: Annotated[int, typer.Option(help="How often the selections take turns")] = 7,
    json_path: JsonOption = None,
) -> None:
    """Measure the selection of the largest values on one core, beside reading them twice and torch.topk.

    Example: commlayer bench select --sizes 64M --share 0.001

    Exit status: 0; 2 if an option is wrong.
    """
    from . import selection

    def spec() -> selection.SelectionSpec:
        return selection.SelectionSpec(_parsed(sizes), share, rounds, ("commlayer", *sys.argv[1:]))

    _measure("bench select", spec, selection.run, json_path)


def _parsed(sizes: str) -> tuple[int, ...]:
    return tuple(parse_size(size) for size in sizes.split(","))


def _measure(
    command: str, spec_of: Callable[[], Spec], run: Callable[[Spec], dict[str, Any]], json_path: Path | None
) -> None:
    """Measures, unless an option is wrong: then says so, and ends the command."""
    try:
        spec = spec_of()
        check(json_path)
    except ValueError as error:
        fail(command, error)
    table = sys.stderr if json_path == STDOUT else sys.stdout  # it is printed while the results come
    with contextlib.redirect_stdout(table):
        document = run(spec)
    deliver(document, json_path, lambda: None)
