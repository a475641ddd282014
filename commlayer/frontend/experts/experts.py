"""`commlayer.experts`: tokens travel to their experts, once to each host, and the sums of a host's experts travel back.

sent = commlayer.experts.dispatch(tokens, expert_ids, weights, num_experts)
outputs = [expert(rows) for expert, rows in zip(own_experts, sent.rows.split(sent.counts))]
tokens = commlayer.experts.combine(torch.cat(outputs), sent)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import Policy
from ...dynamo import untraced
from ...errors import ConfigError
from ..group.rows import FLOATS
from .exchange import fault_of, group_of, hosts_of, who
from .hop import CALLER, EXACT, Choices, Hop, Told, sums

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Dispatched:
    """The tokens that this rank's experts work on. `combine` needs it."""

    rows: Tensor
    """(N, width): a row for each choice of an expert of this rank, sorted by expert."""
    counts: list[int]
    """Rows of each expert of this rank, whose sum is N: for `rows.split(counts)`."""
    remote_rows: int
    """Rows that this rank has sent to other hosts: for each of its tokens one per host with an expert of it."""
    group: dist.ProcessGroup
    hops: Sequence[Hop]
    weights: Tensor
    """(N,): the weight of each row."""
    arrived: Tensor
    """(N,): the arrived row of which each row is a copy."""
    arrived_count: int


