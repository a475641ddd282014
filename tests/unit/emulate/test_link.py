import pytest

from commlayer.errors import ConfigError
from commlayer.tools.emulate.link import Link, new_rate, queues


def test_payload_of_a_shaped_link_is_the_udp_share_of_the_frames() -> None:
    # 25 MB/s of frames of 1514 bytes that carry 1472
    assert Link(rate_bps=200e6).payload_gb_s == pytest.approx(0.025 * 1472 / 1514)


def test_unshaped_link_has_no_ideal() -> None:
    assert Link(loss=0.1).payload_gb_s is None


@pytest.mark.parametrize(
    "fields",
    [
        {"rate_bps": 0.0},
        {"rate_bps": 1.0},
        {"rate_bps": 1e30},
        {"rate_bps": float("inf")},
        {"rate_bps": float("nan")},
        {"loss": 1.1},
        {"loss": -0.1},
        {"loss_burst_packets": 0.5},
        {"delay_ms": -1.0},
        {"loss_burst_packets": 10_001.0},
        {"loss": 0.95, "loss_burst_packets": 1.01},
        {"buffer_packets": 0},
        {"buffer_packets": 100_001},
        {"not_ect_buffer_packets": 300, "rate_bps": 1e6},
        {"not_ect_buffer_packets": 3},
        {"priorities": True},
        {"mtu": 100},
    ],
)
def test_values_out_of_range_are_rejected(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Link(**fields)  # type: ignore[arg-type]  # the wrong values are the test


def leaves(link: Link) -> dict[str, tuple[str, str]]:
    """TOS match -> (HTB priority, bytes of queue), as the commands say."""
    words = [command.split() for command in queues(link, "eth0")]
    prio = {word[word.index("classid") + 1]: word[word.index("prio") + 1] for word in words if "prio" in word}
    limit = {word[word.index("parent") + 1]: word[-1] for word in words if "bfifo" in word}
    return {" ".join(word[-4:-2]): (prio[word[-1]], limit[word[-1]]) for word in words if word[0] == "filter"}


def test_plain_link_has_one_queue() -> None:
    commands = queues(Link(rate_bps=1e6, buffer_packets=10), "eth0")
    assert [command.split()[0] for command in commands] == ["qdisc", "class", "class", "qdisc"]
    assert commands[-1].endswith("bfifo limit 15140")


def test_class_selector_seven_is_the_most_urgent() -> None:
    found = leaves(Link(rate_bps=1e6, priorities=True))
    assert [found[f"{selector << 5:#04x} 0xe0"][0] for selector in range(8)] == list("76543210")


def test_packets_without_ect_go_last_and_have_less_room() -> None:
    found = leaves(Link(rate_bps=1e6, buffer_packets=100, not_ect_buffer_packets=10))
    assert found == {"0x00 0x00": ("0", "151400"), "0x00 0x03": ("1", "15140")}


def test_both_pair_the_class_selectors() -> None:
    found = leaves(Link(rate_bps=1e6, priorities=True, not_ect_buffer_packets=10))
    assert len(found) == 16
    assert (found["0xe0 0xe0"][0], found["0xc0 0xe0"][0], found["0xe0 0xe3"][0]) == ("0", "0", "1")
    assert found["0x00 0xe3"][0] == "7"


def test_new_rate_changes_every_class() -> None:
    link = Link(rate_bps=2e6, priorities=True)
    assert sum("2000000bit" in command for command in new_rate(link, "eth0")) == 9
