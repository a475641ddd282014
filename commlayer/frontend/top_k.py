"""`TopK`: sums the largest values of a buffer over the ranks (codec `topk:SHARE`).

An all-gather brings every rank the payloads of all ranks (compress/topk.py). Each rank adds them up in the order of the
ranks, so all have the same bits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from ..compress.codec import share_of
from ..compress.topk import add_to, selected, take_out
from ..config import Policy
from ..transport import kernels
from .backend import CommProcessGroup


class TopK:
    """The sum of one buffer, in flight as `work`.

    `source` is flat, float32 and on the CPU. `count` of its values are not fine; the fine ones are 0. `source` is left
    with the values that were not sent, and with rounding errors. Nothing is lost, whatever the policy.
    """

    def __init__(self, group: CommProcessGroup, policy: Policy, source: Tensor, count: int) -> None:
        k = selected(share_of(policy.codec), count)
        indices, chosen = torch.empty(k, dtype=torch.uint32), torch.empty(k)
        kernels.select_largest(source.data_ptr(), source.numel(), k, indices.data_ptr(), chosen.data_ptr())
        payload = take_out(source, indices, chosen)
        self._payloads = payload.new_empty((group.size(), len(payload)))
        reliable = dataclasses.replace(policy, codec="none", loss_bound=0.0)
        self.work: Work = group.all_gather_single(self._payloads, payload, policy=reliable)

    def sum_into(self, target: Tensor) -> None:
        """Writes the sum, once `work` has ended."""
        target.zero_()
        for payload in self._payloads:
            add_to(target, payload)
