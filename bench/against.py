"""No silent loss of speed: this checkout beside another commit, in turns. Emulated networks need root.

    python -m bench.against main                        every case, 6 rounds
    python -m bench.against main --only loss1 --rounds 20
    python -m bench.against v0.1.0 --keep v0.2.0        keeps the rows as those of a release, and writes docs/speed.md
    python -m bench.against --table                     only the table of the kept rows

The other commit is built in a git worktree in a temporary folder, with the packages of this virtual environment. Both
commits run the same programs (bench/jobs/against.py of this checkout), each with its own package and native code: A B,
B A, A B and so on. A round has one turn of each, with new ranks, and gives one ratio. The exit status is 1 where a case
is slower by more than 3 %, with the whole interval, or fails on this checkout. CPU time decides nothing.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import fabric
from bench.harness.matrix import time_text
from bench.harness.options import options
from bench.harness.page import write_between
from bench.harness.results import read_results, today, write_results
from bench.harness.tree import ROOT, CannotRunError, Case, Taken, Tree, UnknownCommitError, abbreviated, checkout
from bench.harness.turns import about_rounds, interval
from commlayer.tools.bench import machine
from commlayer.tools.emulate.namespace import EmulationError
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.ranks import terminable

RESULTS = ROOT / "bench/results/speed.json"
PAGE = ROOT / "docs/speed.md"
ROUNDS = 6
"""The fewest whose smallest and largest ratio enclose the median with 95 %."""
LIMIT = 1.03
"""The ratio that is no loss yet."""
UDP = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}
SIZES = {"4K": (4096, 1000, 100), "1M": (1 << 20, 100, 10), "16M": (16 << 20, 12, 2)}
"""Bytes, calls and discarded calls of an all-reduce in a loop."""
GAP_S = 0.002
SEEDS = (1, 2, 3)


def loopback(wire: str, environ: dict[str, str]) -> dict[str, Case]:
    """All-reduces of two ranks in a loop, and with pauses."""
    found = {}
    for size, (size_bytes, iters, warmup) in SIZES.items():
        for how, gap_s in (("loop", 0.0), ("spaced", GAP_S)):
            arguments: dict[str, float] = {
                "size_bytes": size_bytes,
                "iters": min(iters, 250) if gap_s else iters,
                "warmup": warmup,
            }
            if gap_s:
                arguments["gap_s"] = gap_s
            title = f"all-reduce of {size}iB, {wire}, {'pauses of 2 ms' if gap_s else 'in a loop'}"
            found[f"{wire}-{size}-{how}"] = Case(
                title, "all_reduce", tuple(arguments.items()), environ=tuple(environ.items())
            )
    return found


def emulated(
    title: str,
    scenario: str,
    loss: float | None = None,
    *,
    iters: int = 5,
    size_kib: int = 8192,
    ranks: str = "4 hosts",
) -> Case:
    """An all-reduce of four ranks between emulated hosts."""
    arguments = (("size_bytes", size_kib << 10), ("iters", iters), ("warmup", 2))
    size = f"{size_kib >> 10} MiB" if size_kib >= 1024 else f"{size_kib} KiB"
    return Case(f"all-reduce of {size}, {ranks}, {title}", "all_reduce", arguments, 4, (), scenario, loss)


CASES = {
    **loopback("shm", {"COMMLAYER_SHM": "1"}),
    **loopback("udp", UDP),
    "p2p-4K": Case("4 KiB to a rank and back", "p2p", (("size_bytes", 4096), ("iters", 1000), ("warmup", 100))),
    "p2p-4M": Case("4 MiB to a rank and back", "p2p", (("size_bytes", 4 << 20), ("iters", 30), ("warmup", 5))),
    "ddp": Case("step of DDP, 8 MiB of gradients", "ddp", (("width", 512), ("iters", 40), ("warmup", 5))),
    "ddp-int4": Case(
        "step of DDP, 32 MiB of gradients in int4, udp",
        "ddp",
        (("width", 1024), ("iters", 20), ("warmup", 5), ("codec", "int4")),
        environ=tuple(UDP.items()),
    ),
    "pipeline": Case("step of 1F1B, 8 micro-batches", "pipeline", (("width", 512), ("iters", 40), ("warmup", 5))),
    "start": Case("start of 16 ranks", "start", ranks=16),
    "memory": Case(
        "peak memory, 4 ranks, 16 MiB", "memory", (("size_bytes", 16 << 20), ("iters", 5)), ranks=4, unit="bytes"
    ),
    "clean": emulated("200 Mbit/s, no loss", "clean200"),
    "loss1": emulated("200 Mbit/s, 1 % loss", "loss1"),
    "loss3": emulated("200 Mbit/s, 3 % loss", "loss1", 0.03),
    "incast": emulated("200 Mbit/s, incast", "incast_cross"),
    "slow": emulated("200 Mbit/s, one host at half the rate", "slow_host"),
    "gigabit": emulated("1 Gbit/s, offloads", "gigabit", iters=20),
    **{
        f"long1-{size_kib}K": emulated(
            "200 Mbit/s, 1 % loss, round trips of 100 ms", "long1", iters=50, size_kib=size_kib
        )
        for size_kib in (64, 256)
    },
    **{
        f"pair-{size_kib}K": emulated(
            "200 Mbit/s, round trips of 20 ms", "pair", iters=50, size_kib=size_kib, ranks="2 hosts of 2 ranks"
        )
        for size_kib in (4, 64, 256)
    },
    **{
        name: emulated(
            f"200 Mbit/s, {text}", name.replace("-", "_"), iters=8, size_kib=16384, ranks="2 hosts of 2 ranks"
        )
        for name, text in (
            ("pair-near", "round trips of 0.2 ms"),
            ("pair-far", "round trips of 100 ms"),
            ("pair-tcp", "beside cubic"),
            ("pair-shallow", "round trips of 4 ms, buffers of 24 packets"),
        )
    },
    **{
        f"wan-scatter-{size_kib}K": Case(
            f"reduce-scatter of {size_kib} KiB, 4 hosts, 50 Mbit/s, 0.1 % loss, round trips of 40 ms",
            "reduce_scatter",
            (("size_bytes", size_kib << 10), ("iters", 30), ("warmup", 5)),
            4,
            (),
            "wan",
        )
        for size_kib in (256, 1024)
    },
    "pair-8x1M": Case(
        "8 all-reduces of 1 MiB at once, 2 hosts of 2 ranks, 200 Mbit/s, round trips of 20 ms",
        "all_reduces",
        (("size_bytes", 1 << 20), ("count", 8), ("iters", 10), ("warmup", 2)),
        4,
        (),
        "pair",
    ),
    **{
        name: Case(
            f"step of DDP, 8 MiB of gradients{text}, 2 hosts of 2 ranks, 200 Mbit/s, round trips of 20 ms",
            "ddp",
            (("width", 512), ("iters", 20), ("warmup", 5), ("codec", codec)),
            4,
            (),
            "pair",
        )
        for name, codec, text in (("pair-ddp", "", ""), ("pair-ddp-int4", "int4-int8", " in int4-int8"))
    },
    "local-exact": Case(
        "exact step of LocalSteps, 8 MiB of gradients, 4 hosts, 200 Mbit/s",
        "exact",
        (("width", 512), ("iters", 10), ("warmup", 4)),
        4,
        (),
        "clean200",
    ),
    **{f"fabric-{seed}": Case(f"fabric, all-to-owner, seed {seed}", seed=seed) for seed in SEEDS},
}


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure of this checkout, as a ratio of the other commit's."""

    ratio: float
    low: float
    high: float
    is_sure: bool
    """Whether the interval holds with 95 %."""

    @classmethod
    def of(cls, ratios: Sequence[float], *, is_exact: bool = False) -> Change:
        """The median of the rounds, with its interval. `is_exact`: every round is the same."""
        return cls(statistics.median(ratios), *interval(ratios), is_exact or len(ratios) >= ROUNDS)

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval lies above the limit."""
        return self.is_sure and self.low > LIMIT

    @property
    def is_gain(self) -> bool:
        """Whether the whole interval lies below the inverse of the limit."""
        return self.is_sure and self.high < 1 / LIMIT

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})" if self.low < self.high else f"{self.ratio:.3f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A case on both commits, or the reason why there is nothing to compare."""

    name: str
    before: float = 0.0
    after: float = 0.0
    change: Change | None = None
    cpu: Change | None = None
    failure: str = ""
    is_broken: bool = False
    """Whether the case fails on this checkout."""

    @property
    def verdict(self) -> str:
        """The verdict in the table."""
        if self.change is None:
            return "**fails here**" if self.is_broken else "**not compared**"
        if not self.change.is_sure:
            return "too few rounds"
        return "**slower**" if self.change.is_loss else "faster" if self.change.is_gain else "same"

    @property
    def is_bad(self) -> bool:
        """Whether the exit status says so."""
        return self.is_broken or (self.change is not None and self.change.is_loss)

    @classmethod
    def of(cls, name: str, rounds: Sequence[tuple[Taken, Taken]]) -> Row:
        """The row of pairs: the other commit's turn, and this checkout's."""
        before, after = (statistics.median(turn.value for turn in side) for side in zip(*rounds, strict=True))
        change = Change.of([mine.value / its.value for its, mine in rounds], is_exact=CASES[name].is_exact)
        has_cpu = all(turn.cpu_us for pair in rounds for turn in pair)
        cpu = Change.of([mine.cpu_us / its.cpu_us for its, mine in rounds]) if has_cpu else None
        return cls(name, before, after, change, cpu)

    def cells(self) -> str:
        """A line of the table, as Markdown."""
        case = CASES[self.name]
        if self.change is None:
            return f"| {self.name} | {case.title} | | | {self.failure} | | {self.verdict} |"
        before, after = (text(value, case) for value in (self.before, self.after))
        cpu = "" if self.cpu is None else f"{self.cpu}" + " more" * self.cpu.is_loss
        return f"| {self.name} | {case.title} | {before} | {after} | {self.change} | {cpu} | {self.verdict} |"


