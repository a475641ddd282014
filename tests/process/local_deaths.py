"""Trainings with `LocalSteps(min_sites=...)`, whose sites are killed, stop by an exception, or join. By hand, with many
seeds:

python -m tests.process.local_deaths --seeds 100
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.compress.fine import Fine
from commlayer.frontend.group import kept, transfer
from commlayer.frontend.local import grace, pace, training
from commlayer.frontend.local.arguments import Arguments
from commlayer.frontend.local.fragment import fragments_of
from commlayer.frontend.local.outer import PLAIN, Outer
from commlayer.frontend.local.pace import Pace
from commlayer.frontend.local.rounds import Rounds
from commlayer.frontend.local.site import Site
from commlayer.frontend.local.sync import Head
from commlayer.frontend.local.turns import Turns
from commlayer.transport import joining as joining_of_groups
from tests import ranks
from tests.process import local_plan
from tests.process.local_plan import Plan
from tests.process.test_local_steps import ERRORS, Given

RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Ended:
    """A sync: the sites that took part in it, with how many samples, and which of them counted."""

    members: tuple[int, ...]
    samples: tuple[float, ...]
    counting: tuple[bool, ...]
    is_rest: bool


@dataclasses.dataclass
class Report:
    """What a process that lived to the end has seen."""

    values: list[float]
    """This rank's part of the parameters, then the buffers."""
    number: int
    begun: list[list[float]]
    """This rank's shards of the shared weights at the start, by fragment; of a site that has joined 0."""
    shared: list[list[float]]
    """The same at the end."""
    made: list[list[float]]
    """The sum of the site's own steps."""
    syncs: dict[int, Ended]
    """By turn."""
    steps: int
    """Its own."""
    taken: list[int]
    """The turns of the syncs whose outcome came from another site, after a death."""
    missed: list[int]
    """The turns of the syncs that began while the loop was away."""
    turns: Turns
    """Those at the end."""


AWAY_S = 2.0
"""The longest wait of a loop that is away: the others may have died, or wait for it, as too many are away."""


class Stopped(Exception):  # noqa: N818  # an error of a job
    pass


class Watched(Rounds):
    """Writes down what is sent, and what has become of it."""

    plan: Plan
    folder: Path
    process: int

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ended: dict[int, Ended] = {}
        self.taken: list[int] = []
        self.begun = [each.shared.tolist() for each in self.shared.fragments]
        self._store: Any = ranks.store()  # a new connection takes seconds now and then

    def _begin(self, head: Any, difference: Tensor, *given: Any) -> None:
        number = self._living.party.own
        writing = self.folder / f"{number} {head.turn} half"  # it may be killed there
        torch.save(difference, writing)
        writing.rename(self.folder / f"{number} {head.turn}")
        super()._begin(head, difference, *given)
        self._store.set(f"begun {head.turn}", "")
        for process, turn, after_s in self.plan.kills:
            if (process, turn) == (self.process, head.turn):
                threading.Thread(target=_die, args=(after_s,), daemon=True).start()

    def _ended(self, sync: Any, **given: Any) -> Any:
        if (self.process, sync.head.turn) in self.plan.deaf:
            finish, sync.finish = sync.finish, lambda: _deaf(sync, finish)
        ended, outcome, is_heard = super()._ended(sync, **given)
        samples = tuple(head.samples for head in outcome.heads)
        counting = tuple(not (head.is_listening or head.is_late) for head in outcome.heads)
        sites = tuple(member // self.plan.width for member in ended.ranks)
        self.ended[ended.head.turn] = Ended(sites, samples, counting, outcome.is_rest)
        return ended, outcome, is_heard

    def _close(self) -> None:
        if self.process in self.plan.late:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._close()

    def _meet(self, sync: Any) -> Any:
        if self.process == self.plan.meeting:
            os.kill(os.getpid(), signal.SIGKILL)
        found = super()._meet(sync)
        if found is not None:
            self.taken.append(sync.head.turn)
        return found


def _deaf(sync: Any, finish: Any) -> None:
    """The sync has ended, but this rank learns of a death before it learns that."""
    sync.finish = finish
    finish()
    raise commlayer.PeerLostError("it did not hear the end")


def _hosts_of(hosts: Sequence[int], descriptions: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for rank, description in enumerate(descriptions):
        found.setdefault(hosts[description["peer"]], []).append(rank)
    return tuple(tuple(members) for members in found.values())


def _die_in_transfer(pieces: int) -> None:
    for end, name in ((transfer.Sending, "_next"), (transfer.Receiving, "received")):

        def pump(self: Any, *, real: Any = end.pump, name: str = name, **options: Any) -> Any:
            if getattr(self, name) >= pieces:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, **options)

        end.pump = pump  # type: ignore[method-assign]


def _pace(plan: Plan, site: int) -> None:
    """Lets all sites find, at random turns, that H is too small or too large."""
    form: Any = vars(Arguments)["form"]
    vars(pace).update(WINDOW=2)
    told = Pace.tell

    def tell(self: Pace, head: Head, of: Site) -> Head:
        head, draw = told(self, head, of), random.Random(f"{plan.seed} {head.turn}")
        if head.turn <= self.turns.since_turn or (head.turn - self.turns.since_turn) % pace.WINDOW:
            return head
        waited, used = draw.choice([(0.4, 1.0), (0.0, 0.3), (0.0, 1.0)])
        own = random.Random(f"{plan.seed} {head.turn} {site}").random()
        return head._replace(waited=waited * (1 + own), used=used * (1 - own / 2))

    setattr(Arguments, "form", property(lambda self: form.fget(self)._replace(is_paced=True)))  # noqa: B010
    setattr(Pace, "tell", tell)  # noqa: B010


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


class Felt(Given):
    """The same, with gradients that a backward pass makes: each rank's own, of which the site takes the average."""

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(weight * each).sum() for weight, each in zip(self.weights, gradients, strict=True)]).sum()


