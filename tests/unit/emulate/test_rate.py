import pytest

from commlayer.tools.emulate.rate import parse_rate


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        *[
            (text, 200e6)
            for text in ("200M", "200m", "200mbit", "200 Mbit/s", "200Mbps", "200Mb/s", "200e6", "2E+8", " 200M ")
        ],
        *[("1G", 1e9), ("50Mbit", 50e6), ("2.5gbps", 2.5e9), ("9600", 9600.0), ("0.1T", 1e11)],
    ],
)
def test_parse_rate(text: str, rate_bps: float) -> None:
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize("text", ["", "0", "fast", "-1M", "1MiB", "1X", "M", "1e400"])
def test_parse_rate_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="expected bits per second such as 200M, 1G or 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["25MB", "25MB/s", "25 MBps"])
def test_bytes_are_refused_with_the_bits(text: str) -> None:
    with pytest.raises(ValueError, match="that is in bytes; write bits per second: 200M"):
        parse_rate(text)