HEAD = "| case | subject | before | after | after / before (95 %) | CPU time, after / before | verdict |"


def text(value: float, case: Case) -> str:
    """A figure with its unit."""
    return f"{value / 2**20:.1f} MiB" if case.unit == "bytes" else time_text(value)


def turn(tree: Tree, case: Case, network: Network | None) -> Taken:
    """One turn of a commit. Raises CannotRunError."""
    if not case.is_exact:
        return tree.take(case, network)
    try:
        found = fabric.run(fabric.CASES["direct"], "reliable", case.seed, quick=False, tree=tree.path)
    except (OSError, RuntimeError) as error:
        raise CannotRunError(tree, str(error)) from None
    if "unfinished" in found:
        raise CannotRunError(tree, found["unfinished"])
    return Taken(found["collectives"]["mean_us"], 0.0)


def compare(name: str, other: Tree, own: Tree, rounds: int) -> Row:
    """Runs a case on both, in turns; a second time if it looks slower. Then the second measurement alone counts."""
    case = CASES[name]
    try:
        with case.network() as network:
            row = Row.of(name, pairs(case, network, other, own, rounds))
            if row.is_bad and not case.is_exact:
                say(f"{name}: {row.change} looks slower; measured again")
                row = Row.of(name, pairs(case, network, other, own, rounds))
            return row
    except EmulationError as error:
        return Row(name, failure=f"cannot run on this machine: {error}")
    except CannotRunError as error:
        return Row(name, failure=f"cannot run: {error}", is_broken=error.tree is own)


