import re
from fractions import Fraction

import pytest

from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.loss import BURST_MS, ruleset


def chances(text: str) -> list[Fraction]:
    return [Fraction(int(share), int(unit)) for unit, share in re.findall(r"mod (\d+) < (\d+)", text)]


def test_no_loss_has_no_rule() -> None:
    assert "iifname" not in ruleset({"eth0": Link()}).replace("type ifname", "")


def test_independent_loss_is_one_rule_for_its_interface() -> None:
    text = ruleset({"eth0": Link(), "eth1": Link(loss=0.25)})
    assert chances(text) == [Fraction(1, 4)]
    assert 'iifname "eth1"' in text
    assert "eth0" not in text


def test_a_loss_of_all_packets_needs_no_random_number() -> None:
    assert 'iifname "eth0"  drop' in ruleset({"eth0": Link(loss=1.0)})


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 8), (0.1, 3), (0.5, 20)])
def test_two_states_have_the_mean_and_the_burst_asked_for(loss: float, burst: float) -> None:
    text = ruleset({"eth0": Link(loss=loss, loss_burst_packets=burst)})
    leave, enter = chances(text)
    assert f"timeout {BURST_MS}ms" in text  # and so that it ends where few packets come
    # a cycle is a burst, the packet that leaves it, and the packets that pass in the good state
    length = 1 / leave
    assert float(length) == pytest.approx(burst)
    assert float(length / (length + 1 + (1 - enter) / enter)) == pytest.approx(loss, rel=1e-6)


def test_bleaching_comes_before_losses_which_accept_packets() -> None:
    text = ruleset({"eth0": Link(), "eth1": Link(loss=0.1, loss_burst_packets=4, bleach_dscp=True, bleach_ecn=True)})
    rules = [line for line in text.splitlines() if line.startswith("iifname")]
    assert rules[:2] == ['iifname "eth1" ip dscp set 0', 'iifname "eth1" ip ecn set 0']
    assert len(rules) == 5
    assert "set 0" not in ruleset({"eth0": Link(loss=0.1)})
