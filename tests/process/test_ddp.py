"""Training with DistributedDataParallel: the same gradients as gloo, for any model and flags."""

import contextlib
import io
import socket
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.scheduler.order import bucket_class
from commlayer.tools import dissect
from commlayer.transport.native import Engine
from tests import ranks
from tests.fake_transport import on_fake

STEPS = 4
HOOK = "gloo with our hook"
BACKENDS = ["commlayer", "commlayer with our hook", HOOK]


class Branches(nn.Module):
    """A model that leaves out one of its branches, a different one each step."""

    def __init__(self, leave_out: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 50)
        self.branches = nn.ModuleList(nn.Linear(50, 40) for _ in range(3))
        self.norm = nn.BatchNorm1d(40)
        self.head = nn.Linear(40, 2)
        self.leave_out = leave_out

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        hidden = self.stem(inputs).relu()
        chosen = [branch for i, branch in enumerate(self.branches) if not self.leave_out or i != step % 3]
        return self.head(self.norm(sum(branch(hidden) for branch in chosen)))  # type: ignore[no-any-return]


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets, rebuilt": {"bucket_cap_mb": 0.005},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    "unused parameters": {"find_unused_parameters": True, "bucket_cap_mb": 0.005},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.005},
    "accumulation": {"bucket_cap_mb": 0.005},
    "without buffers": {"broadcast_buffers": False},
    "bucket views, static graph": {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 0.005},
    "without initial sync": {"init_sync": False},
}


