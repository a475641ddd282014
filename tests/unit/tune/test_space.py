"""The settings that may be tried: numerics change only where that is allowed."""

import pytest

from commlayer.tools.tune.arm import Arm
from commlayer.tools.tune.space import ALLOWABLE, Space, bucket_mb


def of(
    *allowed: str,
    nbytes: float = 40 << 20,
    on_gloo: bool = False,
    has_network: bool = True,
    takes_hook: bool = True,
) -> Space:
    return Space.of(allowed, nbytes, on_gloo=on_gloo, has_network=has_network, takes_hook=takes_hook)


def test_the_default_is_the_first_arm_and_is_there_once() -> None:
    for on_gloo in (False, True):
        arms = of(*ALLOWABLE, on_gloo=on_gloo).arms()
        assert arms[0] == Arm()
        assert len(set(arms)) == len(arms)
        assert [arm.is_default for arm in arms[1:]] == [False] * (len(arms) - 1)
        assert all(arm.replaces_gloo == on_gloo for arm in arms[1:])


@pytest.mark.parametrize("allowed", [(), ("lossy",), ("compressed",), ("stale",), ALLOWABLE])
def test_numerics_change_only_where_it_is_allowed(allowed: tuple[str, ...]) -> None:
    needed = {need for arm in of(*allowed).arms() for need in arm.needs}
    assert needed == set(allowed)


def test_stale_steps_keep_no_residuals() -> None:
    stale = [arm for arm in of(*ALLOWABLE).arms() if arm.staleness]
    assert {(arm.codec, arm.loss_bound, arm.overlap) for arm in stale} == {
        (codec, 0.0, True) for codec in ("none", "bf16", "int8", "int4-int8")
    }


def test_sockets_are_tried_where_there_is_a_network() -> None:
    assert {arm.ports for arm in of().arms()} == {1, 4}
    assert {arm.ports for arm in of(has_network=False).arms()} == {1}


def test_packets_are_changed_where_there_are_any() -> None:
    space = of(*ALLOWABLE, has_network=False)
    assert {(arm.codec, arm.loss_bound) for arm in space.arms()} == {("none", 0.0)}
    assert {arm.staleness for arm in space.arms()} == {0, 1}


def test_a_job_without_ddp_gets_no_setting_of_ddp() -> None:
    """A job on one host was credited with a codec and overlap that nothing in it had used."""
    arms = of(*ALLOWABLE, on_gloo=True, has_network=False, takes_hook=False).arms()
    assert arms == [Arm(), Arm(replaces_gloo=True)]
    assert of(*ALLOWABLE, takes_hook=False).arms() == [Arm(), Arm(ports=4)]


def test_buckets_follow_the_gradients() -> None:
    assert of(nbytes=40 << 20).buckets_mb == (0.0, 3.3, 10.0)
    assert of(nbytes=1000).buckets_mb == (0.0,)


@pytest.mark.parametrize(("mib", "size"), [(0.05, 0.0), (0.1234, 0.12), (1.26, 1.3), (26.4, 26.0), (1234.5, 1234.0)])
def test_sizes_are_round(mib: float, size: float) -> None:
    assert bucket_mb(mib * 2**20) == size


def test_an_unknown_change_is_refused() -> None:
    with pytest.raises(ValueError, match="--allow fast: use some of lossy,compressed,stale"):
        of("fast")
