"""The cost of `commlayer top` for a job, and of many ranks for rank 0: `python -m bench.top_cost` (3 minutes, 2 cores).

Two ranks train through a communication hook over UDP on loopback. In blocks of some seconds, in turns, the agents run
or do not: the same processes, so that only the agents differ. Reported are the time of a step and the CPU time of a
process per step, with the 95 % interval of the mean of the pairs' ratios. Then a collector alone gets the samples of
512 ranks per second, and answers a viewer once per second: its CPU time, of all threads, is a share of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.options import options
from commlayer.config import Config
from commlayer.telemetry import agent, curve
from commlayer.telemetry.collector import SAMPLE, VIEW, Collector
from commlayer.telemetry.sample import PATHS_TOLD, Flow, Sampler
from commlayer.tools.bench.launch import free_port
from commlayer.transport.native import Engine

RANKS = 2
WARM_S = 1.0
T_95 = {5: 2.57, 10: 2.23, 15: 2.13, 20: 2.09}


def block(seconds: float, step: Any) -> tuple[float, float]:
    """Seconds and CPU seconds of a step. Rank 0's clock decides when the block ends."""
    go_on, steps = torch.ones(1), 0
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    while go_on.item():
        for _ in range(5):
            step()
        steps += 5
        go_on.fill_(float(time.monotonic() - begin_s < seconds))
        dist.broadcast(go_on, 0)
    return (time.monotonic() - begin_s) / steps, (time.process_time() - begin_cpu_s) / steps


def rank_main(rank: int, ports: tuple[int, int], options: argparse.Namespace, pipe: Any) -> None:
    os.environ.update(COMMLAYER_SHM="0", COMMLAYER_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports[0], RANKS, rank == 0, timedelta(seconds=60))
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())))
    )
    model.register_comm_hook(commlayer.HookState(commlayer.Policy()), commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(options.batch, 512)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    config = Config(top=f"127.0.0.1:{ports[1]}")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(2 * options.pairs):
        is_on = number % 4 in (1, 2)  # off on, on off: a drift of the machine meets both alike
        if is_on:
            agent.arm(config, Engine.current(), rank, RANKS)
        dist.barrier()
        block(WARM_S, step)
        found[is_on].append(block(options.seconds, step))
        dist.barrier()
        agent.disarm()
        dist.barrier()
    if rank == 0:
        begin_s = time.thread_time()
        sampler = Sampler(0, RANKS)
        for _ in range(200):
            json.dumps(sampler.take())
        pipe.send((found, (time.thread_time() - begin_s) / 200))
    dist.destroy_process_group()


def ratio(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """The mean of on / off, and the half width of its 95 % interval."""
    ratios = [on / off for off, on in pairs]
    t = T_95[max((count for count in T_95 if count <= len(ratios)), default=5)]
    width = t * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {"mean": statistics.mean(ratios), "half_width_95": width}


def job(options: argparse.Namespace) -> dict[str, Any]:
    """The cost for a job."""
    ports = free_port(), free_port()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    processes = [context.Process(target=rank_main, args=(rank, ports, options, there)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found, sample_s = here.recv()
    for process in processes:
        process.join()
    columns = {"step": 0, "cpu": 1}
    result: dict[str, Any] = {"pairs": options.pairs, "seconds": options.seconds, "sample_s": sample_s}
    for name, column in columns.items():
        off, on = ([row[column] for row in found[is_on]] for is_on in (False, True))
        result[name] = {
            "off_s": statistics.median(off),
            "on_s": statistics.median(on),
            **ratio(list(zip(off, on, strict=True))),
        }
    return result


def collect(address: str, key: bytes, ranks: int, seconds: float, pipe: Any) -> None:
    """A collector alone in its process: sends its CPU time."""
    collector = Collector(address, key, ranks)
    collector.start()
    pipe.send("ready")
    pipe.recv()
    begin = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    end = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    pipe.send((cpu_s / seconds, len(collector.samples.ranks())))
    collector.stop()


def collector(ranks: int, seconds: float) -> dict[str, Any]:
    """The cost of many ranks for rank 0."""
    address, key = f"127.0.0.1:{free_port()}", os.urandom(16)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=collect, args=(address, key, ranks, seconds, there))
    process.start()
    here.recv()
    zmq = curve.load()
    room = zmq.Context()
    room.max_sockets = 4 * ranks
    clients = []
    for _ in range(ranks):
        clients.append(curve.client(room, key))
        clients[-1].connect(curve.endpoint(address))
    sample = Sampler(0, ranks).take()
    flow = {**Flow().entry(1.0), "peer": 1, "path": 0, "interface": "eth0", "remote": "10.0.0.1:12345"}
    sample["paths"] = [flow] * PATHS_TOLD
    texts = [json.dumps({**sample, "rank": rank}).encode() for rank in range(ranks)]
    here.send("begin")
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        for rank, (client, text) in enumerate(zip(clients, texts, strict=True)):
            client.send_multipart([SAMPLE, str(rank).encode(), text])
        clients[0].send_multipart([VIEW])
        if clients[0].poll(1000):
            clients[0].recv_multipart()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begin_s)))
    share, heard = here.recv()
    process.join()
    room.destroy(linger=0)
    return {"ranks": ranks, "heard": heard, "sample_bytes": len(texts[0]), "core_share": share}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks, with and without")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a block")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step: more computation per step")
    parser.add_argument("--ranks", type=int, default=512, help="ranks of which the collector alone gets samples")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    cost = job(given)
    for name, what in (("step", "time of a step"), ("cpu", "CPU time per step and process")):
        figures = cost[name]
        print(
            f"{what}: {1e3 * figures['off_s']:.3f} ms without, {1e3 * figures['on_s']:.3f} ms with; "
            f"{figures['mean'] - 1:+.2%} +- {figures['half_width_95']:.2%}"
        )
    print(f"one sample: {1e3 * cost['sample_s']:.2f} ms of a thread, once per second")
    many = collector(given.ranks, 10.0)
    print(
        f"collector: {many['heard']} of {many['ranks']} ranks, {many['sample_bytes']} bytes each per second: "
        f"{many['core_share']:.1%} of a core"
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"job": cost, "collector": many}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
