"""Tensors for the engine: what it can use as it is, and how it finds a reduction."""

import pytest
import torch
import torch.distributed as dist

from commlayer.frontend.group.tensors import flatten, is_stretch, reduction_kind, space

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
