"""reduce_gradient: its use of scheduler, loss and compress, and its calls of the group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlayer import ByLayer, ConfigError, Policy, Tolerance
from commlayer.compress.feedback import Feedback
from commlayer.errors import PeerLostError
from commlayer.frontend.gradients.gradient import Place, Reduction, reduce_gradient
from commlayer.frontend.gradients.reducer import real
from commlayer.frontend.work.work import CommWork
from tests.fake_transport import FakeHandle
from tests.residual import total

PACKET_BYTES = 64
FLOATS = PACKET_BYTES // 4
SIZES = (3 * FLOATS, FLOATS + 5)


class LossyHandle(FakeHandle):
    def __init__(self, missing: list[tuple[int, int]]) -> None:
        super().__init__()
        self._missing = missing

    def missing(self) -> list[tuple[int, int]]:
        return self._missing


class Group:
    """A group of one that doubles gradients, and loses the given ranges."""

    packet_bytes = PACKET_BYTES
    who = "rank 3"

    def __init__(self, *, can_lose: bool = True, missing: list[tuple[int, int]] | None = None) -> None:
        self.can_lose = can_lose
        self.lost = missing or []
        self.failure: BaseException | None = None
        self.calls: list[tuple[str, Policy, set[int]]] = []
        self.ops: list[Any] = []

    def rank(self) -> int:
        return 3

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor], options: Any, *, policy: Policy) -> CommWork:
        self.ops.append(options.reduceOp.op)
        return self.start("allreduce", tensors[0], tensors[0], policy, None)

    def allreduce_from(
        self,
        source: Tensor,
        target: Tensor,
        options: Any,
        protect: Tensor | None = None,
        *,
        policy: Policy,
        key: int = 0,  # noqa: ARG002
    ) -> CommWork:
        self.ops.append(options.reduceOp.op)
        return self.start("allreduce_from", source, target, policy, protect)

    def all_gather_single(self, output: Tensor, shard: Tensor, *, policy: Policy) -> CommWork:
        self.calls.append(("all_gather_single", policy, set()))
        output.copy_(shard.expand_as(output))
        handle = FakeHandle()
        handle.end(self.failure)
        return CommWork(handle, [output])

    def start(self, name: str, source: Tensor, target: Tensor, policy: Policy, protect: Tensor | None) -> CommWork:
        words = [] if protect is None else protect.tolist()
        self.calls.append(
            (name, policy, {64 * at + i for at, word in enumerate(words) for i in range(64) if word >> i & 1})
        )
        real(target).copy_(2 * real(source))
        handle = LossyHandle(self.lost)
        handle.end(self.failure)
        return CommWork(handle, [target])


def reduction(group: Group, tolerance: Tolerance | None = None) -> tuple[Reduction, list[tuple[int, Any]]]:
    counted: list[tuple[int, Any]] = []
    made: Any = group
    return Reduction(made, Feedback(), tolerance, lambda *each: counted.append(each)), counted


def gradients() -> tuple[Tensor, list[Tensor]]:
    return torch.arange(1.0, sum(SIZES) + 1), [torch.zeros(size) for size in SIZES]


@pytest.mark.parametrize("can_lose", [True, False])
def test_lost_contributions_are_added_and_protected_one_step_later(can_lose: bool) -> None:
    group = Group(can_lose=can_lose, missing=[(8, 12)])
    shared, counted = reduction(group)
    buffer, parameters = gradients()
    policy = Policy(loss_bound=0.1)
    averaged = reduce_gradient(buffer, parameters, policy, shared).wait()
    assert averaged.tolist() == [2 * value for value in range(1, sum(SIZES) + 1)]
    assert counted == [(buffer.nbytes, group.lost)]
    if not can_lose:
        assert averaged is buffer
        assert group.calls == [("allreduce", Policy(loss_bound=0.1), set())]
        return
    assert total(shared.feedback, parameters[0])[:6].tolist() == [0, 0, 3, 4, 5, 0]
    group.lost = []
    buffer = gradients()[0]
    averaged = reduce_gradient(buffer, parameters, policy, shared).wait()
    assert averaged[:6].tolist() == [2, 4, 12, 16, 20, 12]
    assert not shared.feedback
    assert [call[::2] for call in group.calls] == [("allreduce_from", set()), ("allreduce_from", {0})]


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_sums_of_halves_do_not_overflow(dtype: torch.dtype) -> None:
    """The group doubles what it gets, as a sum of two ranks."""
    group = Group()
    buffer, parameter = torch.full((8,), 40_000.0).to(dtype), torch.zeros(8, dtype=dtype)
    averaged = reduce_gradient(buffer, [parameter], Policy(), reduction(group)[0]).wait()
    is_sum = dtype != torch.bfloat16
    assert group.ops == [dist.ReduceOp.SUM if is_sum else dist.ReduceOp.AVG]
    assert torch.equal(real(averaged), real(torch.full((8,), 40_000.0 if is_sum else 80_000.0).to(dtype)))


def test_what_was_lost_of_halves_waits_undivided() -> None:
    """Another codec may add it to gradients as they are."""
    group = Group(missing=[(0, 4)])
    shared, _ = reduction(group)
    buffer, parameter = torch.full((8,), 40_000.0, dtype=torch.float16), torch.zeros(8, dtype=torch.float16)
    averaged = reduce_gradient(buffer, [parameter], Policy(loss_bound=0.1), shared).wait()
    assert (averaged == 40_000).all()
    assert total(shared.feedback, parameter).tolist() == [40_000] * 2 + [0] * 6


def test_a_residual_is_added_under_any_later_policy() -> None:
    group = Group()
    shared, _ = reduction(group)
    buffer, parameters = gradients()
    shared.feedback.keep(torch.ones(sum(SIZES)), parameters, [0, SIZES[0]], [(4 * SIZES[0], 4)])
    averaged = reduce_gradient(buffer, parameters, Policy(), shared).wait()
    assert averaged[SIZES[0]] == 2 * (SIZES[0] + 2)
    shared.feedback.keep(torch.ones(sum(SIZES)), parameters, [0, SIZES[0]], [(4 * SIZES[0], 4)])
    reduce_gradient(gradients()[0], parameters, Policy(loss_bound=0.1, treatment="zero"), shared).wait()
    assert [call[::2] for call in group.calls] == [("allreduce", set()), ("allreduce_from", {3})]


def test_rescaling_needs_no_memory_of_its_own() -> None:
    group = Group(missing=[(0, 4)])
    shared, counted = reduction(group)
    buffer, parameters = gradients()
    assert reduce_gradient(buffer, parameters, Policy(loss_bound=0.1, treatment="rescale"), shared).wait() is buffer
    assert counted == [(buffer.nbytes, [(0, 4)])]
    assert not shared.memory
    assert not shared.feedback


def low_rank_buckets(group: Group, *, lasts: tuple[bool, ...]) -> tuple[list[Any], Reduction]:
    """The futures of buckets of a matrix and a vector each, with operations averaged by `group`."""
    shared, _ = reduction(group)
    policy, futures = Policy(codec="powersgd:1", exact_steps=0, loss_bound=0.1), []
    for index, is_last in enumerate(lasts):
        parameters = [torch.zeros(20, 30), torch.zeros(7)]
        place = Place(index, len(lasts), is_last=is_last)
        futures.append(reduce_gradient(torch.ones(607), parameters, policy, shared, place=place))
    return futures, shared


def test_right_factors_go_out_with_the_last_bucket() -> None:
    group = Group()
    (first,), _ = low_rank_buckets(group, lasts=(False,))
    assert not first.done()
    assert len(group.calls) == 2  # left factors, and the vector
    group = Group()
    futures, shared = low_rank_buckets(group, lasts=(False, True))
    assert len(group.calls) == 2 * 2 + 2
    assert {(policy.codec, policy.loss_bound) for _, policy, _ in group.calls} == {("bf16", 0.0)}
    for future in futures:
        torch.testing.assert_close(future.wait(), torch.full((607,), 2.0))  # the group doubles; ones have rank 1
    assert len(shared.low_rank.state_dict()["powersgd"]["errors"]) == 2


def test_a_failure_fails_the_buckets_of_the_step() -> None:
    group = Group()
    group.failure = PeerLostError("rank 1 is gone")
    futures, shared = low_rank_buckets(group, lasts=(False, True))
    assert len(group.calls) == 2 * 2  # no right factors
    for future in futures:
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            future.wait()
    assert not shared.low_rank.state_dict()["powersgd"]["errors"]


def test_buckets_of_a_step_without_a_last_one_fail_with_the_next() -> None:
    (future,), shared = low_rank_buckets(Group(), lasts=(False,))
    shared.low_rank.begin_step(3, 1.0, "rank 3")
    with pytest.raises(RuntimeError, match="rank 3: this step ended before the hook of its last bucket"):
        future.wait()


def test_the_largest_values_are_gathered_reliably_and_the_others_wait() -> None:
    group, parameters = Group(), [torch.zeros(20, 30), torch.zeros(7)]
    shared, _ = reduction(group, Seen(7, 0.25))
    policy = Policy(codec="topk:0.01", exact_steps=0, priority=2)
    buffer, sent = torch.ones(607), [0, 1, 2, 3, 5, 599]
    buffer[[5, 599]] = 3
    averaged = reduce_gradient(buffer, parameters, policy, shared).wait()
    wanted = torch.zeros(607)
    wanted[sent], wanted[[5, 599]], wanted[600:] = 1, 3, 2  # the group doubles what it all-reduces
    assert torch.equal(averaged, wanted)
    assert [(name, one.codec, one.loss_bound, one.priority) for name, one, _ in group.calls] == [
        ("allreduce_from", "bf16", 0.0, 2),
        ("all_gather_single", "none", 0.0, 2),
    ]
    left = torch.ones(600)
    left[sent] = 0
    assert torch.equal(total(shared.feedback, parameters[0]).view(-1), left)
    group.failure = PeerLostError("rank 1 is gone")
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        reduce_gradient(torch.ones(607), parameters, policy, shared).wait()
    assert torch.equal(total(shared.feedback, parameters[0]).view(-1), left)


class Seen(Tolerance):
    """Reliable for the parameter of one size, and notes its observations."""

    def __init__(self, size: int, rest: float) -> None:
        self.size, self.rest = size, rest
        self.seen: list[tuple[int, int, float]] = []

    def loss_bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002
        return 0.0 if parameter.numel() == self.size else self.rest

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:
        self.seen.append((step, bucket, float(gradients[0])))


def test_a_tolerance_gives_the_bound_and_sees_the_average() -> None:
    tolerance = Seen(SIZES[1], 0.25)
    group = Group()
    shared, _ = reduction(group, tolerance)
    buffer, parameters = gradients()
    reduce_gradient(buffer, parameters, Policy(), shared, place=Place(1, 3, step=7)).wait()
    assert group.calls == [("allreduce_from", Policy(loss_bound=0.25), {3, 4})]
    assert tolerance.seen == [(7, 1, 2.0)]
    with pytest.raises(ConfigError, match=r"^rank 3: Seen.loss_bound for step 0 .* returned 0.9: use"):
        reduce_gradient(buffer, parameters, Policy(), reduction(group, Seen(0, 0.9))[0])


def test_a_buffer_has_the_class_of_its_place() -> None:
    group = Group()
    buffer, parameters = gradients()
    for index in range(3):
        reduce_gradient(buffer, parameters, Policy(priority=3), reduction(group)[0], place=Place(index, 3)).wait()
    assert [policy.priority for _, policy, _ in group.calls] == [5, 3, 1]


def test_a_failure_is_raised_and_nothing_is_counted_or_kept() -> None:
    group = Group(missing=[(0, 4)])
    group.failure = PeerLostError("rank 1 is lost")
    shared, counted = reduction(group)
    buffer, parameters = gradients()
    future = reduce_gradient(buffer, parameters, Policy(loss_bound=0.1), shared)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        future.wait()
    assert not counted
    assert not shared.feedback


def test_starts_say_where_gradients_begin() -> None:
    group = Group(missing=[(4 * (SIZES[1] + 2), 4)])
    shared, _ = reduction(group)
    buffer, (first, second) = gradients()
    reduce_gradient(buffer, [second, first], Policy(loss_bound=0.1), shared, starts=[0, SIZES[1]]).wait()
    assert total(shared.feedback, first)[:4].tolist() == [0, 0, SIZES[1] + 3, 0]


def test_a_tolerance_of_another_model_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    buffer, parameters = gradients()
    with pytest.raises(ConfigError, match="belongs to another model"):
        reduce_gradient(buffer, parameters, Policy(), reduction(Group(), ByLayer(model, {}, 0.1))[0])
