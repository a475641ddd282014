"""Error feedback for losses: no contribution is forgotten, even when DDP makes other buckets."""

import io
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from commlayer.compress.feedback import Feedback
from commlayer.errors import ConfigError
from commlayer.plans import direct
from commlayer.plans.settings import Settings
from commlayer.transport.base import DType, Op, Qos, Request
from tests.residual import total
from tests.world import PATIENCE_S, Team, World

SIZES = (70_001, 3, 180_000, 1, 90_000)
STEPS = 8


def test_parts_are_kept_by_parameter_and_added_once() -> None:
    a, b, c = torch.zeros(4), torch.zeros(2, 3), torch.zeros(5)
    residual = Feedback()
    buffer = torch.arange(1.0, 11.0)
    residual.keep(buffer, [a, b], [0, 4], [(0, 4), (12, 12), (36, 4)])
    assert total(residual, a).tolist() == [1, 0, 0, 4]
    assert total(residual, b).tolist() == [[5, 6, 0], [0, 0, 10]]
    regrouped = torch.ones(11)
    added = residual.add_to(regrouped, [c, b], [0, 5])
    assert added.late == [(5, 7), (10, 11)]
    assert regrouped.tolist() == [1, 1, 1, 1, 1, 6, 7, 1, 1, 1, 11]
    assert total(residual, b).sum() == 21  # until the step counts
    residual.spend(added)
    assert residual.add_to(regrouped, [b], [5]).late == []
    assert regrouped.sum() == 11 + 21
    assert total(residual, a).sum() == 5


def test_values_that_are_not_finite_are_not_kept() -> None:
    a = torch.zeros(3)
    residual = Feedback()
    residual.keep(torch.tensor([torch.inf, torch.nan, 2.0]), [a], [0], [(0, 12)])
    assert total(residual, a).tolist() == [0, 0, 2]


def test_the_residual_is_saved_in_the_order_in_which_parameters_are_met() -> None:
    residual = Feedback()
    a, b, c = torch.zeros(4), torch.zeros(3), torch.zeros(2)
    residual.meet([c])
    residual.meet([a, c, b])
    residual.keep(torch.arange(1.0, 10.0), [a, b, c], [0, 4, 7], [(0, 8), (16, 4), (32, 4)])
    file = io.BytesIO()
    torch.save(residual.state_dict(), file)
    restored = Feedback()
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    c, b, a = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    restored.meet([c])
    assert total(restored, c).tolist() == [0, 9]
    assert len(restored.state_dict()["kept"]) == 3  # also of those that have not been met
    buffer = torch.ones(7)
    restored.spend(restored.add_to(buffer, [a, b], [0, 4]))
    assert buffer.tolist() == [2, 3, 1, 1, 6, 1, 1]
    restored.check_met()
    assert len(restored.state_dict()["kept"]) == 1


def test_numbers_do_not_depend_on_how_large_buckets_are() -> None:
    saved, restored = Feedback(), Feedback()
    model = [torch.zeros(2) for _ in range(4)]
    saved.meet(model)  # one bucket
    saved.keep(torch.arange(8.0), model, [0, 2, 4, 6], [(0, 32)])
    restored.load_state_dict(saved.state_dict())
    for pair in (model[2:], model[:2]):  # two, as DDP makes them: from the model's end
        restored.meet(pair)
    assert [total(restored, parameter).tolist() for parameter in model] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_parameters_keep_their_numbers_when_an_earlier_state_comes_back() -> None:
    residual = Feedback()
    a, b = torch.zeros(2), torch.zeros(2)
    residual.meet([a, b])
    residual.keep(torch.arange(1.0, 5.0), [a, b], [0, 2], [(0, 16)])
    saved = residual.state_dict()
    residual.clear()
    assert not residual
    residual.load_state_dict(saved)
    residual.meet([b, a])  # regrouped
    assert (total(residual, a).tolist(), total(residual, b).tolist()) == ([1, 2], [3, 4])


