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
        {"weights": (1, -1)},
        {"weights": (0, 0, 0)},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


def test_messages_keep_their_length_with_more_members() -> None:
    settings = Settings()
    assert [settings.segment_for(n) // n for n in (16, 17, 100, 1000)] == [16 << 10] * 4
    assert {settings.segment_for(n) for n in range(1, 17)} == {settings.segment_bytes}


def test_settings_are_keys() -> None:
    assert hash(Settings()) == hash(Settings(algorithm="auto"))
    assert Settings() != Settings(deterministic=True)
