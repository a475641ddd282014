"""Experts of torchtitan (0.3) whose tokens travel once to each host: one argument of a job, no change to its code.

    torchrun ... -m torchtitan.train ... --override.imports commlayer.torchtitan.dispatch_by_host

or, with a codec between hosts, `--override.imports 'commlayer.torchtitan.dispatch_by_host={"codec": "int8"}'`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from .config import Policy
from .errors import ConfigError
from .frontend.experts.exchange import fault_of
from .frontend.experts.experts import Dispatched, combine, dispatch

WHO = "torchtitan.dispatch_by_host"


class Dispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]  # mypy does not see torchtitan
    """A token dispatcher of torchtitan, by `experts.dispatch` and `experts.combine`.

    Results differ from those of torchtitan's own by the order of additions. A layer that is not divided over ranks
    stays torchtitan's.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        """`codec`: that of rows between hosts, and of their gradients, as in `experts.dispatch`."""

        codec: str = "none"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._policy = Policy(codec=config.codec)

    def dispatch(
        self, tokens: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """The rows for this rank's experts, sorted by expert, the number of rows of each, and what `combine` needs.

        `tokens` has shape (T, width), `scores` and `expert_ids` (T, k), `counts` (experts,).
        """
        if self.ep_mesh is None:
            return super().dispatch(tokens, scores, expert_ids, counts)  # type: ignore[no-any-return]
        group: dist.ProcessGroup = self.ep_mesh.get_group()
        sent = dispatch(tokens, expert_ids, scores, self.num_experts, group=group, policy=self._policy)
        return sent.rows, torch.tensor(sent.counts, device=tokens.device, dtype=torch.int64), sent

    def combine(self, outputs: Tensor, sent: Dispatched, tokens: Tensor) -> Tensor:
        """The sums of the experts' outputs, weighted by the scores: shape and type of `tokens`."""
        if self.ep_mesh is None:
            return super().combine(outputs, sent, tokens)  # type: ignore[no-any-return]
        return combine(outputs, sent, policy=self._policy).to(tokens.dtype)


@override(  # type: ignore[untyped-decorator]
    target=LocalTokenDispatcher.Config, description="Tokens travel once to each host, by commlayer."
)
def dispatch_by_host(config: LocalTokenDispatcher.Config, *, codec: str = "none") -> Dispatcher.Config:
    """The override: takes the place of `AllToAllTokenDispatcher` in all layers.

    The group of the experts' mesh must be one of commlayer. `codec`: "none", "f16", "bf16", "int8" or "int4".
    torchtitan's compilation must leave the model out: an exchange is no part of a graph.

    Raises ConfigError for another dispatcher, or a codec that rows cannot have.
    """
    if type(config) is not AllToAllTokenDispatcher.Config:
        found = type(config).__qualname__.partition(".")[0]
        raise ConfigError(
            f"{WHO}: the layers have {found}, which commlayer does not replace: give the model "
            f"comm_backend='standard', without quantized experts"
        )
    fault = fault_of(Policy(codec=codec), torch.float32)
    if fault:
        raise ConfigError(f"{WHO}: {fault}")
    return Dispatcher.Config(num_experts=config.num_experts, top_k=config.top_k, codec=codec)
