"""Writes the plans that the simulator runs: `python native/sim/plans.py build/plans.bin`; plans.h has the format.

The collectives are those that plans/select.py offers. Their clauses come from the oracle of the tests, so the simulator
checks results against what a collective means and not against the algorithm. It takes every layout, and of sizes and
settings a sample that is the same each time. Only numpy is needed: no torch, and no compiled module.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

ROOT = Path(__file__).resolve().parents[2]
# Importing commlayer itself would import torch and the compiled module; its plans need neither.
_package = types.ModuleType("commlayer")
_package.__path__ = [str(ROOT / "commlayer")]
sys.modules.setdefault("commlayer", _package)
sys.path.append(str(ROOT))

from commlayer.errors import ConfigError  # noqa: E402
from commlayer.plans import grid, select  # noqa: E402
from commlayer.plans.plan import Plan  # noqa: E402
from commlayer.plans.settings import Settings  # noqa: E402
from tests import oracle  # noqa: E402

delivery: Any = None
if importlib.util.find_spec("commlayer.plans.delivery"):
    delivery = importlib.import_module("commlayer.plans.delivery")

Hosts = tuple[tuple[int, ...], ...]

VERSION = 5
HEAD = struct.Struct("<8sIIIIQQ")
LAYOUT = struct.Struct("<IIQII")
SHAPE = struct.Struct("<24sIIIIII8sQQQIIdQ")
PART = struct.Struct("<QQQIIIIQQ")
CLAUSE = struct.Struct("<QQQII")

SMALL_WORLDS = (
    *(tuple((rank,) for rank in range(n)) for n in (2, 3, 4, 5, 8)),
    *((tuple(range(n)),) for n in (2, 3, 4)),
    ((0, 1), (2, 3)),
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3, 4)),
    ((0,), (1, 2), (3,)),
    ((0, 1), (2, 3), (4, 5)),
)
SAMPLES = 18
"""Shapes of each collective in each small layout."""

MIDDLE_WORLDS = (16, 24, 48)
LARGE_WORLDS = (128, 512, 1024)


class Shape(NamedTuple):
    """One collective with all that its plan depends on."""

    collective: str
    numel: int
    itemsize: int
    average: bool
    root: int
    settings: Settings
    loss_bound: float = 0.0


DELIVERIES = ("all_to_all_uneven", "gather", "scatter", "all_gather_uneven")
"""The deliveries that are simulated, where there is plans/delivery.py."""


def meaning(shape: Shape, rank: int, world: int) -> oracle.Meaning:
    """The collective of a shape for one rank, with lengths in bytes."""
    means = oracle.meaning(shape.collective, rank, world, shape.numel * shape.itemsize, shape.root)
    return means._replace(in_place=means.in_place and not shape.settings.partial)


def delivery_plan(shape: Shape, rank: int, hosts: Hosts) -> Plan:
    ranks, length = range(sum(map(len, hosts))), shape.numel * shape.itemsize
    sent = [oracle.delivered(shape.collective, rank, other, length, shape.root) for other in ranks]
    received = [oracle.delivered(shape.collective, other, rank, length, shape.root) for other in ranks]
    same = shape.collective in oracle.SAME
    plan: Plan = delivery.deliver(rank, hosts, sent, received, shape.settings.staging_bytes, same=same)
    return plan


def weights(hosts: Hosts, chance: random.Random) -> tuple[int, ...]:
    """The weights of the hosts' shares of an all-reduce: equal, any, or nothing for one of them."""
    drawn = [chance.choice((0, 1, 9, 32)) for _ in hosts]
    equal = [int(host > 0) for host in range(len(hosts))]
    return chance.choice(((), tuple(drawn) if any(drawn) else (), tuple(equal) if any(equal) else ()))


