"""A segment's gradients accumulate in one buffer, as in tensors of their own, and are reduced as a whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from commlayer import ConfigError
from commlayer.scheduler.gradient import PendingGradient, PendingReduction
from commlayer.scheduler.segment import Segment

SHAPES = [(3, 4), (4,), (), (2, 2)]


class Wire:
    """Reductions that double the buffer when they are waited for."""

    def __init__(self) -> None:
        self.started: list[tuple[Tensor, int]] = []
        self.waits = 0

    def start(self, buffer: Tensor, priority: int) -> Callable[[], None]:
        self.started.append((buffer, priority))

        def wait() -> None:
            self.waits += 1
            buffer.mul_(2)

        return wait


def made(wire: Wire) -> Segment:
    generator = torch.Generator().manual_seed(1)
    return Segment([nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES], wire.start, 2)


def backward(parameters: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    sum((parameter * torch.randn(parameter.shape, generator=generator)).sum() for parameter in parameters).backward()  # type: ignore[union-attr]


def unneeded(_: PendingReduction) -> bool:
    return False


def gradients(segment: Segment) -> list[Tensor]:
    found = [parameter.grad for parameter in segment.parameters]
    return [gradient.clone() for gradient in found if gradient is not None]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("clears", ["to None", "to zeros", "never"])
@pytest.mark.parametrize("arms", [True, False])
def test_gradients_are_those_of_tensors_of_their_own(clears: str, arms: bool) -> None:
    wire = Wire()
    ours, plain = made(wire), made(Wire()).parameters
    optimizer = torch.optim.SGD(ours.parameters, lr=0.1)
    for step in range(4):
        if arms:
            ours.arm(unneeded)
        for part in range(3):
            backward(ours.parameters, 10 * step + part)
            backward(plain, 10 * step + part)
        ours.arm(unneeded)
        reduction = ours.launch(3, step)
        reduction.place()
        assert all(isinstance(parameter.grad, PendingGradient) for parameter in ours.parameters)
        for parameter in plain:
            assert parameter.grad is not None
            parameter.grad.div_(3).mul_(2)
        reduction.wait()
        assert same(gradients(ours), [parameter.grad for parameter in plain if parameter.grad is not None])
        if clears != "never":
            optimizer.zero_grad(set_to_none=clears == "to None")
            for parameter in plain:
                parameter.grad = None
    assert [priority for _, priority in wire.started] == [0, 1, 2, 3]
    assert len({buffer.data_ptr() for buffer, _ in wire.started}) == 1
    assert all(buffer.numel() == 12 + 4 + 1 + 4 for buffer, _ in wire.started)


def test_a_reduction_that_nobody_waited_for_ends_before_its_buffer_is_filled_again() -> None:
    wire = Wire()
    segment = made(wire)
    segment.arm(unneeded)
    backward(segment.parameters, 1)
    segment.launch(1, 0).place()
    for parameter in segment.parameters:
        parameter.grad = None
    segment.arm(unneeded)
    assert wire.waits == 1
    assert all(not gradient.any() for gradient in gradients(segment))


def test_gradients_in_flight_are_kept_and_added_to() -> None:
    wire = Wire()
    segment = made(wire)
    segment.arm(unneeded)
    backward(segment.parameters, 1)
    first = [2 * gradient for gradient in gradients(segment)]
    segment.launch(1, 0).place()
    segment.arm(unneeded)
    assert same(gradients(segment), first)


def test_a_result_that_is_needed_keeps_its_buffer() -> None:
    wire = Wire()
    segment = made(wire)
    needed: list[PendingReduction] = []
    for step in range(5):
        segment.arm(lambda reduction: any(wanted is reduction for wanted in needed))
        backward(segment.parameters, step)
        before = gradients(segment)
        needed[:] = [*needed[-1:], segment.launch(1, 0)]
        for parameter in segment.parameters:
            parameter.grad = None
        needed[-1].wait()
        assert same([gradient / 2 for gradient in needed[-1].gradients.values()], before)
        if step:
            assert needed[0].gradients.keys() == needed[1].gradients.keys()
            assert wire.started[-1][0].data_ptr() != wire.started[-2][0].data_ptr()
    assert len({buffer.data_ptr() for buffer, _ in wire.started}) == 3


def test_an_absent_gradient_is_zeros_and_a_foreign_one_is_copied() -> None:
    segment = made(Wire())
    segment.arm(unneeded)
    backward(segment.parameters, 1)
    one, other = segment.parameters[:2]
    one.grad, other.grad = None, torch.full_like(other, 7.0)
    found = segment.launch(1, 0).gradients
    assert not found[one].any()
    assert torch.equal(found[other], torch.full((4,), 7.0))


def test_gradients_have_the_strides_of_their_parameters() -> None:
    transposed, gaps = nn.Parameter(torch.randn(3, 4).t()), nn.Parameter(torch.randn(4, 6)[:, :3])
    segment = Segment([transposed, gaps], Wire().start, 1)
    segment.arm(unneeded)
    backward(segment.parameters, 1)
    assert [gradient.stride() for gradient in gradients(segment)] == [(1, 4), (3, 1)]
    assert transposed.grad is not None
    assert transposed.grad.stride() == transposed.stride()


def counted(segment: Segment, parameters: list[Tensor]) -> list[bool]:
    return [segment.count(parameter) for parameter in parameters]


def test_a_step_is_complete_when_each_backward_pass_has_had_each_gradient() -> None:
    segment = made(Wire())
    first, *others = segment.parameters
    for parameters in (2 * segment.parameters, [first, *others, *others]):  # hooks are new; a gradient is absent
        segment.arm(unneeded)
        assert not any(counted(segment, parameters))
        segment.launch(1, 0)
    for _ in range(2):
        segment.arm(unneeded)
        assert counted(segment, [*others, first, *others, first]) == [False] * (2 * len(others) + 1) + [True]
        segment.launch(1, 0)
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) was accumulated after its reduction.*use_reentrant=False"):
        segment.count(first)


def test_a_step_is_not_complete_before_launch_if_gradients_come_twice_in_a_pass() -> None:
    segment = made(Wire())
    for _ in range(3):
        segment.arm(unneeded)
        assert not any(counted(segment, [*segment.parameters, *segment.parameters, segment.parameters[0]]))
        segment.launch(1, 0)


def test_a_step_that_failed_leaves_no_counts() -> None:
    segment = made(Wire())
    segment.arm(unneeded)
    counted(segment, 2 * segment.parameters)
    segment.launch(1, 0)
    segment.arm(unneeded)
    assert not any(counted(segment, segment.parameters))
    segment.restart()
    assert counted(segment, 2 * segment.parameters) == [False] * (2 * len(segment.parameters) - 1) + [True]
