"""The model's predictions from the parts of a step."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.tools.headroom.timing import Timing
from commlayer.tools.tune.arm import Arm
from commlayer.tools.tune.model import Model

NBYTES = 8 << 20

MODEL = Model(
    default_s=1.0,
    computing_s=0.3,
    nbytes=NBYTES,
    operations=2,
    latency_s=0.001,
    seconds_per_byte=0.6 / NBYTES,
    loss=0.01,
    round_trip_s=0.0002,
    hosts=4,
)
"""0.3 s of computation; the network needs 0.6 s for two buckets."""


def test_the_default_is_measured() -> None:
    assert MODEL.seconds(Arm()) == 1.0


def test_a_step_waits_for_the_network_after_the_backward_pass() -> None:
    # buckets are ready at 0.2 and 0.3 s, and take 0.301 s each
    assert MODEL.seconds(Arm(replaces_gloo=True)) == pytest.approx(0.2 + 2 * 0.301)


def test_a_codec_sends_its_share_of_the_bytes() -> None:
    assert MODEL.share("bf16") == 0.5
    assert MODEL.seconds(Arm(codec="bf16")) == pytest.approx(0.2 + 2 * 0.151, rel=0.01)
    assert MODEL.share("int4-int8") < MODEL.share("int8") < 0.3


def test_two_hosts_send_contributions_only() -> None:
    pair = dataclasses.replace(MODEL, hosts=2)
    assert pair.share("int4-int8") == pytest.approx(MODEL.share("int4-int8") * 2 / 3, rel=0.02)
    assert pair.share("int4-int8", partial=True) == MODEL.share("int4-int8")


def test_the_overlap_hides_all_but_the_last_bucket() -> None:
    # with bf16: 0.3 s of network beside 0.3 s of computation, and the last bucket's 0.151 s
    assert MODEL.seconds(Arm(codec="bf16", overlap=True)) == pytest.approx(0.451, rel=0.01)
    assert MODEL.seconds(Arm(codec="bf16", overlap=True, staleness=1)) == pytest.approx(0.302, rel=0.01)
    # more buckets: a smaller last one, more latency
    small = Arm(codec="bf16", overlap=True, bucket_mb=1.0)
    assert MODEL.bucket_count(small) == 8
    assert MODEL.seconds(small) == pytest.approx(0.3 + 0.3 / 8, rel=0.05)


def test_the_overlap_is_never_slower_than_the_step_without_it() -> None:
    fast = dataclasses.replace(MODEL, seconds_per_byte=0.0, latency_s=1e-5)
    assert fast.seconds(Arm(overlap=True)) <= fast.seconds(Arm(replaces_gloo=True))


def test_losses_within_the_bound_cost_no_round_trips() -> None:
    exact, lossy = MODEL.seconds(Arm(replaces_gloo=True)), MODEL.seconds(Arm(loss_bound=0.05))
    assert lossy == pytest.approx(exact - 2 * 2 * 0.0002)
    assert MODEL.seconds(Arm(loss_bound=0.001)) == exact


def test_more_sockets_are_tried_after_one() -> None:
    assert MODEL.seconds(Arm(overlap=True)) < MODEL.seconds(Arm(overlap=True, ports=4))


def parts(*, has_engine: bool = True, as_is_s: tuple[float, ...] = (1.0,)) -> Any:
    """What the model takes from a split of headroom: 0.3 s of computation, and 0.1 s of latency."""
    engine = SimpleNamespace(
        step=Timing((0.9, 0.9, 0.9)), transfer_s=0.7, operations=2.0, nbytes=NBYTES, loss=0.02, round_trip_s=0.001
    )
    return SimpleNamespace(
        as_is=Timing(as_is_s),
        left_out=Timing((0.3,)),
        all_s=0.7,
        latency_s=0.1,
        tcp_loss=0.01,
        engine=engine if has_engine else None,
    )


def test_the_parts_come_from_headroom() -> None:
    found = Model.of(parts(), 4)
    assert found.default_s == 1.0
    assert found.computing_s == 0.3
    assert found.latency_s == pytest.approx(0.05)
    assert found.seconds_per_byte * NBYTES == pytest.approx(0.6)
    assert found.loss == 0.02
    unknown = Model.of(parts(has_engine=False), 4)
    assert unknown.seconds(Arm(codec="int8")) == pytest.approx(0.3 + unknown.latency_s)
