"""Discrete-event model of training steps on a pipeline: step time, exposed communication, bubble, live activations.

Every rank runs its list of actions in order, step after step. A forward waits for its input, a backward for its
gradient, a WAIT for a reduction. Sends and reductions occupy the rank's outgoing link while the rank goes on. All
replicas of the pipeline are alike, so one stands for all. The model is deterministic: equal input, equal times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .actions import COMPUTATIONS, Action, Reduction, actions_of, peak_activations, with_reductions
from .link import Clock, Link, Network, Transfer
from .trace import Span, write_trace

Key = tuple[str, int, int, int]
"""Something that a rank can wait for: kind, stage, micro-batch or bucket, step."""


@dataclass(frozen=True)
class StageCosts:
    """Times of one stage, in seconds for one micro-batch unless said otherwise.

    Raises:
        ConfigError: a time or size is negative or not finite, or `weight_s` exceeds `backward_s`.
    """

    forward_s: float
    backward_s: float
    """A full backward (B), or its halves I and W together."""
    weight_s: float | None = None
    """W, the weight half. None: half of `backward_s`."""
    recompute_s: float | None = None
    """R, the forward again, which `backward_s` does not include. None: as long as the forward."""
    send_s: float = 0.0
    """Time that one output occupies the link to the next stage. Its gradient occupies the way back as long."""
    reduce_s: float = 0.0
    """Time that the reduction of the stage's gradients occupies the link, once a step. 0: there is none."""
    update_s: float = 0.0
    """The optimizer step of the stage's parameters, once a step."""
    activation_bytes: float = 0.0
    """Bytes kept from a forward until its backward."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{field.name}={value} of a stage is not a time or size; give a finite number >= 0")
        if self.weight_s is not None and self.weight_s > self.backward_s:
            raise ConfigError(f"weight_s={self.weight_s} exceeds backward_s={self.backward_s}, which includes it")

    def compute_s(self, kind: str) -> float:
        """Seconds of the computation F, R, B, I or W."""
        again = self.forward_s if self.recompute_s is None else self.recompute_s
        weight = self.backward_s / 2 if self.weight_s is None else self.weight_s
        return {"F": self.forward_s, "R": again, "B": self.backward_s, "I": self.backward_s - weight, "W": weight}[kind]


@dataclass(frozen=True)
class RankTimes:
    """One rank in a step of the steady state: seconds, which add up to the step."""

    busy_s: float
    """Computations and optimizer."""
    exposed_s: float
    """Waiting for a reduction."""
    bubble_s: float
    """Waiting for another stage."""
    peak_activations: float
    """The most stages x micro-batches whose activations are kept at once."""
    peak_bytes: float
    """The same in bytes."""


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`."""

    step_s: float
    """Seconds from step to step in the steady state."""
    ranks: tuple[RankTimes, ...]
    spans: tuple[Span, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds of a step that the rank that waits longest for reductions spends so."""
        return max(rank.exposed_s for rank in self.ranks)

    @property
    def bubble_s(self) -> float:
        """Seconds of a step that the rank that waits longest for other stages spends so."""
        return max(rank.bubble_s for rank in self.ranks)

    def trace(self, path: str | Path) -> None:
        """Writes a Chrome trace (JSON) of all simulated steps; open it in ui.perfetto.dev or chrome://tracing."""
        write_trace(path, self.spans)


def simulate(
    schedule: Any,
    stages: Sequence[StageCosts],
    reduction: Reduction | None = None,
    network: Network | None = None,
    *,
    action_s: float = 0.0,
    steps: int = 12,
) -> Simulation:
    """Times of a training step of `schedule`.

    Args:
        schedule: a `torch.distributed.pipelining` schedule, or a list of actions per rank (`pipelines`). Lists that
            contain REDUCE, WAIT or UPDATE run as they are.
        stages: the costs of each stage, by its index.
        reduction: when gradients are reduced and waited for; `Reduction()` if None.
        network: latency, and the order on each link; `Network()` if None.
        action_s: seconds of the interpreter for each F, B, I and W.
        steps: simulated steps. The step time is the mean of the last half, rounded down to an even number because steps
            may alternate. If the load of a link is longer, it delays ranks only later; then it is the step time.

    Raises:
        ConfigError: a stage without costs or on two ranks, a schedule that cannot end (the error names the actions
            that wait), fewer than 4 steps, or a negative time.
    """
    order = actions_of(schedule)
    if not any(action.kind in ("REDUCE", "WAIT", "UPDATE") for actions in order for action in actions):
        order = with_reductions(order, reduction or Reduction())
    if steps < 4:
        raise ConfigError(f"steps={steps} is below 4; the first steps only reach the steady state")
    if not action_s >= 0:
        raise ConfigError(f"action_s={action_s} is negative; give seconds of at least 0")
    model = _Model(order, stages, network or Network(), action_s, steps)
    model.run()
    last = steps // 4 * 2
    measured_s = (model.ended[-1] - model.ended[-1 - last]) / last
    links = [link for rank in model.ranks for link in (rank.reductions, rank.sends)] + list(model.host_links.values())
    step_s = max(measured_s, *(link.load_s / steps for link in links))
    sizes = {index: stage.activation_bytes for index, stage in enumerate(stages)}
    ranks = []
    for rank, actions in zip(model.ranks, order, strict=True):
        busy, exposed = sum(rank.busy[-last:]) / last, sum(rank.exposed[-last:]) / last + step_s - measured_s
        bubble = max(step_s - busy - exposed, 0.0)
        ranks.append(RankTimes(busy, exposed, bubble, peak_activations(actions), peak_activations(actions, sizes)))
    return Simulation(step_s, tuple(ranks), tuple(model.spans))


class _Model:
    """All ranks, their links, and events that have happened."""

    def __init__(
        self, order: list[list[Action]], stages: Sequence[StageCosts], network: Network, action_s: float, steps: int
    ) -> None:
        self.stages, self.network, self.action_s, self.steps = stages, network, action_s, steps
        self.clock = Clock()
        self.spans: list[Span] = []
        self.rank_of = _ranks_of(order, len(stages))
        self.has_sends = any(action.kind.startswith("SEND") for actions in order for action in actions)
        self.happened: set[Key] = set()
        self.waiting: dict[Key, _Rank] = {}
        self.ranks = [_Rank(self, number, actions) for number, actions in enumerate(order)]
        if network.hosts and len(network.hosts) != len(order):
            raise ConfigError(f"hosts={network.hosts} of the network: give the host of each of {len(order)} ranks")
        self.host_links = {host: self.ranks[network.hosts.index(host)].new_link("host") for host in set(network.hosts)}
        self.ended = [0.0] * steps

    def run(self) -> None:
        for rank in self.ranks:
            self.clock.at(0.0, rank.run)
        self.clock.run()
        stuck = [f"rank {rank.number} at {rank.action}" for rank in self.ranks if rank.step < self.steps]
        if stuck:
            raise ConfigError(
                f"the schedule cannot end: {'; '.join(stuck)}; order the actions so that each input comes"
            )

    def happen(self, key: Key) -> None:
        self.happened.add(key)
        rank = self.waiting.pop(key, None)
        if rank is not None:
            rank.run()


def _ranks_of(order: list[list[Action]], stages: int) -> dict[int, int]:
    """The rank of each stage."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            if not 0 <= action.stage < stages:
                raise ConfigError(f"rank {rank}: {action} has no costs; `stages` has {stages} entries")
            if ranks.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"stage {action.stage} is on ranks {ranks[action.stage]} and {rank}; give it to one rank"
                )
    absent = sorted(set(range(stages)) - set(ranks))
    if absent:
        raise ConfigError(
            f"no rank runs stage {absent[0]}; `stages` has {stages} entries, one for each stage of a rank"
        )
    return ranks


class _Rank:
    """One rank: its place in its list, and its times by step."""

    def __init__(self, model: _Model, number: int, actions: list[Action]) -> None:
        self.model, self.number, self.actions = model, number, actions
        self.busy = [0.0] * model.steps
        self.exposed = [0.0] * model.steps
        self.step = self.index = 0
        self.blocked_since: float | None = None
        self.reductions = self.new_link("link")
        self.sends = self.reductions if model.network.shared else self.new_link("link between stages")
        used = [action.stage for action in actions if action.kind == "F"]
        self.use = {stage: place for place, stage in reversed(list(enumerate(used)))}
        self.is_stale = any(action.kind == "WAIT" and action.steps_ago > 1 for action in actions)

    def new_link(self, track: str) -> Link:
        """A link whose transfers are on this rank's `track` of the trace."""
        return Link(self.model.clock, self.model.network.discipline, partial(self._record, track))

    def _record(self, track: str, name: str, start: float, end: float) -> None:
        if end > start:
            self.model.spans.append(Span(self.number, track, name, start, end))

    @property
    def action(self) -> Action:
        return self.actions[self.index]

    def run(self) -> None:
        """Goes on until an action takes time or waits."""
        while self.step < self.model.steps:
            if self.index == len(self.actions):
                self.model.ended[self.step] = max(self.model.ended[self.step], self.model.clock.now)
                self.step, self.index = self.step + 1, 0
                continue
            action, key = self.action, self._needs(self.action)
            if key is not None and key not in self.model.happened:
                self.model.waiting[key] = self
                self.blocked_since = self.model.clock.now
                return
            self._unblock(action)
            seconds = self._seconds(action)
            if seconds > 0:
                self.model.clock.at(self.model.clock.now + seconds, partial(self._end, action, self.model.clock.now))
                return
            self._finish(action)

    def _unblock(self, action: Action) -> None:
        if self.blocked_since is not None and action.kind == "WAIT":
            self.exposed[self.step] += self.model.clock.now - self.blocked_since
            self._record("compute", str(action), self.blocked_since, self.model.clock.now)
        self.blocked_since = None

    def _needs(self, action: Action) -> Key | None:
        """The event before which the action cannot start."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == "WAIT":
            step = self.step - action.steps_ago
            return None if step < 0 else ("REDUCE", stage, action.part, step)
        if kind == "F" and stage > 0:
            return ("F", stage - 1, microbatch, self.step)
        if kind in ("B", "I") and stage < len(self.model.stages) - 1:
            return ("B", stage + 1, microbatch, self.step)
        return None

    def _seconds(self, action: Action) -> float:
        costs = self.model.stages[action.stage]
        if action.kind in COMPUTATIONS:
            return (costs.compute_s(action.kind) + self.model.action_s) / action.parts
        if action.kind == "UPDATE" and self.step >= action.steps_ago:
            return costs.update_s / action.parts
        return 0.0

    def _end(self, action: Action, start: float) -> None:
        self.busy[self.step] += self.model.clock.now - start
        self._record("compute", str(action), start, self.model.clock.now)
        self._finish(action)
        self.run()

    def _finish(self, action: Action) -> None:
        """Starts the transfers that follow the action, and goes to the next one."""
        self.index += 1
        if action.kind == "REDUCE":
            self._reduce(action)
        elif action.kind in ("SEND_F", "SEND_B"):
            self._send(action)
        elif action.kind in ("F", "B", "I") and action.part == action.parts - 1:
            forward = action.kind == "F"
            neighbour = self.model.rank_of.get(action.stage + (1 if forward else -1))
            if neighbour == self.number:  # both stages on this rank: nothing is sent
                self.model.happened.add(("F" if forward else "B", action.stage, action.microbatch, self.step))
            elif neighbour is not None and not self.model.has_sends:
                self._send(action._replace(kind="SEND_F" if forward else "SEND_B", part=0, parts=1))

    def _send(self, action: Action) -> None:
        forward = action.kind == "SEND_F"
        key: Key = ("F" if forward else "B", action.stage, action.microbatch, self.step)
        costs, hosts = self.model.stages[action.stage if forward else action.stage - 1], self.model.network.hosts
        other = self.model.rank_of[action.stage + (1 if forward else -1)]
        link = self._link_of(self.sends, leaves_host=bool(hosts) and hosts[other] != hosts[self.number])
        self._transfer(link, str(action), costs.send_s, (-1,), key, self.model.network.latency_s)

    def _reduce(self, action: Action) -> None:
        """Reduces by class, in the order of next use: the earlier step, the stage used first, the stage's front bucket.

        With staleness 1 all gradients have one class, as `commlayer.pipeline.attach` and `overlap` give them.
        """
        seconds = self.model.stages[action.stage].reduce_s / action.parts
        urgency = (0,) if self.is_stale else (self.step, self.use.get(action.stage, 0), -action.part)
        key: Key = ("REDUCE", action.stage, action.part, self.step)
        if seconds == 0:  # one replica: nothing is sent
            self.model.happened.add(key)
            return
        network = self.model.network
        link = self._link_of(self.reductions, leaves_host=bool(network.hosts) and network.leaves_host[self.number])
        self._transfer(link, str(action), seconds, urgency, key, 2 * self.model.network.latency_s)

    def _link_of(self, own: Link, *, leaves_host: bool) -> Link:
        """The link that a transfer takes: the rank's own one, or that of its host."""
        return self.model.host_links[self.model.network.hosts[self.number]] if leaves_host else own

    def _transfer(
        self, link: Link, name: str, seconds: float, urgency: tuple[int, ...], key: Key, latency_s: float
    ) -> None:
        clock, happen = self.model.clock, partial(self.model.happen, key)
        link.send(Transfer(name, seconds, urgency, lambda: clock.at(clock.now + latency_s, happen)))
