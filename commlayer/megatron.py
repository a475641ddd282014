"""Experts of Megatron-core whose tokens travel once to each host: one line in a job.

    from commlayer.megatron import dispatch_by_host

    dispatch_by_host(model, policy=commlayer.Policy(codec="int8"))  # after the model is made, on all ranks

Megatron-core need not be installed: its layers are found by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .config import Policy
from .errors import ConfigError
from .frontend.experts.exchange import fault_of
from .frontend.experts.experts import Dispatched, combine, dispatch

WHO = "megatron.dispatch_by_host"
LAYER = "BaseMoELayer"

_UNFIT = {
    "moe_pad_expert_input_to_capacity": "experts get as many rows as there are, without padding",
    "moe_shared_expert_overlap": "shared experts are computed before, not beside, the exchange",
    "moe_router_padding_for_quantization": "rows are not padded for fp8",
    "moe_router_padding_for_fp8": "rows are not padded for fp8",
    "overlap_moe_expert_parallel_comm": "a layer's steps for two micro-batches must not interleave",
}
"""Settings of a TransformerConfig that must be off, and the reason."""


class Dispatcher:
    """A token dispatcher of Megatron-core, by `experts.dispatch` and `experts.combine`.

    Has the six steps of `MoETokenDispatcher` that a `MoELayer` calls. Routing weights travel with the rows, and the
    experts apply them, as Megatron's do.
    """

    def __init__(self, before: Any, policy: Policy) -> None:
        self.config = before.config
        self.ep_group = before.ep_group
        self.shared_experts = None
        self.cudagraph_attrs: list[str] = []
        self.valid_cudagraph_attrs: list[str] | None = None
        self._policy = policy
        self._shape = torch.Size()
        self._ids = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self._sent: Dispatched | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens as rows, and the weights of their experts. `tokens` has shape (..., width); `routing_map`, of
        bool, and `probs` have shape (tokens, experts)."""
        self._shape = tokens.shape
        count = int(self.config.moe_router_topk)
        is_chosen, ids = routing_map.to(torch.uint8).topk(count, dim=1)
        self._ids = ids.masked_fill(is_chosen == 0, -1)  # the router has dropped some
        weights = probs.gather(1, ids) * is_chosen.to(probs.dtype)
        return tokens.reshape(-1, self._shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends the rows to the ranks of their experts. Returns the rows and weights that have come here."""
        experts, group = self.config.num_moe_experts, self.ep_group
        self._sent = dispatch(hidden_states, self._ids, probs, experts, group=group, policy=self._policy)
        return self._sent.rows, self._sent.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows, sorted by expert, the number of rows of each, on the CPU, and the weights."""
        return hidden_states, torch.tensor(self._now().counts, device="cpu", dtype=torch.int64), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The outputs as they are."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sends the sums of a host's outputs back."""
        sent, self._sent = self._now(), None
        applied = dataclasses.replace(sent, weights=torch.ones_like(sent.weights))  # by the experts
        return combine(hidden_states, applied, policy=self._policy)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sums in the shape of the layer's input."""
        return hidden_states.view(*self._shape[:-1], hidden_states.shape[-1])

    def _now(self) -> Dispatched:
        if self._sent is None:
            raise ConfigError(f"{WHO}: token_combine() before token_dispatch(): call the steps in Megatron's order")
        return self._sent


def dispatch_by_host(model: nn.Module, *, policy: Policy = Policy()) -> int:  # noqa: B008  # it cannot be changed
    """Replaces the token dispatchers of all expert layers of the model. Returns their number.

    All ranks of a layer's expert-parallel group, which must be one of commlayer, call it with the same policy.
    A token goes once to each host that has one of its experts, and one sum of their outputs comes back; `policy` gives
    the codec between hosts, as in `experts.dispatch`. It holds for forward and backward, evaluation and checkpoints of
    activations. Results differ from those of Megatron's dispatchers by the order of additions.

    Raises ConfigError if the model has no such layer, or one that does not fit: tensor parallelism within experts,
    padding to a capacity, shared experts beside the exchange, CUDA graphs, or a policy that rows cannot have.
    """
    layers = {name: module for name, module in model.named_modules() if _is_expert_layer(module)}
    if not layers:
        raise ConfigError(f"{WHO}: the model has no expert layer of Megatron-core: set num_moe_experts, or do without")
    faults = {name: _fault(layer, policy) for name, layer in layers.items()}
    for name, fault in faults.items():
        if fault:
            raise ConfigError(f"{WHO}: {name or 'the layer'}: {fault}")
    for layer in layers.values():
        layer.token_dispatcher = Dispatcher(layer.token_dispatcher, policy)
    return len(layers)


def _is_expert_layer(module: nn.Module) -> bool:
    return any(base.__name__ == LAYER and base.__module__.startswith("megatron.core.") for base in type(module).__mro__)


def _fault(layer: Any, policy: Policy) -> str:
    """The reason for which a layer cannot have our dispatcher, with the remedy; empty: it can."""
    config, before = layer.config, layer.token_dispatcher
    if getattr(before, "tp_size", 1) > 1:
        return (
            f"each expert is divided among {before.tp_size} ranks (expert_tensor_parallel_size): set it to 1; more "
            f"experts per rank take its place"
        )
    for name, reason in _UNFIT.items():
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)}: {reason}: switch it off"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"cuda_graph_impl={config.cuda_graph_impl!r}: a graph cannot hold operations of the host: set 'none'"
    return fault_of(policy, getattr(config, "params_dtype", torch.float32))