@untraced
def dispatch(
    tokens: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    group: dist.ProcessGroup | None = None,
    policy: Policy = EXACT,
) -> Dispatched:
    """Sends each token to the ranks of its experts. All ranks of the group (None: WORLD) call it.

    `tokens` has shape (T, width), in float32, float64, bfloat16 or float16. `expert_ids`, of whole numbers, and
    `weights`, of floating-point numbers, have shape (T, k): token t goes to the experts `expert_ids[t]`, and -1 is no
    expert. T may be 0, and differ between ranks. Rank r of P has the experts r E / P to (r + 1) E / P - 1 of
    E = `num_experts`.

    A token goes once to each host that has one of its experts, to the rank there with this rank's place in its host,
    and from there through shared memory to the ranks of the experts. With k experts drawn at random on n hosts,
    (n - 1) (1 - (1 - 1/n)^k) copies of a token leave its host, and not k (n - 1) / n. `policy` encodes these copies,
    and their gradients on the way back, with a codec of `all_to_all_single`; rows within a host stay as they are.

    An expert that a token has twice gets its row twice, and both weights count. Autograd follows `tokens` and
    `weights`, each of which requires gradients on all ranks or on none.

    Raises on every rank ConfigError for arguments that make no sense, as experts that do not divide among the ranks (on
    the ranks without that fault: MismatchError), MismatchError if types, widths, numbers of experts or policies differ,
    and the errors of collectives.
    """
    chosen = group_of(group, CALLER)
    size, rank = chosen.size(), chosen.rank()
    fault = _fault(tokens, expert_ids, weights, num_experts, size) or fault_of(policy, tokens.dtype)
    grads = [name for name, tensor in (("tokens", tokens), ("weights", weights)) if tensor.requires_grad]
    told = Told(
        f"{tokens.dtype} tokens of shape {tuple(tokens.shape[1:])} with {weights.dtype} weights, {num_experts} "
        f"experts, codec {getattr(policy, 'codec', None)!r}, gradients of {' and '.join(grads) or 'nothing'}",
        fault,
    )
    ids = torch.empty(0, 1, dtype=torch.int64, device="cpu") if fault else expert_ids.detach().to("cpu", torch.int64)
    chosen_at = (ids.reshape(-1) >= 0).nonzero().view(-1)
    choices = Choices(chosen_at // max(ids.shape[1], 1), ids.reshape(-1)[chosen_at])
    rows, own_weights = tokens, weights.reshape(-1).index_select(0, chosen_at.to(weights.device))

    hosts, per_rank = hosts_of(chosen), max(num_experts // size, 1)
    local = next(host for host in hosts if rank in host)
    hops: list[Hop] = []
    remote_rows = 0
    if len(hosts) > 1 or size == 1:
        peers = torch.empty(size, dtype=torch.int64, device="cpu")
        for host in hosts:
            peers[list(host)] = host[local.index(rank) % len(host)]
        hop = Hop(chosen, range(size), 0 if fault else len(rows), choices, peers[choices.expert // per_rank], told)
        rows, own_weights = hop.go(rows, own_weights, policy)
        choices = hop.choices
        hops.append(hop)
        remote_rows = sum(count for to, count in enumerate(hop.sent) if to not in local)
    if len(hosts) < size:
        hop = Hop(chosen, local, 0 if fault else len(rows), choices, choices.expert // per_rank, told)
        rows, own_weights = hop.go(rows, own_weights, EXACT)
        choices = hop.choices
        hops.append(hop)
    by_expert = torch.argsort(choices.expert, stable=True)
    arrived = choices.row[by_expert]
    counts = torch.bincount(choices.expert - rank * per_rank, minlength=per_rank).tolist()
    return Dispatched(
        rows.index_select(0, arrived.to(rows.device)),
        counts,
        remote_rows,
        chosen,
        hops,
        own_weights.index_select(0, by_expert.to(rows.device)),
        arrived,
        len(rows),
    )


@untraced
def combine(outputs: Tensor, dispatched: Dispatched, *, policy: Policy = EXACT) -> Tensor:
    """The weighted sum of the outputs of each token's experts: shape (T, output width). All ranks call it.

    `outputs[i]` is the output of the expert for `dispatched.rows[i]`, of any width and floating-point type, equal on
    all ranks. A host adds up the outputs of its experts for a token, in float32 at least, and sends one row to the
    token's rank. `policy` encodes these rows, and gradients on their way. A token without an expert gets zeros. The
    outputs require gradients on all ranks or on none.

    Raises ConfigError for outputs that do not fit, on this rank alone, and the errors of collectives. The ranks do not
    compare the types and widths of their outputs beforehand.
    """
    fault = fault_of(policy, outputs.dtype)
    if outputs.dim() != 2 or len(outputs) != len(dispatched.rows) or outputs.dtype not in FLOATS:
        fault = (
            f"outputs of {outputs.dtype} and shape {tuple(outputs.shape)}: give floating-point numbers of shape "
            f"({len(dispatched.rows)}, width), a row for each of `rows`"
        )
    if fault:
        raise ConfigError(f"{who(dispatched.group)}: experts.combine: {fault}")
    wide = outputs.dtype if outputs.dtype == torch.float64 else torch.float32
    weighted = outputs.to(wide) * dispatched.weights.to(wide).unsqueeze(1)
    found = sums(weighted, dispatched.arrived, dispatched.arrived_count).to(outputs.dtype)
    for hop in reversed(dispatched.hops):
        found = hop.back(found, policy)
    return found


def _fault(tokens: Tensor, ids: Tensor, weights: Tensor, num_experts: int, size: int) -> str:
    """The fault of these arguments, with the remedy; empty: they have none."""
    if num_experts < 1 or num_experts % size:
        return f"num_experts={num_experts} do not divide among {size} ranks; use a multiple of {size}"
    if tokens.dim() != 2 or tokens.dtype not in FLOATS:
        return f"tokens of {tokens.dtype} and shape {tuple(tokens.shape)}: give floating-point rows, (T, width)"
    if ids.dim() != 2 or len(ids) != len(tokens) or ids.dtype not in _INTEGERS:
        return (
            f"expert_ids of {ids.dtype} and shape {tuple(ids.shape)}: give whole numbers of shape ({len(tokens)}, k), "
            f"a row for each token"
        )
    if weights.shape != ids.shape or not weights.is_floating_point() or weights.device != tokens.device:
        return (
            f"weights of {weights.dtype} and shape {tuple(weights.shape)} on {weights.device}: give floating-point "
            f"numbers of shape {tuple(ids.shape)} on {tokens.device}, one for each expert of a token"
        )
    wide = ids.long()
    wrong = wide[(wide < -1) | (wide >= num_experts)]
    if wrong.numel():
        return f"expert_ids has {int(wrong[0])}: use 0 to {num_experts - 1}, or -1 for no expert"
    return ""