def test_the_residual_of_an_unused_parameter_waits() -> None:
    residual = Feedback()
    a, b = torch.zeros(3), torch.zeros(3)
    residual.keep(torch.ones(6), [a, b], [0, 3], [(0, 24)])
    buffer = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 0.0])
    added = residual.add_to(buffer, [a, b], [0, 3])
    assert added.late == [(3, 6)]
    residual.spend(added)
    assert buffer.tolist() == [0, 0, 0, 1, 6, 1]
    residual.keep(torch.zeros(6), [a, b], [0, 3], [(0, 24)])  # nothing of it is lost again, as there was nothing
    assert [len(entries) for entries in residual.state_dict()["kept"].values()] == [1]
    assert residual.add_to(torch.ones(6), [a, b], [0, 3]).late == [(0, 3)]


def test_the_residual_takes_another_scale() -> None:
    residual = Feedback()
    a = torch.zeros(2)
    residual.meet([a])
    residual.keep(torch.tensor([4.0, 8.0]), [a], [0], [(0, 8)])
    saved = residual.state_dict()
    residual.begin_step(0, 0.5, "rank 0")
    assert total(residual, a).tolist() == [2, 4]
    assert saved["kept"][0][0][1].tolist() == [4, 8]


def test_the_residual_of_another_model_is_refused() -> None:
    restored = Feedback()
    restored.load_state_dict({"kept": {0: [(3, torch.ones(2), True)]}, "sizes": [5]})
    with pytest.raises(ConfigError, match="has 5 elements for parameter 0 from the end, but the parameter has 4"):
        restored.meet([torch.zeros(4)])
    restored = Feedback()
    restored.load_state_dict({"kept": {7: [(0, torch.ones(1), True)]}, "sizes": [4] * 8})
    restored.meet([torch.zeros(4)])
    with pytest.raises(ConfigError, match="has values for parameter 7 from the end, but the model has 1"):
        restored.check_met()


def test_a_residual_of_another_memory_format_is_refused() -> None:
    """Its values lie in the order of memory."""
    images, kept = torch.zeros(4, 3, 2, 2), Feedback()
    kept.meet([images])
    kept.keep(torch.arange(48.0), [images], [0], [(0, 192)])
    for given in (images, torch.zeros(4, 3, 2, 4)[..., ::2]):
        restored = Feedback()
        restored.load_state_dict(kept.state_dict())
        restored.meet([given])
    restored = Feedback()
    restored.load_state_dict(kept.state_dict())
    with pytest.raises(
        ConfigError, match=r"in the order \[0, 1, 2, 3\] in memory, and the parameter has \[0, 2, 3, 1\]"
    ):
        restored.meet([images.to(memory_format=torch.channels_last)])
    former = {name: value for name, value in kept.state_dict().items() if name != "orders"}
    restored = Feedback()
    restored.load_state_dict(former)
    restored.meet([images])


def bucket(order: list[int]) -> list[int]:
    """The elements where the gradients of these parameters begin."""
    return list(accumulate((SIZES[i] for i in order), initial=0))[:-1]


