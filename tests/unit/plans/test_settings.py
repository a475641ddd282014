from __future__ import annotations

from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.plans.settings import Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment_bytes": 0},
        {"exchange_limit_bytes": -1},
        {"staging_bytes": -1},
        {"small_bytes": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


def test_settings_are_keys() -> None:
    assert hash(Settings()) == hash(Settings(algorithm="auto"))
    assert Settings() != Settings(deterministic=True)