def pairs(case: Case, network: Network | None, other: Tree, own: Tree, rounds: int) -> list[tuple[Taken, Taken]]:
    """The turns of each round: the other commit's, and this checkout's. Raises CannotRunError."""
    found = []
    for number in range(1 if case.is_exact else rounds + case.discards):
        turns = {tree: turn(tree, case, network) for tree in (other, own)[:: 1 if number % 2 == 0 else -1]}
        found.append((turns[other], turns[own]))
    return found[0 if case.is_exact else case.discards :]


def measure(commit: str, names: Sequence[str], rounds: int, report: Callable[[Row], None]) -> list[Row]:
    """The rows of some cases. Raises UnknownCommitError, or CannotRunError if one of both cannot be built."""
    targets = [str(path.relative_to(ROOT)) for path in (fabric.PROGRAM, fabric.PLANS)]
    needed = targets if any(CASES[name].is_exact for name in names) else []
    rows = []
    label = abbreviated(commit)
    with terminable(), checkout(label) as path, Tree(path, label) as other, Tree(ROOT, "this checkout") as own:
        for tree in (own, other):
            say(f"building {tree.label}")
            tree.build(needed)
        for name in names:
            rows.append(compare(name, other, own, rounds))
            report(rows[-1])
    return rows


def keep(release: str, commit: str, rounds: int, rows: Sequence[Row]) -> None:
    """Puts the rows among those of a release."""
    kept = read_results(RESULTS, {})
    about = {"against": abbreviated(commit), "measured": today(), "rounds": rounds, "machine": machine.facts()}
    for row in rows:
        fields = dataclasses.asdict(row)
        kept.setdefault(release, {})[fields.pop("name")] = fields | about
    write_results(RESULTS, kept)