def sample(hosts: Hosts, collective: str, chance: random.Random) -> Shape:
    """A shape for a small world: mostly small tensors, now and then one of some hundred kilobytes."""
    world = sum(map(len, hosts))
    itemsize = chance.choice((1, 2, 4, 4, 8))
    most = 600_000 // (world * itemsize)
    numel = chance.choice((0, 1, 3, world, 100, 1000, 1001, 5000, 5003, 20_000, 65_536, 150_001))
    settings = Settings(
        algorithm=chance.choice(("auto", "direct", "ring")),
        deterministic=chance.random() < 0.3,
        segment_bytes=chance.choice((4 << 10, 16 << 10, 64 << 10, 256 << 10)),
        exchange_limit_bytes=chance.choice((0, 32 << 10)),
        staging_bytes=chance.choice((4 << 10, 16 << 10, 128 << 10)),
        small_bytes=chance.choice((0, 64 << 10)),
        weights=weights(hosts, chance),
    )
    average = collective in ("all_reduce", "reduce_scatter", "reduce") and chance.random() < 0.25
    return Shape(collective, min(numel, most), itemsize, average, chance.randrange(world), settings)


def partial_sample(hosts: Hosts, collective: str, chance: random.Random) -> Shape:
    """A shape of which contributions may be lost."""
    world, itemsize = len(hosts), chance.choice((2, 4, 8))
    numel = chance.choice((100, 5003, 20_000, 65_536, 150_001))
    settings = Settings(
        segment_bytes=chance.choice((16 << 10, 64 << 10, 256 << 10)),
        exchange_limit_bytes=0,  # that plan loses nothing
        partial=True,
        partial_message_bytes=chance.choice((0, 8 << 10, 64 << 10)),
        weights=weights(hosts, chance),
    )
    loss_bound = chance.choice((0.02, 0.1, 0.3, 0.5))
    most = 600_000 // (world * itemsize)
    return Shape(collective, min(numel, most), itemsize, chance.random() < 0.4, 0, settings, loss_bound)


EXACT = ("bf16", "f16")
"""Codecs that hold the simulator's small numbers exactly."""

