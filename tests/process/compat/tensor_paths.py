"""Cases for test_torch_paths.py: DTensor, tensor parallelism, collectives with gradients, pipelines."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleLoopedBFS, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.process.compat.data_paths import CPU, SIZE, layers, mesh_of, whole
from tests.process.compat.test_ddp import data

# ---- DTensor and tensor parallelism ---------------------------------------------------------------------------------


class Block(nn.Module):
    """An embedding, a norm and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.words(tokens))).relu())  # type: ignore[no-any-return]


def parallel_block() -> nn.Module:
    """A block with sequence parallelism, and an embedding that is sharded by words."""
    by_tokens = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
    plan: dict[str, Any] = {
        "words": RowwiseParallel(**by_tokens),  # type: ignore[arg-type]
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    outputs = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    block = parallelize_module(Block(), mesh_of("tensor"), plan)
    return parallelize_module(block, mesh_of("tensor"), outputs)


def gradients_of_block(block: nn.Module) -> Any:
    tokens = torch.arange(16).view(2, 8)
    output = block(tokens)
    output.square().mean().backward()
    return [output, whole(parameter.grad for parameter in block.parameters())]


def sequence_parallelism(rank: int) -> Any:
    return gradients_of_block(parallel_block())


def compiled_sequence_parallelism(rank: int) -> Any:
    compiled: Any = torch.compile(parallel_block(), backend="aot_eager")
    return gradients_of_block(compiled)


def prepared_inputs(rank: int) -> Any:
    mesh = mesh_of("tensor")
    plan = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    model = parallelize_module(nn.Linear(4, 4), mesh, plan)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    output: Any = model(torch.arange(8.0).view(2, 4) + rank)
    return output.full_tensor()


def distributed_module(rank: int) -> Any:
    mesh = mesh_of("rows")

    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    model = distribute_module(nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 5)), mesh, shard)
    output: Any = model(distribute_tensor(data(0, 0), mesh, [Shard(0)]))
    output.sum().backward()
    return [output.full_tensor(), whole(parameter.grad for parameter in model.parameters())]


def arithmetic_of_shards(rank: int) -> Any:
    mesh = mesh_of("rows")
    one, other = torch.arange(35.0).view(7, 5) / 35, torch.arange(15.0).view(5, 3) / 15
    a, b = distribute_tensor(one, mesh, [Shard(1)]), distribute_tensor(other, mesh, [Shard(0)])
    product, flat = a @ b, distribute_tensor(one, mesh, [Shard(0)])
    found: list[Any] = [product, product.softmax(1), flat.sum(), flat.mean(0), flat.max(), flat.t() @ flat]
    found += [torch.linalg.vector_norm(flat), flat.cumsum(0), torch.cat([flat, flat], 1), flat.argmax(1)]
    return whole(found)


def partial_sums_of_all_kinds(rank: int) -> Any:
    mesh, found = mesh_of("rows"), []
    mine = torch.arange(10.0).view(5, 2) * (1 - 2 * rank)
    for kind in ("sum", "avg", "max", "min"):
        partial = DTensor.from_local(mine, mesh, [Partial(kind)])
        found += [partial.redistribute(mesh, [target]).to_local() for target in (Replicate(), Shard(0), Shard(1))]
    return found


def slices_of_a_mesh(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (1, SIZE, 1), mesh_dim_names=("pipeline", "data", "tensor"))
    found: list[Any] = [mesh.get_coordinate()]
    for part in (
        mesh["data"],
        mesh["tensor"],
        mesh["pipeline", "data"]._flatten("both"),
        mesh["data", "tensor"]["data"],
    ):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=part.get_group())
        found.append([tensor.item(), part.size(), part.get_local_rank()])
    group = DeviceMesh.from_group(mesh.get_group("data"), "cpu", mesh_dim_names=("again",))
    tensor = funcol.all_gather_tensor(torch.tensor([float(rank)]), 0, group)
    return [*found, tensor * 1]


# ---- collectives with gradients, coalesced ones, pipelines ----------------------------------------------------------


def differentiable_collectives(rank: int) -> Any:
    x = (torch.arange(8.0) + 10 * rank).requires_grad_()
    parts = list(x.square().chunk(SIZE))
    outputs = [
        differentiable.all_reduce(x * x),
        differentiable.broadcast(x * 2, 1),
        *differentiable.all_gather(x * 3),
        differentiable.reduce_scatter(torch.empty(4), parts),
        *differentiable.all_to_all([torch.empty(4) for _ in range(SIZE)], parts),
        differentiable.all_to_all_single(torch.empty(8), x * 5),
    ]
    torch.stack([(output * output).sum() for output in outputs]).sum().backward()
    return [outputs, x.grad]


def functional_collectives_with_gradients(rank: int) -> Any:
    x = (torch.arange(12.0).view(6, 2) + rank).requires_grad_()
    group: Any = dist.group.WORLD
    gathered = funcol.all_gather_tensor_autograd(x * x, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered * 2, "sum", 0, group)
    sent, received = ([2, 4], [2, 4]) if rank == 0 else ([4, 2], [4, 2])
    turned = funcol.all_to_all_single_autograd(scattered, received, sent, group)
    (turned * turned).sum().backward()
    return [gathered * 1, scattered * 1, turned * 1, x.grad]


def coalesced_collectives(rank: int) -> Any:
    tensors = [torch.full((length,), rank + 1.0) for length in (3, 5)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    outputs = [torch.empty(SIZE * 4) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for number, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((4,), rank + 10.0 * number))
    manager.wait()
    return [tensors, outputs]


def pipeline(kind: Any, rank: int) -> Any:
    """Two stages per rank: in a V, rank 0 has the first and the last, otherwise every second one."""
    is_v = kind is not ScheduleLoopedBFS
    mine = [rank, 2 * SIZE - 1 - rank] if is_v else [rank, rank + SIZE]
    model = layers(2 * SIZE)
    stages = [PipelineStage(model[index], index, 2 * SIZE, CPU) for index in mine]
    schedule = kind(stages, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
    losses: list[Any] = []
    has_last = rank == (0 if is_v else SIZE - 1)
    extra = {"target": torch.zeros(8, 16), "losses": losses} if has_last else {}
    schedule.step(*([data(0, 0)] if rank == 0 else []), **extra)
    return [losses, [parameter.grad for index in mine for parameter in model[index].parameters()]]


def looped_pipeline(rank: int) -> Any:
    return pipeline(ScheduleLoopedBFS, rank)


def zero_bubble_pipeline_in_a_v(rank: int) -> Any:
    return pipeline(ScheduleZBVZeroBubble, rank)


def dual_pipeline_in_a_v(rank: int) -> Any:
    return pipeline(ScheduleDualPipeV, rank)
