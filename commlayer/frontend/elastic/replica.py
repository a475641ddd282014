"""`Replica`: what a rank holds of the training, and how it goes from step to step as all others do.

A rank that has joined first listens: it lacks the state, which comes from another member while all train. It takes part
in each average with the weight 0, and keeps the averages, whose bits are everyone's. Once the state is there, it makes
the steps that it lacks, while the others compute theirs, and says so in the next average: from then on it computes, if
all of its row have said so.

Where members are rows of ranks, each place of the rows has an average of its own, and one of them may end while another
fails. So a rank holds its averages until a small all-reduce of all members has ended: then all have theirs. If a rank
has made a step, all that live hold its averages, and make it, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from ...errors import CommError, MismatchError
from ...transport.log import log
from ..group.joining import Joining
from ..group.state import State, checksum
from ..group.transfer import Transfers
from ..work.odd import odd_ones
from .averages import Averages, Told
from .contribution import Contribution
from .sampler import Sampler
from .world import World

CODECS = ("none", "bf16")
"""Those that need nothing of an earlier step, which a rank that dies would take along."""

PAUSE_S = 0.001
"""Of a rank that sends or receives a state, between two looks for the end of an average."""

REPLAYS = 2
"""The least steps that it makes up in one of the others, so that it catches up with them."""


class DifferingError(MismatchError):
    """Some members would go on otherwise than the rest. The step is not made, by nobody."""

    def __init__(self, text: str, members: set[int]) -> None:
        super().__init__(text)
        self.members = members


class Replica:
    """This rank's. `gradients` are those of the model of `state`."""

    def __init__(
        self,
        state: State,
        gradients: Averages,
        codec: str,
        regather: Callable[[], None] = lambda: None,
        operations: Callable[[], int] = lambda: 0,
    ) -> None:
        """`codec`: of `CODECS`, in which gradients travel between hosts. For models whose parameters are divided:
        `regather` lets the next forward pass gather parameters anew, of which it may still have copies; `operations`
        returns how many operations the row has had."""
        self.made = 0
        """Steps, those whose averages wait included; -1: not known."""
        self.sampler: Sampler | None = None
        self.listening: set[int] = set()
        """The members that lack the state."""
        self.is_stepped_together = False
        """The ranks of this row have called operations in a step of the optimizer."""
        self._state, self._gradients, self._codec, self._regather = state, gradients, codec, regather
        self._operations = operations
        self._averages: Tensor | None = None
        """Those of the latest step."""
        self._held: Tensor | None = None
        """Those of the step that is due, until all members are known to have theirs. Only where members are rows."""
        self._norms: dict[int, float] = {}
        """Those of this rank's part of the averages, by step: of the latest one, and of the one that is due."""
        self._joining: Joining[tuple[Tensor, float | None]] | None = None
        """What this rank lacks: averages and their norms are kept; None: it computes."""
        self._transfers = Transfers(state.pack)
        self._compares = True
        """In the next average, the members compare their states."""

    def listen(self) -> None:
        """This rank lacks the state."""
        self.made, self._averages, self._held, self._norms = -1, None, None, {}
        self._joining = Joining(
            self._transfers,
            self._load,
            lambda _: True,
            lambda kept: self._step(*kept),
            lambda kept: kept[0].nbytes,
        )

    @property
    def is_listening(self) -> bool:
        """Whether this rank computes nothing yet."""
        return self._joining is not None

    @property
    def holds(self) -> bool:
        """Whether this rank has the state after its latest step."""
        return self._joining is None or self._joining.is_done

    # ---- a step ----

    def weight(self, ranks: int) -> float:
        """That of this rank's gradients in the next step."""
        if self.is_listening:
            return 0.0
        return 1.0 if self.sampler is None else self.sampler.take(ranks)

    def begin(self, world: World) -> Contribution | None:
        """The contribution to the step that is due, while its batch is computed. None where the step must begin with
        `average`: while a member listens, all ask each other first whether there is a step."""
        if self.listening:
            return None
        return self._give(world, 1.0 if self.sampler is None else self.sampler.weight(len(world.members)))

    def _give(self, world: World, weight: float) -> Contribution:
        ranks = 0 if world.ARE_DIVIDED else len(world.members)
        return Contribution(self._gradients, ranks, weight, functools.partial(self._start, world))

    def average(
        self, world: World, weight: float, begun: Contribution | None, *, leaves: bool, invites: bool
    ) -> dict[int, Told]:
        """Makes a step with all members; returns what each one has told. `begun`: what `begin` has returned for it.
        Raises DifferingError if some of them have other hyperparameters or another state than the rest."""
        self._pump()
        self._regather()  # the sums of states are those of the parts
        holds = self.is_listening and self.holds
        speed = 0.0 if self.sampler is None or self.is_listening else self.sampler.speed
        settings = 0 if self.is_listening else checksum(self._settings())
        state = checksum(self._state.sums()) if self._compares and not self.is_listening else 0
        told = Told(float(leaves), speed, float(holds), float(invites), settings, state)
        contribution = begun or self._give(world, weight)
        place, averages = world.members.index(world.own), contribution.vector
        if world.ARE_DIVIDED:
            self._reduce(world, contribution, place, None)
            all_told = self._commit(world, averages, place, told)
        else:
            self._reduce(world, contribution, place, told)
            all_told = self._gradients.told(averages, len(world.members))
        heard = dict(zip(world.members, all_told, strict=True))
        self._check(world, heard)
        # A row computes once all its ranks have the state.
        ready = {each for each in self.listening if all(heard[mate].holds > 0 for mate in world.whole({each}))}
        if world.own in ready:
            self._joining = None
        norm = self._whole_norm(world, {each: heard[each].norm for each in world.row})
        self._apply(averages[: self._gradients.size], norm)
        if self.sampler is not None:
            self.sampler.advance({each: heard[each].speed for each in self.computing(world.members)})
        self.listening -= ready
        self._compares = bool(ready)
        self._transfers.forget(self.listening)
        return heard

    def _reduce(self, world: World, contribution: Contribution, place: int, told: Told | None) -> None:
        """Averages the vector over all rows. Transfers go on meanwhile."""
        last, works, vector = contribution.finish(place, told), contribution.works, contribution.vector
        exact = vector[last.begin :]
        if self._codec != "none":
            works, exact = [*works, self._start(world, vector[last.begin : last.end])], vector[last.end :]
        if self.is_listening or self._transfers.sendings:
            works = [*works, world.average(exact, is_async=True)]
            while not all(each.is_completed() for each in works):
                self._transfers.send()
                if self._joining is None or not self._joining.catch_up():
                    time.sleep(PAUSE_S)
        else:
            world.average(exact, is_async=False)
        for each in works:
            each.wait()

    def _commit(self, world: World, averages: Tensor, place: int, told: Told) -> list[Told]:
        """All members have their averages once this has ended on one of them. Returns what each has told."""
        self._held, norm = averages[: self._gradients.size], self._gradients.norm_of(averages)
        self._norms[self.made + 1] = norm
        rows = torch.zeros(len(world.members), len(told), dtype=torch.float32, device="cpu")
        rows[place] = torch.tensor(told._replace(norm=norm), dtype=torch.float32, device="cpu")
        world.total(rows)  # exactly what was told: the others add 0
        return [Told(*row) for row in rows.tolist()]

    def _whole_norm(self, world: World, norms: Mapping[int, float]) -> float | None:
        """The norm of the averages of all parts, the same in all rows. `norms`: of the parts of this row."""
        return math.hypot(*(_rounded(norms[each]) for each in world.row)) if world.ARE_DIVIDED else None

    def _start(self, world: World, gradients: Tensor) -> Any:
        return world.average(gradients, is_async=True) if self._codec == "none" else self._encoded(world, gradients)

    def _encoded(self, world: World, values: Tensor) -> Any:
        """Averages gradients in the codec. The rank that makes a sum sends the same bytes to all."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        policy = dataclasses.replace(world.peers.policy, codec=self._codec)
        return world.peers.allreduce([values], options, policy=policy, key=self.made + 1)

    def _settings(self) -> str:
        return f"{self._state.hyperparameters()}, clip_norm {self._gradients.clip_norm}"

    def _check(self, world: World, heard: Mapping[int, Told]) -> None:
        """Raises DifferingError if not all that compute have the same."""
        for kind, ours, alike, told in (
            ("hyperparameters", self._settings, [world.members], {who: each.settings for who, each in heard.items()}),
            (
                "parameters or optimizer states",
                self._state.sums,
                world.likes(),
                {who: each.state for who, each in heard.items()},
            ),
        ):
            found = set[int]()
            for ranks in alike:
                members = [each for each in ranks if told[each] > 0]
                found |= {members[at] for at in odd_ones([round(told[each]) for each in members])}
            if found:
                raise DifferingError(
                    f"rank {world.own}: rank(s) {', '.join(map(str, sorted(found)))} of the job have other {kind} than "
                    f"the rest before step {self.made + 1} (here: {ours()}); all must step alike: begin with the same "
                    f"parameters, give the same schedule to elastic(), and change learning rates by nothing else",
                    world.whole(found),
                )

    def computing(self, members: Collection[int]) -> list[int]:
        """Those of the members that take a share of the batch."""
        return [each for each in members if each not in self.listening]

    def _apply(self, averages: Tensor, norm: float | None) -> None:
        self._averages, self._held = averages, None
        self.made += 1
        self._norms = {step: each for step, each in self._norms.items() if step == self.made}
        if self._joining is None:
            self._step(averages, norm)
        else:
            self._joining.keep((averages, norm))

    def _step(self, averages: Tensor, norm: float | None = None) -> None:
        self._transfers.finish_packing()
        self._regather()  # a forward pass without a backward pass leaves copies of what changes now
        self._gradients.put(averages, norm)
        before = self._operations()
        self._state.step()
        self.is_stepped_together |= self._operations() != before

    # ---- a rank that listens ----

    def _pump(self) -> None:
        """Keeps transfers going, and takes what has come."""
        self._transfers.send()
        if self._joining is not None:
            for _ in range(REPLAYS):
                self._joining.catch_up()
            while self._joining.is_full and self._joining.catch_up(waits=True):
                pass  # the others wait in their average, where they send

    def _load(self, state: Tensor) -> None:
        self._regather()
        self._state.load(state)

    # ---- a new WORLD ----

    def progress(self) -> tuple[float, float]:
        """What the other ranks of this row must know if the row leaves: the steps made here, and the norm of this
        rank's part of the averages, of those that are due if it holds them."""
        return float(self.made), self._norms[max(self._norms)] if self._norms else 0.0

    def follow_row(self, world: World, told: Sequence[Sequence[float]]) -> None:
        """Makes the step that only other ranks of this row have made: it leaves, and meets nobody. `told`: the
        `progress` of each rank of the row."""
        if self._held is not None and any(made > self.made for made, _ in told):
            norms = {each: norm for each, (_, norm) in zip(world.row, told, strict=True)}
            self._apply(self._held, self._whole_norm(world, norms))

    def report(self) -> dict[str, Any]:
        """What the other members of a new WORLD must know."""
        return {
            **self._transfers.report(),
            "made": self.made,
            "has averages": self._averages is not None,
            "holds": self.holds,
            "lacks the state": self._joining is not None and not self._joining.is_loaded,
            "norms": self._norms,
            "sampler": None if self.sampler is None else self.sampler.state(),
        }

    def meet(self, world: World, reports: Sequence[Mapping[str, Any]]) -> None:
        """Makes the step that only other members have made; then all are at the same one. `reports`: of all members."""
        made = [each["made"] for each in reports]
        latest = max(made)
        leader = max(range(len(made)), key=lambda place: (made[place], reports[place]["has averages"]))
        told = dict(zip(world.members, reports, strict=True))
        listening = {each for each in world.members if not all(told[mate]["holds"] for mate in world.whole({each}))}
        if world.own not in listening:
            self._joining = None
        if world.ARE_DIVIDED and 0 <= self.made < latest:
            if self._held is None:
                raise CommError(
                    f"rank {world.own}: it lacks the averages of step {latest}, which other ranks have made"
                )
            self._apply(self._held, self._whole_norm(world, {each: told[each]["norms"][latest] for each in world.row}))
            log.warning("rank %d has made step %d, as other ranks had before", world.own, self.made)
        elif not world.ARE_DIVIDED and any(0 <= each < latest for each in made):
            if not reports[leader]["has averages"]:
                raise CommError(f"rank {world.own}: no member has the averages of step {latest}, which some lack")
            is_behind = 0 <= self.made < latest
            has_them = self.made == latest and self._averages is not None
            averages = (
                self._averages if has_them else torch.empty(self._gradients.size, dtype=torch.float32, device="cpu")
            )
            assert averages is not None  # noqa: S101
            dist.broadcast(averages, leader)
            if is_behind:
                self._apply(averages, None)
                log.warning("rank %d has made step %d with the averages of another rank", world.own, self.made)
        self.made, self._held = latest, None
        if self.sampler is not None:
            self.sampler.load(reports[leader]["sampler"])
        # Before the first step nobody has compared anything.
        # A rank that has made the step in which one was ready has that one no more in `listening`.
        self._compares |= latest == 0 or bool(self.listening.intersection(world.members) - listening)
        self.listening = listening
        alike = next(ranks for ranks in world.likes() if world.own in ranks)
        lacking = [each for each in alike if told[each]["lacks the state"]]
        begins = self._transfers.match(world, world.all, self.computing(alike), lacking, told)
        if begins and self._joining is not None:
            self._joining.begin()
        self._regather()
        self._transfers.pack()


def _rounded(norm: float) -> float:
    """As it travels: the same on all ranks, whether they have heard it in a step or in a report."""
    return float(torch.tensor(norm, dtype=torch.float32, device="cpu"))