def gradients_of(process: int, step: int) -> list[Tensor]:
    """Those of `Given`."""
    generator = torch.Generator().manual_seed(1000 * process + step)
    return [torch.randn(weight.shape, generator=generator) for weight in Given().weights]


def model_of(plan: Plan, process: int, *, joins: bool) -> Any:
    """That of a process, whose WORLD is there if its site has several ranks."""
    model: Any = (Felt if plan.layout else Given)(plan.mates(process)[0] if joins else 5)
    model.register_buffer("mean", torch.zeros(3 if plan.has_buffers else 0))
    if not plan.layout:
        return model
    sites, replicas = 1 if joins else plan.sites, 2 if plan.layout == "HSDP" else 1
    shape = (sites, replicas, plan.width // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("site", "replica", "rank"))
    mesh = mesh["replica", "rank"] if plan.layout == "HSDP" else mesh["rank"]
    if plan.layout == "DDP":
        return DistributedDataParallel(model, process_group=mesh.get_group(), broadcast_buffers=False)
    fully_shard(model, mesh=mesh)
    return model


def begin_site(plan: Plan, process: int) -> None:
    """The WORLD of a site that joins."""
    part: Any = dist.PrefixStore(f"site of {plan.mates(process)[0]}", ranks.store())
    rank = process % plan.width
    timeout = timedelta(seconds=20)
    dist.init_process_group(plan.backend, store=part, rank=rank, world_size=plan.width, timeout=timeout)


def make_step(plan: Plan, model: Any, optimizer: torch.optim.Optimizer, process: int, step: int) -> None:
    if not plan.layout:
        model.step(optimizer, process, step)
        return
    optimizer.zero_grad()
    model(gradients_of(process, step)).backward()
    optimizer.step()


def train(process: int, size: int, plan: Plan, folder: str) -> Report | str | None:
    """Returns a report; why a process could not join, or cannot go on; None of one that was stopped."""
    joins, store = process >= plan.size, ranks.store()
    Watched.plan, Watched.folder, Watched.process = plan, Path(folder), process
    vars(training)["Rounds"] = Watched
    if plan.hosts is not None:
        joining_of_groups.group_hosts = functools.partial(_hosts_of, plan.hosts)
    if plan.is_slow or plan.last_piece is not None:
        vars(transfer).update(PIECE_BYTES=1 << 16, IN_FLIGHT=1)
    if plan.last_piece is not None and plan.last_piece[0] == process:
        _die_in_transfer(plan.last_piece[1])
    if plan.kept < kept.KEPT_LEAST:
        vars(kept).update(KEPT_BYTES=0, KEPT_LEAST=plan.kept)
    if plan.is_paced:
        _pace(plan, process // plan.width)
    vars(grace).update(TURNS_LEAST=1, TIMES=0.0, STEPS=0, SECONDS_LEAST=0.02)
    if joins:
        store.set(f"started {process}", "")
        store.wait([f"begun {plan.turn(process)}"])
        if plan.width > 1:
            begin_site(plan, process)
    else:
        ranks.init(process, plan.size, plan.backend, timeout=timedelta(seconds=20))
    model = model_of(plan, process, joins=joins)
    net = model.module if plan.layout == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    samples = None if plan.weights is None else lambda: plan.weights[process]  # type: ignore[index]
    local = commlayer.LocalSteps(
        model, optimizer, plan.every, plan.fragments, plan.outer, plan.codec, samples, delay=plan.delay,
        min_sites=plan.min_sites, buffers="average", uneven=plan.is_uneven, quorum=plan.quorum,
        join=store if joins else None,
    )  # fmt: skip
    pauses = random.Random(f"{plan.seed} {process}")
    made, came, missed = 0, 0, list[int]()
    try:
        with local:
            rounds: Any = local._training.rounds
            while local.trained < plan.size * plan.steps if plan.is_uneven else local.steps < plan.steps:
                if (process, made) in plan.early:
                    break
                if (process, made) in plan.stops:
                    raise Stopped
                for newcomer in range(plan.size, size):
                    if local.syncs > plan.turn(newcomer):
                        store.wait([f"started {newcomer}"])  # on a busy machine, later than all steps without this
                asked = plan.width * sum(turn < local.syncs for turn in plan.joins)
                came = max(came, sum(rank >= plan.size for rank in local.ranks))
                is_awaited = plan.waits and came < asked
                away_s = time.monotonic() + AWAY_S
                while (process, turn := local.syncs) in plan.away and time.monotonic() < away_s:
                    time.sleep(0.002)
                    missed += [turn] if local.syncs > turn else []
                time.sleep(0.2 if is_awaited else pauses.uniform(0, plan.pauses_s[process]))
                make_step(plan, model, optimizer, process, made)
                net.mean += 1 + process
                made += 1
    except Stopped:
        return None
    except commlayer.ClosedError as error:
        if not joins:
            raise
        return str(error)
    except (commlayer.PeerLostError, commlayer.AbortedError, commlayer.MismatchError) as error:
        if plan.width == 1 or (isinstance(error, commlayer.AbortedError) and not joins):
            raise
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    steps = _made(plan, process, made)
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in net.parameters()]
    return Report(
        [value for each in parts for value in each.detach().flatten().tolist()] + net.mean.tolist(),
        rounds._living.party.own,
        rounds.begun,
        [each.shared.tolist() for each in rounds.shared.fragments],
        [each.shared.tolist() for each in fragments_of(steps, plan.fragments, Fine(), _shards_of(plan, process))],
        rounds.ended,
        made,
        rounds.taken,
        missed,
        rounds.turns,
    )


def _shards_of(plan: Plan, process: int) -> Site:
    """What tells a fragment which values of a whole model are this rank's shard."""
    site = Site()
    if plan.layout == "DDP":
        site.rank, site.size = process % plan.width, plan.width
    if plan.layout == "HSDP":
        site.rank, site.size = process % plan.width // (plan.width // 2), 2
    return site


def check(plan: Plan, **options: Any) -> dict[int, Report]:
    """Runs the plan. All that live must have the same weights, bit by bit; each sync has the same sites for all of
    them; and the shared weights are the sum of what these have sent, in which each step counts once. A site goes as a
    whole.

    Returns the reports of the processes that live.
    """
    with tempfile.TemporaryDirectory() as folder:
        killed = {process for process, *_ in plan.kills} | set(plan.late) | set((plan.last_piece or ())[:1])
        killed |= set() if plan.meeting is None else {plan.meeting}
        size = plan.size + plan.width * len(plan.joins)
        found = ranks.results(ranks.outcomes(train, size, plan, folder, **options), killed)
        lived = {process: report for process, report in enumerate(found) if isinstance(report, Report)}
        sent = {
            (rank, turn): torch.load(path).double()
            for path in Path(folder).iterdir()
            if "half" not in path.name
            for rank, turn in [map(int, path.name.split())]
        }
    victims = killed | {process for process, _ in plan.stops}
    for process, result in enumerate(found):
        if process not in lived:
            check_gone(plan, process, result, victims)
    if not lived:
        return {}
    first = next(iter(lived.values()))
    assert list(first.syncs) == list(range(len(first.syncs)))
    for process, report in lived.items():
        assert report.syncs.items() <= first.syncs.items(), "a sync that not all have applied"
        assert list(report.syncs) == list(first.syncs)[-len(report.syncs) :], "a sync that not all have applied"
        mates = {lived[mate].steps for mate in plan.mates(process) if mate in lived}
        assert report.turns == first.turns, "two schedules"
        assert mates == {report.steps}, f"the ranks of a site end after {mates} steps, and no error says so"
        late = {turn for site, turn in left_out(first) if site == report.number // plan.width}
        assert late >= set(report.missed), "a loop that is away counts"
    for place in range(plan.width):
        here = {process: report for process, report in lived.items() if report.number % plan.width == place}
        one = next((report for process, report in here.items() if process < plan.size), None)
        for report in here.values():
            assert report.values == next(iter(here.values())).values, "two states"
            assert report.shared == next(iter(here.values())).shared, "two states"
            assert plan.layout in ("FSDP2", "HSDP") or report.values == first.values, "two states"
        if one is not None:
            check_sums(plan, one, here, sent)
    return lived


def check_gone(plan: Plan, process: int, result: Report | str | None, victims: set[int]) -> None:
    """A process that does not train to the end is a victim, or one of its site is, which it names."""
    if process in victims or (process >= plan.size and result):
        return
    ends_early = any(mate in plan.mates(process) for mate, _ in plan.early)
    if ends_early and isinstance(result, str) and "end after different steps" in result:
        return
    mates = victims & {*plan.mates(process)}
    assert mates, f"process {process} has ended: {result}"
    assert isinstance(result, str)
    assert any(f"{mate} of its site" in result for mate in mates), result


def check_sums(plan: Plan, one: Report, here: Mapping[int, Report], sent: Mapping[tuple[int, int], Tensor]) -> None:
    """What the ranks of one place have sent; `one` of them, `here` all that live."""
    shared = [torch.tensor(values, dtype=torch.float64) for values in one.begun]
    momentum = [torch.zeros_like(values) for values in shared]
    outer, place = Outer(*plan.outer), one.number % plan.width
    numbers = {report.number: process for process, report in here.items()}
    counted = {number: [torch.zeros_like(values) for values in shared] for number in numbers}
    for turn, ended in one.syncs.items():
        at = turn % plan.fragments
        weights = ended.samples if plan.weights is not None or plan.is_uneven else (1.0,) * len(ended.members)
        total = sum(weight for weight, counts in zip(weights, ended.counting, strict=True) if counts) or 1.0
        average = torch.zeros_like(shared[at])
        for site, weight, counts in zip(ended.members, weights, ended.counting, strict=True):
            rank = site * plan.width + place
            if not counts and plan.codec == "none":
                assert not sent[rank, turn].any(), "a site that does not count has sent a change"
            average += sent[rank, turn] * weight / total
            if rank in counted and weight:
                counted[rank][at] += sent[rank, turn]
        shared[at] += (PLAIN if ended.is_rest else outer).change(average, momentum[at])
    limit = ERRORS[plan.codec] if plan.codec != "none" else 1e-5
    for ours, theirs in zip(one.shared, shared, strict=True):
        assert _apart(ours, theirs) < limit, "the shared weights are not what the sites have sent"
    for number, parts in counted.items():
        process = numbers[number]
        weight = 1 if plan.weights is None else sum(plan.weights[mate] for mate in plan.mates(process))
        if plan.outer == (1.0, 0.0) and plan.codec == "none" and weight:
            for sent_ones, steps in zip(parts, here[process].made, strict=True):
                assert _apart(steps, sent_ones) < 1e-4, f"a step of process {process} was lost, or counted twice"


def left_out(report: Report) -> list[tuple[int, int]]:
    """(site, turn) of the sites that did not count in a sync."""
    return [
        (member, turn)
        for turn, ended in report.syncs.items()
        for member, counts in zip(ended.members, ended.counting, strict=True)
        if not counts
    ]


def _apart(values: Sequence[float], others: Tensor) -> float:
    return float((torch.tensor(values, dtype=torch.float64) - others).norm() / (others.norm() or 1.0))


def _made(plan: Plan, process: int, steps: int) -> list[Tensor]:
    """The sum of a site's own steps, with FSDP2 this rank's part of it."""
    model = Given()
    start = model.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        every = [gradients_of(mate, step) for mate in plan.mates(process)]
        for weight, *gradients in zip(model.weights, *every, strict=True):
            weight.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    torch.nn.utils.vector_to_parameters(model.values() - start, model.parameters())
    parts = [weight.detach() for weight in model.weights]
    shards = {"FSDP2": plan.width, "HSDP": plan.width // 2}.get(plan.layout, 1)
    return [each.chunk(shards)[process % shards] for each in parts]


def by_fragment(values: Tensor, plan: Plan) -> list[Tensor]:
    """These values of a model, by fragment."""
    model = Given()
    torch.nn.utils.vector_to_parameters(values, model.parameters())
    return [found.shared for found in fragments_of(list(model.parameters()), plan.fragments, Fine(), Site())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--late", action="store_true", help="some loops are late, and there is a quorum")
    parser.add_argument("--sites", action="store_true", help="sites have several ranks")
    given = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        plan = (local_plan.random_site_plan if given.sites else local_plan.random_plan)(seed)
        plan = local_plan.late(plan) if given.late else plan
        lived = check(plan, environ=ranks.UDP if seed % 2 else None)
        here = Counter(
            kills=len(plan.kills),
            stops=len(plan.stops),
            early=len(plan.early),
            asked=len(plan.joins),
            joined=sum(process >= plan.size for process in lived) // plan.width,
            sites_lost=plan.sites - len({process // plan.width for process in lived if process < plan.size}),
            taken=sum(len(report.taken) for report in lived.values()),
            late=len(left_out(next(iter(lived.values())))) if given.late and lived else 0,
        )
        print(seed, dict(+here), flush=True)
        found += here
    print(f"{given.seeds} seeds: all states equal, no sync lost; {dict(found)}")


if __name__ == "__main__":
    main()
