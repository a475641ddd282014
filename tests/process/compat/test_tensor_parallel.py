"""DTensor: every change of placement, and tensor parallelism whose dimension of the mesh alone is ours."""

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, ModelArgs, Transformer

import commlayer
from tests import ranks
from tests.process.compat.gloo import assert_same, same_as_gloo


@ranks.on(3, same_as_gloo)
def test_redistribute(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7 * 5.0).view(7, 5)  # uneven shards on both dimensions
    results = []
    for source, target in product([Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(0), Shard(1)]):
        turned = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
        results += [turned.to_local(), turned.full_tensor()]
    for target in (Replicate(), Shard(0), Shard(1)):
        partial = torch.distributed.tensor.DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
        results.append(partial.redistribute(mesh, [target]).to_local())
    return results


@ranks.on(2, same_as_gloo)
def test_transformer(rank: int, size: int) -> Any:
    """torch's own transformer and plan for it, with sequence parallelism."""
    mesh = init_device_mesh("cpu", (size,))
    whole = Transformer(ModelArgs(n_layers=1, vocab_size=16, max_seq_len=8, dim=16, n_heads=4, dropout_p=0.0))
    model = Transformer.parallelize(whole, mesh, use_seq_parallel=True, local_output_for_attn=True)
    tokens = torch.arange(16).view(2, 8)
    output = model(tokens)
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    full: list[Any] = [tensor.full_tensor() for tensor in gradients]  # type: ignore[attr-defined]
    return [loss.full_tensor() if hasattr(loss, "full_tensor") else loss, full]


def _mesh(rank: int, size: int, override: bool) -> Any:
    torch.manual_seed(3)
    ranks.init(rank, size, "gloo")
    options: Any = {"tp": ("commlayer", commlayer.Options(commlayer.Policy(deterministic=True)))} if override else None
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"), backend_override=options)
    assert dist.get_backend(mesh.get_group("tp")) == ("commlayer" if override else "gloo")
    model = parallelize_module(MLPModule("cpu"), mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    loss = model(torch.ones(4, 10) * (mesh.get_local_rank("dp") + 1)).sum()
    loss.backward()
    result = [loss.item(), *(p.grad.full_tensor().tolist() for p in model.parameters() if p.grad is not None)]  # type: ignore[attr-defined]
    if override:
        policy = mesh.get_group("tp").policy  # type: ignore[attr-defined]
        assert policy.deterministic
    dist.destroy_process_group()
    return result


def test_backend_override() -> None:
    expected, results = ranks.run(_mesh, 4, False), ranks.run(_mesh, 4, True)
    assert_same(results, expected)
