from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import direct, hierarchical
from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import Buffer, Plan, StepKind
from commlayer.plans.select import plan_for
from commlayer.plans.settings import Settings
from tests.unit.plans.conformance import TENSORS, barrier_holds, conform_all, weights

HOSTS = (
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2), (3,)),
    ((0, 1, 2), (3, 4, 5), (6, 7)),
    ((0, 8), (1, 7), (2, 6), (3, 4, 5)),
)


@st.composite
def partitions(draw: st.DrawFn) -> Hosts:
    """Ranks 0..n-1 dealt to at least two hosts, some of them to share one."""
    n = draw(st.integers(3, 9))
    count = draw(st.integers(2, n - 1))
    places = draw(
        st.permutations(
            [*range(count), *draw(st.lists(st.integers(0, count - 1), min_size=n - count, max_size=n - count))]
        )
    )
    return tuple(sorted(tuple(rank for rank in range(n) if places[rank] == host) for host in range(count)))


@pytest.mark.parametrize("staging_bytes", [256, 2048])
@pytest.mark.parametrize("deterministic", [False, True])
def test_slots_are_used_again_in_time(monkeypatch: pytest.MonkeyPatch, deterministic: bool, staging_bytes: int) -> None:
    """With one slot of each kind a segment that comes too early would soon overwrite the one before it. In the smaller
    staging, a reduce-scatter has no room for the parts of all ranks at once."""
    monkeypatch.setattr(hierarchical, "NETWORK_LAG", 1)
    monkeypatch.setattr(direct, "ORDERED_SEGMENTS", 1)
    s = Settings(segment_bytes=200, staging_bytes=staging_bytes, deterministic=deterministic, exchange_limit_bytes=0)
    for seed in range(8):
        conform_all(hierarchical, ((0, 1), (2,), (3, 4)), 500, s, seed=seed)


@settings(max_examples=120)
@given(
    hosts=st.one_of(st.sampled_from(HOSTS), partitions()),
    numel=st.integers(0, 1009),
    choices=st.fixed_dictionaries(
        {
            "segment_bytes": st.integers(100, 900),
            "staging_bytes": st.sampled_from((512, 1000, 4096)),
            "exchange_limit_bytes": st.sampled_from((0, 1 << 20)),
            "deterministic": st.booleans(),
        }
    ),
    chance=st.data(),
    **TENSORS,
)
def test_any_shape(hosts: Hosts, numel: int, choices: dict[str, Any], chance: st.DataObject, **tensors: Any) -> None:
    s = Settings(**choices, weights=chance.draw(weights(len(hosts))))
    conform_all(hierarchical, hosts, numel, s, **tensors)


def test_messages_of_large_jobs_fill_packets() -> None:
    """125 hosts of 8: at 1,432 bytes a packet, 25 MiB take 5,037 packets a rank at least."""
    hosts = tuple(tuple(range(first, first + 8)) for first in range(0, 1000, 8))
    steps = hierarchical.all_reduce(3, hosts, 25 << 18, 4, 1, Settings()).steps
    sent = steps["length"][steps["kind"] == StepKind.SEND]
    assert len(steps) < 10_000
    assert int(((sent + 1431) // 1432).sum()) < 1.2 * 5037


def test_short_messages_of_large_jobs_take_one_network_step() -> None:
    """Every owner sends its contribution to all others, and nobody sends a sum."""
    hosts = tuple(tuple(range(first, first + 8)) for first in range(0, 1000, 8))
    for rank in (0, 8):
        steps = hierarchical.all_reduce(rank, hosts, 1, 4, 1, Settings()).steps
        assert int((steps["kind"] == StepKind.SEND).sum()) == len(hosts) - 1


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_barrier(hosts: Hosts) -> None:
    barrier_holds(lambda r: hierarchical.barrier(r, hosts), sum(map(len, hosts)))


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_data_crosses_the_network_once_per_host(collective: str) -> None:
    """Two hosts of four: each sends half of an all-reduce twice; one sends a broadcast, the other a reduction once."""
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    length = 1 << 20
    sent = 0
    for rank in hosts[0]:
        arguments = [1, 5] if collective == "reduce" else [1]
        steps = getattr(hierarchical, collective)(rank, hosts, length, 1, *arguments, Settings()).steps
        sends = steps[steps["kind"] == StepKind.SEND]
        assert set(sends["peer"]) <= {rank + 4, *hosts[1]}
        sent += int(sends["length"].sum())
    assert sent == length


@pytest.mark.parametrize("staging_bytes", [256, 2048])
def test_sums_are_sent_before_their_memory_is_used_again(monkeypatch: pytest.MonkeyPatch, staging_bytes: int) -> None:
    """Whatever the order of events: with 256 bytes of staging, many rounds of a reduce-scatter send nothing."""
    monkeypatch.setattr(hierarchical, "NETWORK_LAG", 1)
    s = Settings(segment_bytes=200, staging_bytes=staging_bytes)
    for rank in range(5):
        plan = hierarchical.reduce_scatter(rank, ((0, 1), (2,), (3, 4)), 100, 8, 1, s)
        steps = plan.steps
        before = [0] * len(steps)  # of each step, a bit for each step that ends before it begins
        sent: list[tuple[int, int, int]] = []
        for i, step in enumerate(steps):
            first, count = int(step["successor_first"]), int(step["successor_count"])
            for successor in plan.successors[first : first + count].tolist():
                before[successor] |= before[i] | 1 << i
            if step["kind"] == StepKind.SEND and step["source"] == Buffer.SCRATCH:
                sent.append((i, int(step["source_offset"]), int(step["length"])))
            elif step["kind"] == StepKind.COPY and step["target"] == Buffer.SCRATCH:
                at, length = int(step["target_offset"]), int(step["length"])
                assert all(
                    before[i] >> send & 1 for send, start, size in sent if start < at + length and at < start + size
                )
        assert sent or rank == 2  # alone on its host, it sends its INPUT


def free_to_leave(plan: Plan) -> list[bool]:
    """Of each send: whether it waits for nothing that comes from another host."""
    waits = [False] * len(plan.steps)
    free = []
    for i, step in enumerate(plan.steps):
        waits[i] |= step["kind"] in (StepKind.RECV_COPY, StepKind.RECV_REDUCE)
        first, count = int(step["successor_first"]), int(step["successor_count"])
        for successor in plan.successors[first : first + count].tolist():
            waits[successor] |= waits[i]
        if step["kind"] == StepKind.SEND:
            free.append(not waits[i])
    return free


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"codecs": ("bf16", "bf16")},
        {"codecs": ("int4", "int8")},
        {"partial": True},
        {"partial": True, "partial_message_bytes": 2048},
        {"staging_bytes": 512, "segment_bytes": 4096},  # several rounds through staging for a segment
    ],
    ids=str,
)
def test_many_segments_fill_a_long_path(how: dict[str, Any]) -> None:
    """Before the first answer, each owner sends the contributions of so many segments."""
    s = Settings(**{"segment_bytes": 1024, "exchange_limit_bytes": 0, **how})
    for hosts in (((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))):
        for rank in range(2 * len(hosts)):
            plan = plan_for("all_reduce", rank=rank, hosts=hosts, numel=1 << 17, itemsize=4, settings=s)
            free = free_to_leave(plan)
            assert sum(free) == (len(hosts) - 1) * (hierarchical.NETWORK_LAG + 1)  # to each owner of the same shard
            assert len(free) > 2 * sum(free)
