from __future__ import annotations

import pytest

from commlayer.bench.link import Link


def test_payload_of_a_shaped_link_is_the_udp_share_of_the_frames() -> None:
    # 25 MB/s of frames of 1514 bytes that carry 1472
    assert Link(rate_bps=200e6).payload_gb_s == pytest.approx(0.025 * 1472 / 1514)


def test_payload_adds_up_over_nics() -> None:
    single, double = Link(rate_bps=1e9).payload_gb_s, Link(rate_bps=1e9, nics=2).payload_gb_s
    assert single is not None
    assert double == pytest.approx(2 * single)


def test_unshaped_link_has_no_ideal() -> None:
    assert Link(loss=0.1).payload_gb_s is None


@pytest.mark.parametrize(
    "fields", [{"rate_bps": 0.0}, {"loss": 1.0}, {"loss": -0.1}, {"loss": 5}, {"buffer_packets": 0}, {"nics": 0}]
)
def test_values_out_of_range_are_rejected(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Link(**fields)  # type: ignore[arg-type]  # the wrong values are the test
