import json
from typing import Any

import pytest

from commlayer.telemetry import entry
from commlayer.telemetry.sample import Sampler
from tests.unit.top.test_table import sample


def test_the_samples_of_this_version_enter() -> None:
    entry.check_sample(json.dumps(Sampler(1, 4).take()).encode(), 1, 4)
    entry.check_sample(json.dumps(sample(2)).encode(), 2, 4)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": 2}, "a sample of rank 2 of 4, sent as rank 1 of 4"),
        ({"world": 100_000_000}, "of 100000000, sent as rank 1 of 4"),
        ({"step": 10**400}, "step is not that of this version"),
        ({"host": "\x1b[2J"}, "host is not that of this version"),
        ({"host": "x" * 70_000}, "a sample of .* bytes; it may have 65536"),
        ({"lags": [[1]]}, "lags are pairs"),
        ({"lags": [["a", 1]]}, "lags is not that of this version"),
        ({"paths": [{"peer": "1"}]}, "paths is not that of this version"),
        ({"hooks": None}, "hooks is not that of this version"),
        ({"packets": "many"}, "packets is not that of this version"),
    ],
)
def test_other_samples_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        entry.check_sample(json.dumps({**sample(1), **changes}).encode(), 1, 4)


@pytest.mark.parametrize("text", [b"1e999", b"NaN", b"[-Infinity]", b"[" * 100_000, b"{", b"\xff", b"[" + b"9" * 5000])
def test_values_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        entry.read(text)