def kept_row(name: str, fields: Mapping[str, Any]) -> Row:
    """A row as `keep` wrote it."""
    own = {field.name: fields[field.name] for field in dataclasses.fields(Row) if field.name != "name"}
    changes = {key: None if own[key] is None else Change(**own[key]) for key in ("change", "cpu")}
    return Row(name, **own | changes)


def history(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each release and case, the releases of a case below each other."""
    lines = [f"| release | against{HEAD}", "|---" * (HEAD.count("|") + 1) + "|"]
    for name in CASES:
        for release, rows in kept.items():
            if name in rows:
                lines.append(f"| {release} | {rows[name]['against']} {kept_row(name, rows[name]).cells()}")
    if len(lines) == 2:
        return "Nothing has been kept yet: `python -m bench.against COMMIT --keep RELEASE`."
    about = []
    for release, rows in kept.items():
        for row in rows.values():
            host = row["machine"]
            line = f"{release}: measured {row['measured']} in {row['rounds']} rounds on {host['cores']} cores of "
            about.append(f"{line}{host['cpu']}, load average {host['load_average']}, commit {host['git_commit']}.")
    return "\n".join([*lines, "", *dict.fromkeys(about)])


def write_page() -> None:
    """Writes the kept rows into the page."""
    write_between(PAGE, speed=history(read_results(RESULTS, {})))


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Exit status: 1 if a case is slower or fails on this checkout, 2 if the other commit cannot be built."""
    parser = options(__doc__, only=CASES, rounds=ROUNDS, table=True)
    parser.add_argument("commit", nargs="?", help="the other commit")
    parser.add_argument("--keep", metavar="RELEASE", help="keep the rows, and write docs/speed.md")
    given = parser.parse_args()
    if given.table:
        write_page()
        return 0
    if given.commit is None or given.rounds < 1:
        parser.error("name the other commit, as `main` or `HEAD~1`, and at least 1 round")
    for name in [name for name in os.environ if name.startswith("COMMLAYER_")]:
        del os.environ[name]  # the cases have their own settings
    os.chdir(ROOT)
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n", flush=True)
    try:
        rows = measure(
            given.commit, given.only or list(CASES), given.rounds, lambda row: print(row.cells(), flush=True)
        )
    except (CannotRunError, UnknownCommitError) as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return 2
    print(f"\n{about_rounds(given.rounds)} {summary(rows)}")
    if given.keep:
        keep(given.keep, given.commit, given.rounds, rows)
        write_page()
    return int(any(row.is_bad for row in rows))


def summary(rows: Sequence[Row]) -> str:
    """The verdicts in a sentence."""
    bad = ", ".join(row.name for row in rows if row.is_bad) or "none"
    missing = ", ".join(row.name for row in rows if row.change is None and not row.is_broken) or "none"
    return f"Slower by more than {LIMIT - 1:.0%}, or failed: {bad}. Not compared: {missing}."


if __name__ == "__main__":
    sys.exit(main())
