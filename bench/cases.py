"""The cases of `bench/stress.py`: networks under stress, and the measurements on each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commlayer.tools.bench.spec import CAST_NAMES, BackendSpec

TCP_CC = ("cubic", "bbr")
CHUNKS = (1, 4)
WIRES = ("float32", "16 bit")
"""Gradients as they are, and cast; backends are compared on the same wire. gloo casts to the better 16-bit type."""
OUR_CAST = "float16"


def wire_of(name: str) -> str:
    """The one of `WIRES` that the backend called `name` uses."""
    return WIRES[BackendSpec.parse(name).cast is not None]


def is_gloo(name: str) -> bool:
    """Whether it is one of gloo's variants."""
    return BackendSpec.parse(name).name == "gloo"


def ours(*settings: str, wires: Iterable[str] = WIRES) -> tuple[str, ...]:
    """commlayer with each of these settings, on each wire."""
    casts = ("" if wire == WIRES[0] else f":cast={OUR_CAST}" for wire in wires)
    return tuple(f"commlayer{cast}{setting}" for cast in casts for setting in settings)


def bounded(bound: float) -> tuple[str, str]:
    """commlayer with this loss bound and each treatment: of the bare all-reduce and of the hook."""
    return f":loss_bound={bound}:treatment=rescale", f":loss_bound={bound}"


def papers(bound: float) -> str:
    """The papers' rule: both halves may lose packets, and lost contributions count as 0."""
    return f":loss_bound={bound}:treatment=zero:partial_results=True"


GLOO_TUNED = tuple(
    f"gloo/{tcp_cc}{cast}{f':chunks={chunks}' if chunks > 1 else ''}"
    for cast in ("", *(f":cast={name}" for name in CAST_NAMES))
    for tcp_cc in TCP_CC
    for chunks in CHUNKS
)


@dataclass(frozen=True)
class Case:
    """One row of the matrix: a network, and the measurements on it."""

    title: str
    scenario: str
    backends: tuple[str, ...]
    arguments: str
    """Arguments of the bench."""
    rounds: int
    iters: int
    tunes_gloo: bool = False
    """Whether to add gloo's fastest variants of each congestion control, with and without compression."""
    environ: tuple[tuple[str, str], ...] = ()
    may_fail: bool = False
    """Whether a failure is a result, too."""

    def command(self, backends: Iterable[str], rounds: int, iters: int) -> str:
        """The arguments of `commlayer bench`."""
        return (
            f"{self.arguments} --scenario {self.scenario} --backends {','.join(backends)} "
            f"--rounds {rounds} --iters {iters} --warmup 1 --timeout 120"
        )


GRADIENTS = "gradients --sizes 8M"
BESIDE = ":beside=64M"
BESIDE_SLOW = ":beside=16M"
URGENT = "commlayer:priority=0"
DYING = "gradients --sizes 1M"


def urgent(title: str, scenario: str, bulk: str, *, marked: bool = False) -> Case:
    """A small urgent operation, alone and beside bulk; `marked`: with DSCP for the switches."""
    return Case(
        title + (", DSCP for the switches" if marked else ""),
        scenario,
        (URGENT, URGENT + bulk),
        "all_reduce --sizes 64K",
        rounds=3,
        iters=20,
        environ=(("COMMLAYER_DSCP", "1"),) if marked else (),
    )


NICS_GLOO = tuple(f"gloo/{tcp_cc}:chunks=8" for tcp_cc in TCP_CC)
CASES = {
    "clean": Case(
        "8 MiB, no stress", "clean200", ours("", *bounded(0.01)), GRADIENTS, rounds=3, iters=5, tunes_gloo=True
    ),
    "loss1": Case("8 MiB, 1 % loss", "loss1", ours("", *bounded(0.01), papers(0.01)), GRADIENTS, 3, 9, tunes_gloo=True),
    "burst1": Case(
        "8 MiB, 1 % loss in bursts of 8", "burst1", ours("", *bounded(0.01)), GRADIENTS, 3, 5, tunes_gloo=True
    ),
    "uneven3": Case(
        "8 MiB, 3 % loss at one host", "uneven3", ours("", *bounded(0.03)), GRADIENTS, 3, 5, tunes_gloo=True
    ),
    "incast": Case(
        "8 MiB, 4-to-1 incast and cross traffic of 50 %",
        "incast_cross",
        ours("", *bounded(0.01)),
        GRADIENTS,
        rounds=3,
        iters=3,
        tunes_gloo=True,
    ),
    "priority": Case(
        "64 KiB beside 64 MiB",
        "clean200",
        tuple(name + beside for name in (URGENT, "gloo/cubic", "gloo/bbr") for beside in ("", BESIDE)),
        "all_reduce --sizes 64K",
        rounds=3,
        iters=20,
    ),
    "priority-marked": urgent("64 KiB beside 64 MiB", "clean200", BESIDE, marked=True),
    "priority-50": urgent("64 KiB beside 16 MiB, 50 Mbit/s", "clean50", BESIDE_SLOW),
    "priority-50-marked": urgent("64 KiB beside 16 MiB, 50 Mbit/s", "clean50", BESIDE_SLOW, marked=True),
    "nics-100-100": Case("8 MiB, 2 NICs", "two_nics_100_100", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    "nics-150-50": Case("8 MiB, NICs of 150 and 50", "two_nics_150_50", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    "nics-4x50": Case("8 MiB, 4 NICs of 50", "four_nics_50", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    # one run for each backend: a failed backend ends its run
    "nic-dies": Case("1 MiB, 1 of 2 NICs dies", "nic_dies", ("commlayer",), DYING, rounds=1, iters=200),
    "nic-dies-gloo": Case(
        "1 MiB, 1 of 2 NICs dies", "nic_dies", (NICS_GLOO[1],), DYING, rounds=1, iters=120, may_fail=True
    ),
}
