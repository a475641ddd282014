"""Tensors for the engine: what it can use as it is, and how it finds a reduction."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlayer.frontend.group.rows import RowCoder
from commlayer.frontend.group.tensors import (
    are_plain,
    copy_back,
    flatten,
    has_memory,
    is_stretch,
    reduction_kind,
    space,
)
from commlayer.scheduler.gradient import PendingGradient

SQUARE = torch.arange(6).to(torch.complex64).view(2, 3)


@pytest.mark.parametrize(
    ("tensor", "as_it_is"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(()), True),
        (torch.ones(4)[1:3], True),
        (torch.ones(2, 3).t(), False),
        (torch.ones(4)[::2], False),
        (SQUARE, True),
        (SQUARE.conj(), False),
        (SQUARE[0, :1].conj().imag, False),
        (torch.ones(3).to_sparse(), False),
        (torch.ones(2, device="meta"), False),
    ],
    ids=[
        "plain",
        "scalar",
        "slice",
        "transposed",
        "strided",
        "complex",
        "conjugate",
        "negative",
        "sparse",
        "elsewhere",
    ],
)
def test_memory_that_has_the_elements_alone(tensor: torch.Tensor, as_it_is: bool) -> None:
    assert is_stretch(tensor) == as_it_is
    if tensor.is_cpu and tensor.layout is torch.strided:
        assert (flatten([tensor]) is tensor) == (space([tensor]) is tensor) == as_it_is
        assert torch.equal(flatten([tensor]).view(-1), tensor.reshape(-1))


def test_chunks_of_one_tensor_are_one_stretch() -> None:
    whole = torch.arange(6.0)
    first, second = whole.chunk(2)
    assert flatten([first, second]) is first
    assert flatten([second, first]).tolist() == [3, 4, 5, 0, 1, 2]


def test_tensors_that_lie_together_by_chance_are_no_stretch() -> None:
    """Each of them may be freed, and its memory used again, while the engine reads the others."""
    whole = np.arange(6.0)
    tensors = [torch.from_numpy(part) for part in np.split(whole, 2)]
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + tensors[0].nbytes
    assert flatten(tensors) is not tensors[0]
    assert flatten(tensors).tolist() == whole.tolist()
    assert space(tensors) is not tensors[0]


def test_results_reach_tensors_of_the_inference_mode_from_any_thread() -> None:
    with torch.inference_mode():
        made = torch.zeros(2, 3).t()
    usual = torch.zeros(3, 2, requires_grad=True)
    copy_back([(torch.arange(6.0), [made]), (torch.ones(6), [usual])])
    assert made.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]
    assert not usual.is_inference()
    assert usual.grad_fn is None
    assert usual.sum() == 6


def test_rows_are_decoded_to_tensors_of_the_inference_mode_from_any_thread() -> None:
    coder = RowCoder("int8", 1, torch.bfloat16, 0, [0])
    source = coder.encoded(torch.ones(8, dtype=torch.bfloat16), [4, 4])
    with torch.inference_mode():
        outputs = [torch.zeros(8, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16).t()]
    for output in outputs:
        coder.decode(source, output, [4, 4])
        assert (output[:4] == 1).all()


def test_a_reduction_is_found_by_its_operator() -> None:
    """It is asked for by the hash of the operator."""
    names = [name for name in dist.ReduceOp.RedOpType.__members__ if name not in ("PREMUL_SUM", "UNUSED")]
    ops = [dist.ReduceOp(getattr(dist.ReduceOp, name)) for name in names]
    for name, op in zip(names, ops, strict=True):
        kind = reduction_kind([torch.ones(2, dtype=torch.int32)], op)
        assert kind is not None
        assert kind.reduction == name
    scaled = reduction_kind([torch.ones(2)], dist._make_nccl_premul_sum(2.0))
    assert scaled is not None
    assert scaled.is_scaled


class Wrapper(torch.Tensor):
    """Of a tensor that it does not have here."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise NotImplementedError


def test_wrappers_of_tensors_have_no_memory_for_the_engine() -> None:
    wrapper = Wrapper._make_wrapper_subclass(Wrapper, (3,))
    assert not is_stretch(wrapper)
    assert not are_plain([wrapper])
    assert not are_plain([torch.ones(3), wrapper])
    assert are_plain([torch.nn.Parameter(torch.ones(3)), torch.ones(3)])
    assert has_memory(PendingGradient)  # it gives the address of the gradient, and waits for that