SHORT = (("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("int8", "bf16"))


def encoding(settings: Settings) -> int:
    """The enum sim_encoding of the messages."""
    codecs = settings.codecs or ()
    return 0 if not codecs else 1 if set(codecs) <= set(EXACT) else 3 if "int4" in codecs else 2


def encoded_sample(hosts: Hosts, chance: random.Random, offered: tuple[tuple[str, str], ...]) -> Shape:
    """A shape whose messages are encoded by one of these pairs of codecs."""
    numel = chance.choice((3, 100, 5003, 20_000, 65_536))
    settings = Settings(
        deterministic=chance.random() < 0.3,
        segment_bytes=chance.choice((4 << 10, 16 << 10, 64 << 10, 256 << 10)),
        exchange_limit_bytes=0,  # that plan encodes nothing
        staging_bytes=chance.choice((4 << 10, 16 << 10, 128 << 10)),
        codecs=chance.choice(offered),
        weights=weights(hosts, chance),
    )
    return Shape("all_reduce", min(numel, 300_000 // sum(map(len, hosts))), 4, False, 0, settings)


def large(world: int) -> Iterator[Shape]:
    """Shapes that are possible with very many ranks: few messages each, or one rank that all others talk to."""
    ring, direct = (Settings(algorithm=name) for name in ("ring", "direct"))
    chunks = min(world, 16_384 // world)
    yield Shape("all_reduce", chunks, 4, False, 0, ring)  # this many of the ring's chunks are not empty
    yield Shape("all_reduce", 4, 4, True, 0, direct)  # four owners: everybody sends to them, they send to everybody
    yield Shape("broadcast", 3000, 4, False, world // 2, direct)
    if world >= grid.MEMBERS_LEAST:
        yield Shape("all_reduce", 30, 4, False, 0, Settings())
        yield Shape("all_reduce", 3000, 4, True, 0, Settings())
        yield Shape("barrier", 0, 1, False, 0, Settings())
    if world <= 128:
        yield Shape("barrier", 0, 1, False, 0, direct)
        yield Shape("reduce_scatter", 700, 2, False, 0, ring)
        yield Shape("all_gather", 300, 4, False, 0, ring)


def shapes(hosts: Hosts) -> Iterator[Shape]:
    """Every shape of a layout, in an order that does not change."""
    world = sum(map(len, hosts))
    chance = random.Random(repr(hosts))  # noqa: S311  # a sample
    if world in LARGE_WORLDS:
        yield from large(world)
        return
    for collective in (*get_args(select.Collective), *(DELIVERIES if delivery else ())):
        count = 1 if collective == "barrier" else 3 if world in MIDDLE_WORLDS else SAMPLES
        for _ in range(count):
            yield sample(hosts, collective, chance)
    if len(hosts) > 1:
        for _ in range(3 if world in MIDDLE_WORLDS else SAMPLES // 2):
            yield encoded_sample(hosts, chance, (("bf16", "bf16"), ("f16", "bf16"), ("f16", "f16")))
    if len(hosts) == world:
        for _ in range(3 if world in MIDDLE_WORLDS else SAMPLES):
            yield partial_sample(hosts, "all_reduce", chance)
            yield partial_sample(hosts, "reduce_scatter", chance)
    if len(hosts) > 1 and world not in MIDDLE_WORLDS:
        for _ in range(SAMPLES // 3):
            yield encoded_sample(hosts, chance, SHORT)


def plans_of(shape: Shape, hosts: Hosts) -> list[Plan]:
    """The plan of every rank. Raises ConfigError when the settings do not allow one."""
    world = sum(map(len, hosts))
    if shape.collective in DELIVERIES:
        return [delivery_plan(shape, rank, hosts) for rank in range(world)]
    arguments: dict[str, Any] = {**shape._asdict(), "hosts": hosts}
    collective = arguments.pop("collective")
    del arguments["loss_bound"]  # how the plan is run, and no part of it
    build = select.make_plan  # a cache would only fill memory
    return [build(collective, rank=rank, **arguments) for rank in range(world)]


class Writer:
    """Appends records to the file, each at a multiple of 8 bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.at = 0

    def append(self, data: bytes) -> int:
        """Returns where it is."""
        at = self.at
        self._file.write(data + bytes(-len(data) % 8))
        self.at += len(data) + -len(data) % 8
        return at

    def finish(self, head: bytes) -> None:
        self._file.seek(0)
        self._file.write(head)
        self._file.close()


def write_shape(writer: Writer, layout: int, hosts: Hosts, shape: Shape) -> bytes | None:
    """Writes the parts of all ranks; returns the shape's record, None when there is no such plan."""
    world = sum(map(len, hosts))
    try:
        plans = plans_of(shape, hosts)
    except ConfigError:
        return None
    meanings = [meaning(shape, rank, world) for rank in range(world)]
    parts = []
    for plan, means in zip(plans, meanings, strict=True):
        clauses = [CLAUSE.pack(*clause, 0) for clause in means.clauses if clause.length]
        steps = writer.append(plan.steps.tobytes())
        successors = writer.append(plan.successors.tobytes())
        parts.append(
            PART.pack(
                steps,
                successors,
                writer.append(b"".join(clauses)),
                len(plan.steps),
                len(plan.successors),
                len(clauses),
                0,
                plan.scratch_bytes,
                plan.staging_bytes,
            )
        )
    return SHAPE.pack(
        shape.collective.encode(),
        layout,
        world,
        shape.itemsize,
        shape.average,
        shape.root,
        shape.settings.deterministic,
        shape.settings.algorithm.encode(),
        shape.numel,
        max(means.input_length for means in meanings),
        max(means.output_length for means in meanings),
        meanings[0].in_place,
        encoding(shape.settings),
        shape.loss_bound,
        writer.append(b"".join(parts)),
    )


FABRIC_HOSTS, FABRIC_QUICK_HOSTS = 144, 24
FABRIC_BUCKETS = ((3 << 20), (6 << 20), (12 << 20))
"""Bytes of what a training step reduces on the fabric, from the last layers to the first."""

FABRIC_SERVERS, FABRIC_SERVERS_BYTES = 8, 1 << 20
"""A parameter server on the fabric: so many hosts own the result, in equal shards."""

FABRIC_PACKETS = 4096
"""Bytes of the fabric's packets."""


def fabric() -> Iterator[tuple[Hosts, Iterator[Shape]]]:
    """The work of bench/fabric.py: the buckets by the direct plan, then by the ring, and the parameter server; the same
    for --quick, with smaller buckets.
    """
    for world, scale in ((FABRIC_HOSTS, 1), (FABRIC_QUICK_HOSTS, 2)):
        direct = Settings(partial=True, partial_message_bytes=40 * FABRIC_PACKETS)
        apart = world // FABRIC_SERVERS  # the servers are spread over the leaves
        servers = replace(direct, weights=tuple(int(rank % apart == 0) for rank in range(world)))
        buckets = [(length // scale, by) for by in (direct, Settings(algorithm="ring")) for length in FABRIC_BUCKETS]
        yield (
            tuple((rank,) for rank in range(world)),
            (
                Shape("all_reduce", length // 4, 4, False, 0, settings)
                for length, settings in (*buckets, (FABRIC_SERVERS_BYTES, servers))
            ),
        )


SCALE_HOSTS, SCALE_BYTES = (144, 256, 1000), (32, 4096, 65_536, 262_144)


def scale() -> Iterator[tuple[Hosts, Iterator[Shape]]]:
    """The all-reduces of bench/scale.py on the fabric: as `auto` chooses, a shard per rank, and deterministic.
    Of 1,000 hosts the first alone: the others would fill the memory of most machines.
    """
    settings = (Settings(), Settings(algorithm="direct"), Settings(deterministic=True))
    for world in SCALE_HOSTS:
        yield (
            tuple((rank,) for rank in range(world)),
            (
                Shape("all_reduce", length // 4, 4, False, 0, chosen)
                for length in SCALE_BYTES
                for chosen in settings[: 3 if world < 1000 else 1]
            ),
        )


def simulation() -> Iterator[tuple[Hosts, Iterator[Shape]]]:
    """Everything of which `make sim` takes its scenarios."""
    flat = [tuple((rank,) for rank in range(n)) for n in (*MIDDLE_WORLDS, *LARGE_WORLDS)]
    for hosts in (*SMALL_WORLDS, *flat):
        yield hosts, shapes(hosts)


def write(path: Path, layouts_of: Iterator[tuple[Hosts, Iterator[Shape]]]) -> None:
    """Writes the file with these layouts and their shapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = Writer(partial)
    writer.append(bytes(HEAD.size))
    layouts: list[bytes] = []
    records: list[bytes] = []
    for number, (hosts, offered) in enumerate(layouts_of):
        world = sum(map(len, hosts))
        host_of = [next(i for i, host in enumerate(hosts) if rank in host) for rank in range(world)]
        at = writer.append(struct.pack(f"<{world}I", *host_of))
        first = len(records)
        for shape in offered:
            record = write_shape(writer, number, hosts, shape)
            if record is not None:
                records.append(record)
        layouts.append(LAYOUT.pack(world, len(hosts), at, first, len(records)))
    layouts_at = writer.append(b"".join(layouts))
    shapes_at = writer.append(b"".join(records))
    writer.finish(HEAD.pack(b"CLPLANS", VERSION, len(layouts), len(records), 0, layouts_at, shapes_at))
    partial.replace(path)
    print(f"{path}: {len(records)} shapes in {len(layouts)} layouts, {writer.at >> 20} MiB")


if __name__ == "__main__":
    work = {"": simulation, "fabric": fabric, "scale": scale}
    if len(sys.argv) not in (2, 3) or (sys.argv[2:] or [""])[0] not in work:
        raise SystemExit(f"usage: {sys.argv[0]} FILE [fabric|scale]")
    write(Path(sys.argv[1]), work[(sys.argv[2:] or [""])[0]]())
