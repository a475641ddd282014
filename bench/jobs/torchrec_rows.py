"""A training of torchrec whose tables are on one rank each, for bench.torchrec; prints its losses and bytes as JSON.

    torchrun --nproc-per-node 2 bench/jobs/torchrec_rows.py --codec int8 --seed 3

Four tables, one value per feature and sample; a teacher of the same form gives the targets.
"""

from __future__ import annotations

import functools
import inspect
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import CommOp, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import commlayer
from bench.harness.options import options
from commlayer.torchrec import registry

FEATURES = ("user", "item", "shop", "day")
ROWS, WIDTH, BATCH = 256, 64, 512
VALIDATION = 8
"""Batches of held-out samples per rank."""


def torchrecs_own() -> dict[str, Any] | None:
    """The int8 of torchrec itself."""
    config = QCommsConfig(forward_precision=CommType.INT8, backward_precision=CommType.INT8)
    operations = [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL]
    found: dict[str, Any] | None = get_qcomm_codecs_registry(config, operations, torch.device("cpu"))
    return found


CODECS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "none": lambda: None,
    "torchrec": torchrecs_own,
    "int8": functools.partial(registry, WIDTH),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.layers = nn.Sequential(nn.Linear(WIDTH * len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.layers(self.tables(features).values())  # type: ignore[no-any-return]


def counted() -> dict[str, int]:
    """From now on, the bytes that all-to-alls of embeddings send to other ranks."""
    sent, plain = {"embedding_bytes": 0}, dist.all_to_all_single
    form = inspect.signature(plain)

    @functools.wraps(plain)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        given = form.bind(*args, **kwargs).arguments
        rows, parts = given["input"], given.get("input_split_sizes")
        if rows.dtype in (torch.float32, torch.uint8) and parts:
            sent["embedding_bytes"] += (rows.numel() - parts[dist.get_rank()]) * rows.itemsize
        return plain(*args, **kwargs)

    dist.all_to_all_single = all_to_all_single
    return sent


def batches(seed: int, count: int) -> list[tuple[KeyedJaggedTensor, Tensor]]:
    """Samples whose targets a teacher draws from their four values."""
    teacher = torch.randn(len(FEATURES), ROWS, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        values = torch.randint(0, ROWS, (len(FEATURES), BATCH), generator=generator)
        parts = teacher.gather(1, values)
        target = (parts[0] * parts[1] + parts[2] + parts[3]).view(BATCH, 1)
        lengths = torch.ones(len(FEATURES) * BATCH, dtype=torch.int32)
        features = KeyedJaggedTensor.from_lengths_sync(keys=list(FEATURES), values=values.view(-1), lengths=lengths)
        found.append((features, target))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--codec", choices=list(CODECS), default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(given.seed)
    net = Net()
    apply_optimizer_in_backward(torch.optim.Adagrad, net.tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=CODECS[given.codec]())
    shares = {name: table_wise(rank=number % size) for number, name in enumerate(FEATURES)}
    plan = construct_module_sharding_plan(net.tables, shares, sharder, size, size, "cpu")
    model = DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    optimizer = torch.optim.Adam(net.layers.parameters(), lr=1e-3)
    sent = counted()
    before = commlayer.stats()["payload_bytes_sent"]
    for features, target in batches(1000 * given.seed + rank, given.steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()
    found = {**sent, "sent_bytes": commlayer.stats()["payload_bytes_sent"] - before}
    with torch.no_grad():
        losses = [
            float(nn.functional.mse_loss(model(rows), target)) for rows, target in batches(10**6 + rank, VALIDATION)
        ]
    mean = torch.tensor(statistics.fmean(losses)) / size
    dist.all_reduce(mean)
    if rank == 0:
        print(json.dumps({**found, "steps": given.steps, "loss": mean.item()}))
    dist.barrier()  # as in examples/hosts/torchrec_job.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
