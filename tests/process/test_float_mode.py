"""Ranks get the same bits whatever the float mode of their threads (`torch.set_flush_denormal`)."""

import threading
from typing import Any

import torch
import torch.distributed as dist

import commlayer
from tests import ranks


def _bits(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int32)[0])


@ranks.WIRES
@ranks.on(2, ranks.run_job, environ="wire")
def test_subnormal_sums_are_the_same_on_all_ranks(rank: int, size: int) -> None:
    for flushes in (rank == 0, True, rank == 1):
        assert torch.set_flush_denormal(flushes)
        for count in (1, 100_000):  # the small one is reduced on every rank, in the calling thread of rank 0
            tensor = torch.ones(count, dtype=torch.int32).view(torch.float32)
            work = dist.all_reduce(tensor, async_op=rank == 1)
            if work is not None:
                work.wait()
            assert _bits(tensor) == 2


@ranks.on(2, ranks.run_job, environ=ranks.UDP)
def test_encoded_sums_are_the_same_on_all_ranks(rank: int, size: int) -> None:
    torch.set_flush_denormal(rank == 0)
    world: Any = dist.group.WORLD
    for codec, bits in (("f16", 103 << 23), ("bf16", 1 << 16)):  # 2 ** -24, 2 ** -133: subnormal in the codec
        source = torch.full((4096,), bits, dtype=torch.int32).view(torch.float32)
        target = torch.empty_like(source)
        policy = commlayer.Policy(codec=codec)
        world.allreduce_from(source, target, dist.AllreduceOptions(), policy=policy).wait()
        twice = bits + (1 << 23) if codec == "f16" else 2 * bits
        assert target.view(torch.int32).eq(twice).all(), codec


@ranks.on(2, ranks.run_job)
def test_callbacks_compute_in_the_mode_of_their_caller(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    for flushes in (True, False):  # after the completion threads have begun
        torch.set_flush_denormal(flushes)
        found = []

        def look(future: torch.futures.Future[object]) -> None:
            found.append((threading.current_thread().name, _bits(torch.tensor([1e-40]) * 0.5)))  # noqa: B023

        if rank == 1:
            ranks.store().wait([f"asked {flushes}"])
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        future = work.get_future().then(look)
        if rank == 0:
            ranks.store().set(f"asked {flushes}", "1")
        future.wait()
        (thread, bits), expected = found[0], 0 if flushes else _bits(torch.tensor([0.5e-40]))
        assert bits == expected
        assert rank == 1 or thread.startswith("commlayer-completions")