def train(backend: str, name: str, rank: int) -> list[Tensor]:
    """A few steps of SGD; returns the parameters, and the gradients of the last step."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Branches(leave_out=name == "unused parameters"), **FLAGS[name])
    if "hook" in backend:
        model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = 3 if name == "accumulation" else 1
        for part in range(parts):
            with nullcontext() if part == parts - 1 else model.no_sync():
                loss = model(torch.randn(5, 6, generator=generator), step).square().mean()
                loss.backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [value.detach().clone() for value in [*model.state_dict().values(), *gradients]]


@pytest.mark.parametrize("name", FLAGS)
@ranks.on(3)
def test_training_is_that_of_gloo(rank: int, size: int, name: str) -> None:
    results = {}
    for backend in ["gloo", *BACKENDS]:
        ranks.init(rank, size, backend.split()[0])
        results[backend] = train(backend, name, rank)
        dist.barrier()
        dist.destroy_process_group()
    for backend in BACKENDS:
        assert len(results[backend]) == len(results["gloo"])
        for mine, theirs in zip(results[backend], results["gloo"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "bucket views"])
@ranks.on(3, environ=ranks.NETWORK)
def test_torchs_wrappers_compress_the_gradients_of_our_hook(rank: int, size: int, name: str) -> None:
    flags: dict[str, Any] = {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": name == "bucket views"}
    policies = [
        commlayer.Policy(),
        commlayer.Policy(loss_bound=0.1),
        commlayer.Policy(loss_bound=0.1, treatment="zero"),
    ]
    for wrap in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        gradients = []
        ranks.init(rank, size, "gloo")
        for policy in [None, *policies]:
            torch.manual_seed(1)
            model = DistributedDataParallel(Branches(leave_out=False), **flags)
            hook = wrap(commlayer.allreduce_hook if policy else default_hooks.allreduce_hook)
            state = policy and commlayer.HookState(policy)
            # DDP refuses a bf16 hook of torch's on the CPU, by its name
            model.register_comm_hook(state, lambda state, bucket, hook=hook: hook(state, bucket))
            for step in range(3):
                model.zero_grad()
                inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                model(inputs, step).square().mean().backward()
            gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        for ours in gradients[1:]:
            for mine, theirs in zip(ours, gradients[0], strict=True):
                assert mine.dtype == torch.float32
                torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.002)
        dist.barrier()
        dist.destroy_process_group()


class Gain(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3000, dtype=torch.float16))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.gain * inputs).sum()


@ranks.WIRES
@pytest.mark.parametrize("loss_bound", [0.0, 0.1])
@ranks.on(4, ranks.run_job, environ="wire")
def test_averages_of_halves_do_not_overflow(rank: int, size: int, loss_bound: float) -> None:
    given = torch.full((3000,), 40_960.0 if rank else 49_152.0, dtype=torch.float16)
    model = DistributedDataParallel(Gain())
    model.register_comm_hook(commlayer.HookState(commlayer.Policy(loss_bound=loss_bound)), commlayer.allreduce_hook)
    model(given).backward()
    assert (model.module.gain.grad == 43_008).all()
    model = DistributedDataParallel(Gain(), gradient_as_bucket_view=True)
    handle = commlayer.overlap(model, torch.optim.SGD(model.parameters(), lr=2**-13))
    model(given).backward()
    assert (model.module.gain.grad.sum() == torch.inf).all()  # it has arrived
    assert (model.module.gain.grad == 43_008).all()
    handle.remove()
    dist.barrier()


def _replicas(rank: int, size: int) -> bytes:
    with ranks.job(rank, size):
        buffer = io.BytesIO()
        torch.save(train("commlayer with our hook", "small buckets, rebuilt", rank)[:8], buffer)
        return buffer.getvalue()


@pytest.mark.parametrize("shm", ["0", "1"])
def test_replicas_are_bit_identical(shm: str) -> None:
    first, *others = ranks.run(_replicas, 3, environ={"COMMLAYER_SHM": shm})
    assert all(other == first for other in others)


def test_the_last_buckets_of_backward_are_the_most_urgent() -> None:
    def classes(buckets: int, priority: int = 4) -> list[int]:
        return [bucket_class(priority, index, buckets) for index in range(buckets)]

    assert classes(5) == [6, 5, 4, 3, 2]
    assert classes(2) == [6, 2]
    assert classes(1) == [4]
    assert classes(3, priority=0) == [2, 1, 0]
    assert classes(3, priority=7) == [7, 6, 5]
    many = classes(100)
    assert many == sorted(many, reverse=True)
    assert set(many) == {2, 3, 4, 5, 6}
    assert bucket_class(4, 0, 0) == 4  # the number of buckets is not known yet
    assert bucket_class(4, 9, 5) == 2  # DDP has made other buckets


LAYERS = 5


def deep(policy: commlayer.Policy, steps: int = 4) -> commlayer.HookState:
    """Trains a model with a bucket for each layer, from the second step on: DDP begins with one of 1 MB."""
    layers = [nn.Linear(100, 100, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)
    state = commlayer.HookState(policy)
    model.register_comm_hook(state, commlayer.allreduce_hook)
    for _ in range(steps):
        model(torch.randn(2, 100)).sum().backward()
    return state


@ranks.on(2, on_fake)
def test_buckets_have_priorities_once_a_step_has_shown_them(rank: int, size: int) -> None:
    native: Any = deep(commlayer.Policy(priority=3)).group()._native
    found = [priority for call, _, priority in native.operations if call.collective == "all_reduce"]
    assert found == [3] + [3] * LAYERS + [5, 4, 3, 2, 1] * 2


def _priorities_of_packets(rank: int, size: int) -> list[int]:
    from scapy.layers.l2 import Ether

    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    with ranks.job(rank, size):
        deep(commlayer.Policy(), steps=1)  # makes connections and groups
        engine: Any = Engine._shared
        ports = {port["port"] for port in engine.describe()["ports"]}
        dist.barrier()
        wire.bind(("lo", 3))  # ETH_P_ALL
        deep(commlayer.Policy(), steps=5)
        dist.barrier()
        wire.setblocking(False)
        frames = []
        with contextlib.suppress(BlockingIOError):
            while frame := wire.recv(1 << 16):
                # Other tests use this device, too. Their frames are dropped by their bytes: scapy takes ms for each.
                if (frame[23], int.from_bytes(frame[34:36], "big")) in {(socket.IPPROTO_UDP, port) for port in ports}:
                    frames.append(Ether(frame))
        wire.close()
        found = dissect.captured(frames)
        return [captured.packet.priority for captured in found if dissect.KINDS[captured.packet.kind] == "DATA"]


@pytest.mark.needs_root
def test_packets_carry_the_priority_of_their_bucket() -> None:
    for sent in ranks.run(_priorities_of_packets, 2, environ=ranks.NETWORK):
        assert set(sent) == {2, 3, 4, 5, 6}
        assert min(map(sent.count, (2, 3, 5, 6))) >= 3 * 2  # a packet in each half of each step but the first two


@ranks.on(1, on_fake)
def test_sparse_gradients_are_refused(rank: int, size: int) -> None:
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    with pytest.raises(RuntimeError, match=r"use sparse=False"):
        model(torch.tensor([1])).sum().backward()
