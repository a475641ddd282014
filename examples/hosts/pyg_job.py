"""PyTorch Geometric: a GCN on parts of a graph, with DistributedDataParallel."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = GCNConv(8, 32), GCNConv(32, 32), nn.Linear(32, 1)

    def forward(self, batch: Data) -> torch.Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.last(global_mean_pool(x, batch.batch))  # type: ignore[no-any-return]


def graphs(count: int) -> list[Data]:
    made = []
    for _ in range(count):
        x, edges = torch.randn(10, 8), torch.randint(0, 10, (2, 30))
        made.append(Data(x=x, edge_index=edges, y=x.abs().mean().view(1, 1)))
    return made


def main(backend: str) -> None:
    dist.init_process_group(backend)  # the one line for commlayer
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = graphs(128)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        for batch in DataLoader(data[rank::size], batch_size=16):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch.y)
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / size)
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(json.dumps({"backend": dist.get_backend(), "losses": losses, "sum": weights}))
    dist.barrier()  # gloo's threads release the last operation's tensors; without this, the end can hang
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gloo")