def train(team: Team, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums random gradients over steps and ranks; returns the updates, the residual, and this rank's exact sum."""
    group, residual = team[rank], Feedback()
    parameters = [torch.zeros(size) for size in SIZES]
    exact = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    settings = Settings(partial=True, partial_message_bytes=100 * group.packet_bytes)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step == STEPS // 2:
            saved, residual = residual.state_dict(), Feedback()
            residual.load_state_dict(saved)
        # DDP regroups after the first step: of a job, and again after a restart.
        order = [0, 1, 2, 3, 4] if step in (0, STEPS // 2) else [4, 2, 1, 3, 0]
        gradients = [torch.randn(size, generator=generator) for size in SIZES]
        source = torch.cat([gradients[i] for i in order])
        named, starts = [parameters[i] for i in order], bucket(order)
        residual.spend(residual.add_to(source, named, starts))
        target = torch.empty_like(source)
        plan = direct.partial_all_reduce(rank, group.size, len(source), 4, 1, settings)
        handle = group.submit(
            Request(plan, source.data_ptr(), target.data_ptr(), DType.F32, Op.SUM, timeout_s=PATIENCE_S, qos=Qos(0.06))
        )
        handle.wait()
        residual.keep(source, named, starts, handle.missing())
        for i, start in zip(order, starts, strict=True):
            parameters[i] += target[start : start + SIZES[i]]
            exact[i] += gradients[i]
    return torch.cat(parameters), torch.cat([total(residual, parameter) for parameter in parameters]), torch.cat(exact)


@pytest.mark.parametrize("size", [2, 3])
def test_updates_and_residuals_add_up_to_all_gradients(size: int) -> None:
    with World([(rank,) for rank in range(size)], loss=0.05) as world, world.open_group() as team:
        results = world.on_each(lambda rank: train(team, rank))
    applied = results[0][0]
    for replica, _, _ in results[1:]:
        assert torch.equal(replica, applied)
    left = torch.stack([rest for _, rest, _ in results]).double().sum(0)
    exact = torch.stack([sent for _, _, sent in results]).sum(0)
    assert (left != 0).any()
    torch.testing.assert_close(applied + left, exact, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(applied.double(), exact, rtol=1e-5, atol=1e-4)


def test_errors_are_kept_in_the_memory_of_the_last_ones() -> None:
    a, b = torch.zeros(6), torch.zeros(4)
    feedback, starts = Feedback(), [0, 6]
    feedback.meet([a, b])
    none = feedback.add_to(torch.ones(10), [a, b], starts)
    feedback.keep_errors(torch.arange(10.0), [a, b], starts, [(0, 20), (20, 20)], [], none)
    assert total(feedback, a).tolist() == [0, 1, 2, 3, 4, 5]
    assert total(feedback, b).tolist() == [6, 7, 8, 9]
    places = {stretch.values.data_ptr() for stretch in feedback._kept[a] + feedback._kept[b]}
    buffer = torch.ones(10)
    added = feedback.add_to(buffer, [a, b], starts)
    assert buffer.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert added.late == []
    feedback.spend(added)
    feedback.keep_errors(torch.full((10,), 0.5), [a, b], starts, [(0, 40)], [(8, 8)], added)
    assert {entry.values.data_ptr() for entry in feedback._kept[a] + feedback._kept[b] if not entry.late} == places
    assert feedback.add_to(torch.ones(10), [a, b], starts).late == [(2, 4)]


def test_errors_that_are_not_finite_are_kept_as_zero() -> None:
    a, feedback = torch.zeros(4), Feedback()
    feedback.meet([a])
    added = feedback.add_to(torch.ones(4), [a], [0])
    feedback.keep_errors(torch.tensor([1.0, torch.nan, torch.inf, -2.0]), [a], [0], [(0, 16)], [], added)
    assert total(feedback, a).tolist() == [1, 0, 0, -2]


def test_a_skipped_step_leaves_the_residual() -> None:
    a, feedback = torch.zeros(3), Feedback()
    feedback.keep(torch.ones(3), [a], [0], [(4, 8)])
    for _ in range(2):
        buffer = torch.ones(3)
        added = feedback.add_to(buffer, [a], [0])
        assert buffer.tolist() == [1, 2, 2]
        assert total(feedback, a).tolist() == [0, 1, 1]
    feedback.spend(added)
    assert not feedback


def test_the_residual_of_an_unused_parameter_does_not_grow() -> None:
    a, feedback = torch.zeros(4), Feedback()
    for _ in range(5):
        added = feedback.add_to(torch.zeros(4), [a], [0])
        feedback.spend(added)
        feedback.keep_errors(torch.ones(4), [a], [0], [(0, 16)], [(0, 8)], added)
    assert total(feedback, a).tolist() == [5] * 4
    assert len(feedback._kept[a]) <= 2
