"""`choice_for`: the codecs that `codec="auto"` chooses from in a job, with their bytes and their speed on its CPUs."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch.optim import Optimizer

from ...compress.choice import Agree, Choice
from ...compress.codec import Codec, CodecPair, Form, codec_of
from ...compress.content import Candidate
from ...compress.optimizer import check_optimizer
from ...compress.powersgd import PowerSgd
from ...config import Policy
from ...errors import ConfigError
from ...plans.codec import CODECS, VALUE_BYTES
from ...plans.encoded import bytes_per_value
from ...transport import kernels
from ..group.backend import CommProcessGroup

LOW_RANK = "powersgd:4"
"""The one low-rank codec of `auto`. docs/compression.md says why rank 4."""

AUTO = ("bf16", "int8", "int4-int8", "int4", LOW_RANK, "sign")
"""The codecs that `auto` chooses from, the mildest first."""

MORE_STEPS = 1.3
"""Steps of a training with PowerSGD, in parts of those with float32: measured with rank 4, see docs/compression.md.
Assumed for `sign`, too."""

MATRICES, MATRIX = 8, 256
"""Number, rows and columns of the matrices that the speed of PowerSGD is measured with."""


def choice_for(
    group: CommProcessGroup, policy: Policy, optimizer: Optimizer | None, agree: Agree, *, partial: bool = False
) -> Choice:
    """The choice among all codecs for a group of several hosts. Measures how fast this CPU encodes and decodes.

    `partial`: gradients may be lost. `optimizer` is the one that uses the gradients; None: not known. All ranks call
    it, and come to the same choice.
    """
    fault = _fault_of_sign(policy, optimizer)
    measured = agree([float(fault is not None), *(_coding_s(codec_of(codec), policy.allow_state) for codec in AUTO)])
    unavailable = {}
    if measured[0]:
        unavailable["sign"] = fault or "another rank has no optimizer for it"
    candidates = [Candidate("none", 2 * VALUE_BYTES, 0.0)]
    for codec, coding_s in zip(map(codec_of, AUTO), measured[1:], strict=True):
        if codec.name in unavailable:
            continue
        assert codec.pair is not None  # noqa: S101  # AUTO has no float32
        steps, begins = (MORE_STEPS, policy.exact_steps) if codec.starts_exact else (1.0, 0)
        wire = bytes_per_value(codec.pair[:2], group.host_count, partial=partial)
        candidates.append(Candidate(codec.name, wire, coding_s, codec.keeps_errors, steps, begins))
    hosts = group.host_count
    return Choice(candidates, (hosts - 1) / hosts, allow_state=policy.allow_state, unavailable=unavailable)


def _fault_of_sign(policy: Policy, optimizer: Optimizer | None) -> str | None:
    """The reason for which `sign` is left out, if any."""
    if optimizer is None:
        return "HookState(optimizer=...) is not given"
    try:
        check_optimizer(dataclasses.replace(policy, codec="sign"), optimizer)
    except ConfigError:
        return f"{type(optimizer).__name__} averages squared gradients"
    return None


def _coding_s(codec: Codec, allow_state: bool) -> float:
    """CPU seconds per value of a gradient; 0 for a codec that is not allowed."""
    if codec.keeps_errors and not allow_state:
        return 0.0
    assert codec.pair is not None  # noqa: S101  # AUTO has no float32
    return _low_rank_s(codec.rank) if codec.form is Form.LOW_RANK else _pair_s(codec.pair)


def _pair_s(pair: CodecPair, count: int = 1 << 16) -> float:
    """A contribution is encoded and decoded, and so is a sum."""
    values, seconds = torch.ones(count, dtype=torch.float32, device="cpu"), []
    encoded = torch.empty(2 * count, dtype=torch.uint8, device="cpu")
    for _ in range(3):
        start_s = time.perf_counter()
        for name in (pair.up, pair.down):
            number = CODECS[name].number
            kernels.encode(number, encoded.data_ptr(), values.data_ptr(), count)
            kernels.decode(number, values.data_ptr(), encoded.data_ptr(), count)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds) / count


def _low_rank_s(rank: int) -> float:
    """Factors are made and multiplied."""
    powersgd, seconds = PowerSgd(rank), []
    gradients = list(torch.ones(MATRICES, MATRIX, MATRIX, dtype=torch.float32, device="cpu"))
    for _ in range(3):
        start_s = time.perf_counter()
        compression = powersgd.compress(range(MATRICES), gradients)
        compression.finish(compression.exact, compression.project(compression.left))
        compression.keep()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds) / (MATRICES * MATRIX * MATRIX)
