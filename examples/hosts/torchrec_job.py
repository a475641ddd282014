"""torchrec: tables on one rank each or divided by rows. Ranks exchange features and embeddings; the rest is DDP."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

FEATURES = ["user", "item", "shop"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=f, embedding_dim=8, num_embeddings=64, feature_names=[f]) for f in FEATURES]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.last = nn.Linear(8 * len(FEATURES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.last(self.tables(features).values())  # type: ignore[no-any-return]


def main(backend: str) -> None:
    dist.init_process_group(backend)  # the one line for commlayer
    torch.manual_seed(0)
    net, shares = Net(), {"user": table_wise(rank=0), "item": table_wise(rank=1), "shop": row_wise()}
    apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": 0.1})
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(net.tables, shares, EmbeddingBagCollectionSharder(), size, size, "cpu")
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}))
    optimizer = torch.optim.SGD(net.last.parameters(), lr=0.1)
    losses, generator = list[float](), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        lengths = torch.randint(1, 4, (len(FEATURES) * 16,), generator=generator)
        values = torch.randint(0, 64, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor.from_lengths_sync(keys=FEATURES, values=values, lengths=lengths)
        target = lengths.view(len(FEATURES), 16).sum(0).float().view(16, 1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), target)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    print(json.dumps({"backend": dist.get_backend(), "losses": losses}))
    dist.barrier()  # gloo's threads release the last operation's tensors; without this, the end can hang
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gloo")
