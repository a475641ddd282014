"""Options of `bench codec` and `bench select`."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.complaint import EXIT_FAILED


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("codec --codecs int8,int7", "codec 'int7': choose from f16, bf16, int8"),
        ("codec --codecs=", "codec '': choose from"),
        ("codec --levels sse9", "level 'sse9': choose from"),
        ("codec --sizes 0", "size 0: use a multiple of 4 bytes"),
        ("select --share 0", "--share 0: use above 0"),
        ("select --share 0.6", "--share 0.6: use above 0, and at most 0.5"),
        *(
            (f"{command} {words}", message)
            for command in ("codec", "select")
            for words, message in (
                ("--sizes 4Q", "4Q"),
                ("--sizes 6", "size 6: use a multiple of 4 bytes"),
                ("--rounds 0", "--rounds 0: use at least 1"),
                ("--json /", "--json '/': that is a folder"),
            )
        ),
    ],
)
def test_wrong_options_are_named_before_anything_is_measured(arguments: str, message: str) -> None:
    result = bench(*arguments.split())
    assert result.exit_code == EXIT_FAILED
    assert f"commlayer bench {arguments.split()[0]}: " in result.output
    assert message in result.output
    assert "GB/s" not in result.output


@pytest.mark.parametrize("command", ["codec", "select"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: commlayer bench {command} --" in bench(command, "--help").output
