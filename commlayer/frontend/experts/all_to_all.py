"""All-to-all of rows in a codec: `all_to_all_single`, into a tensor; `all_to_all_single_autograd`, with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from ...config import Policy, whole
from ...dynamo import untraced
from .agreement import FACTS, check, facts, mismatch
from .exchange import Route, exchange, fault_of, group_of, start

INT8 = Policy(codec="int8")

Splits = Iterable[Any] | None
"""Rows per rank: a list, an array or a tensor. None: equal parts."""

ROWS_MAX = 2**48
"""More rows than any memory has; ranks tell each other their splits in 64 bits."""

CALLER = "all_to_all_single"


@untraced
def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  # torch's name
    output_split_sizes: Splits = None,
    input_split_sizes: Splits = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    policy: Policy = INT8,
) -> Work | None:
    """`torch.distributed.all_to_all_single` with rows in the codec of `policy`: `none`, `f16`, `bf16`, `int8`, `int4`.

    Sends `input_split_sizes[r]` rows (of dimension 0) of `input` to rank r, and receives `output_split_sizes[r]` rows
    of `output` from it; None: equal parts. Splits may be 0. Rows for other hosts are encoded, those of each rank by
    themselves, and rows for ranks of this host travel as they are. The types are float32, float64, bfloat16 and
    float16, with the codec `none` any type. Rounding errors are those of the codec (docs/compression.md); nothing keeps
    them. A value that is not finite makes its block NaN: 64 values of `int8`, 256 of `int4`, of that row or its
    neighbours.

    The ranks compare their splits first, in an exchange of a few numbers, for which this call waits. Returns the work
    with `async_op`, which ends when the rows are decoded, else None.

    Raises on every rank, before any row travels, MismatchError if the ranks' splits, types or policies differ, and
    ConfigError for arguments that make no sense (on the other ranks: MismatchError). Also the errors of collectives.
    """
    chosen = group_of(group, "all_to_all_single")
    fault = "" if output.dim() else "an output without dimensions"
    if not fault and output.shape[1:] != input.shape[1:]:
        fault = f"rows of shape {tuple(output.shape[1:])} in the output"
    if not fault and output.dtype != input.dtype:
        fault = f"an output of {output.dtype}: use one type"
    received, sent = _agreed(chosen, input, output, output_split_sizes, input_split_sizes, policy, fault)
    work = start(output, input, Route(chosen, sent, received, policy), async_op=async_op)
    if async_op:
        return work
    work.wait()
    return None


@untraced
def all_to_all_single_autograd(
    input: Tensor,  # noqa: A002  # torch's name
    output_split_sizes: Splits = None,
    input_split_sizes: Splits = None,
    group: dist.ProcessGroup | None = None,
    *,
    policy: Policy = INT8,
) -> Tensor:
    """The same as `all_to_all_single`, but returns the output, and gradients travel back with the same policy.

    The input must require gradients on all ranks or on none. Gradients of gradients do not exist.
    """
    chosen = group_of(group, "all_to_all_single_autograd")
    received, sent = _agreed(chosen, input, None, output_split_sizes, input_split_sizes, policy)
    return exchange([Route(chosen, sent, received, policy)], input)[0]


def _agreed(
    group: dist.ProcessGroup,
    rows: Tensor,
    output: Tensor | None,
    output_splits: Splits,
    input_splits: Splits,
    policy: Policy,
    fault: str = "",
) -> tuple[list[int], list[int]]:
    """The rows that this rank receives from each rank, and sends. Raises the same on all ranks, see above."""
    size = group.size()
    fault = fault or fault_of(policy, rows.dtype) or ("" if rows.dim() else "an input without dimensions")
    received = sent = [0] * size
    if not fault:
        sent, fault = _splits(rows.size(0), input_splits, size, "input")
    if not fault:
        rows_out = sum(sent) if output is None and output_splits is None else None if output is None else output.size(0)
        received, fault = _splits(rows_out, output_splits, size, "output")
    codec = policy.codec if isinstance(policy, Policy) else ""
    needs = output is None and rows.requires_grad and torch.is_grad_enabled()
    kind = f"{rows.dtype} rows of {rows.shape[1:].numel()} values, codec {codec!r}{', with gradients' * needs}"
    own = [*facts(kind, fault), *sent, *received]
    calls = [torch.empty(len(own), dtype=torch.int64, device="cpu") for _ in range(size)]
    dist.all_gather(calls, torch.tensor(own, dtype=torch.int64, device="cpu"), group=group)
    heard = [call.tolist() for call in calls]
    check(group, CALLER, kind, fault, [told[:FACTS] for told in heard])
    for source, target in itertools.product(range(size), repeat=2):
        theirs, expected = heard[source][FACTS + target], heard[target][FACTS + size + source]
        if theirs != expected:
            text = (
                f"rank {source} of the group sends {theirs} rows to rank {target}, which expects {expected}; make "
                f"input_split_sizes[{target}] of the one equal to output_split_sizes[{source}] of the other"
            )
            raise mismatch(group, CALLER, kind, source, text)
    return received, sent


def _splits(rows: int | None, given: Splits, size: int, name: str) -> tuple[list[int], str]:
    """Rows per rank, and the fault of these splits. `rows`: of the tensor; None: as many as the splits say."""
    if given is None:
        if rows is None or rows % size:
            return [0] * size, f"{rows} {name} rows do not divide among {size} ranks; pass {name}_split_sizes"
        return [rows // size] * size, ""
    try:
        plain = [number.item() if isinstance(number, Tensor) else number for number in given]
    except Exception as error:  # any value may be given; the other ranks must hear of it
        return [0] * size, f"{name}_split_sizes of type {type(given).__name__}: {error}; pass whole numbers, as a list"
    splits = [whole(number, -1) for number in plain]
    if len(splits) != size:
        return [0] * size, f"{name}_split_sizes={plain}: pass one number for each of {size} ranks"
    if min(splits) < 0 or max(splits) > ROWS_MAX:
        return [0] * size, f"{name}_split_sizes={plain}: use 0 or more rows, whole numbers"
    if rows is not None and sum(splits) != rows:
        return [0] * size, f"{name}_split_sizes={splits} are {sum(splits)} rows, and the {name} has {rows}"
    return splits, ""
