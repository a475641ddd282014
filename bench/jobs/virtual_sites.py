"""`VirtualSites`: the local steps of sites that share one process, by the code of `LocalSteps`.

Each site is the `Rounds` of commlayer/frontend/local, unchanged, in a thread of its own. Only the group below it is
another one: it averages by bench/jobs/virtual_ranks.py, in the bits of the network's plans with `deterministic=True`.
tests/process/test_virtual_sites.py compares the weights with those of `LocalSteps` over a network.

Packets that a network loses are sent again, since syncs have no loss bound: they change no bit, and are left out here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.jobs.virtual_ranks import EncodedAverage, mean_into
from commlayer.compress.codec import CodecPair
from commlayer.frontend.local.living import Living
from commlayer.frontend.local.outer import Outer
from commlayer.frontend.local.rounds import Form, Rounds
from commlayer.frontend.local.site import Site
from commlayer.frontend.local.turns import Turns
from commlayer.frontend.local.weights import Weights
from commlayer.plans.select import all_reduce_algorithm
from commlayer.plans.settings import Settings

LIMIT_S = 60.0
"""A site that waits longer for another one raises: that one has raised, too."""


class Call(NamedTuple):
    """What one site gives to an operation."""

    source: Tensor
    target: Tensor


class Operation:
    """An operation of all sites, which the last one to call makes."""

    def __init__(self, make: Callable[[list[Call]], None], kept_bytes: int) -> None:
        self.make = make
        self.kept = ((0, kept_bytes),) * bool(kept_bytes)
        """The ranges of `source` that have become errors, in bytes."""
        self.calls: dict[int, Call] = {}
        self.is_done = threading.Event()

    def wait(self) -> None:
        """Raises RuntimeError if a site does not call."""
        if not self.is_done.wait(LIMIT_S):
            raise RuntimeError(f"only the sites {sorted(self.calls)} have called: another one has failed")


class Meeting:
    """The operations of all sites, by number. Averages of one form and length share their buffers."""

    def __init__(self, sites: int) -> None:
        self.sites = sites
        self._lock = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._averages: dict[tuple[int, CodecPair], EncodedAverage] = {}

    def join(self, number: int, site: int, call: Call, made: Operation) -> Operation:
        """The operation of this number, which a site joins. `made`: for the first one."""
        with self._lock:
            operation = self._operations.setdefault(number, made)
            operation.calls[site] = call
            if len(operation.calls) == self.sites:
                operation.make([operation.calls[site] for site in range(self.sites)])
                del self._operations[number]
                operation.is_done.set()
        return operation

    def is_encoded(self, pair: CodecPair | None, length: int) -> bool:
        """Whether an average of so many bytes is encoded. All ranks send short ones to all, as they are."""
        if pair is None:
            return False
        hosts = tuple((site,) for site in range(self.sites))
        return all_reduce_algorithm(hosts, length, Settings(deterministic=True, codecs=pair[:2])) == "encoded"

    def average(self, pair: CodecPair | None, key: int) -> Callable[[list[Call]], None]:
        """An average in these codecs; None: in float32. With codecs, the sources become their errors."""

        def make(calls: list[Call]) -> None:
            rows = np.stack([of.source.numpy() for of in calls])
            mean = np.empty_like(rows[0])
            if pair is None:
                mean_into(rows, mean)
            else:
                form = (len(mean), pair)
                average = self._averages.setdefault(form, EncodedAverage(self.sites, len(mean), pair))
                mean[:] = average.average(rows, key)
                for call, errors in zip(calls, average.kept, strict=True):
                    call.source.numpy()[:] = errors
            for call in calls:
                call.target.numpy()[:] = mean

        return make


def gather(calls: list[Call]) -> None:
    """All sources, one after the other, in each target."""
    for call in calls:
        torch.cat([of.source for of in calls], out=call.target)


class VirtualGroup:
    """What `Rounds` needs of a CommProcessGroup. Averages only: all sites have the same weight."""

    def __init__(self, meeting: Meeting, site: int) -> None:
        self._meeting, self._site = meeting, site
        self._calls = 0
        self.who = f"site {site}"

    def size(self) -> int:
        return self._meeting.sites

    def rank(self) -> int:
        return self._site

    def _join(self, source: Tensor, target: Tensor, make: Callable[[list[Call]], None], kept: int = 0) -> Operation:
        self._calls += 1
        return self._meeting.join(self._calls, self._site, Call(source, target), Operation(make, kept))

    def all_gather_single(self, target: Tensor, source: Tensor) -> Operation:
        return self._join(source, target, gather)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Operation:
        return self.allreduce_from(tensors[0], tensors[0], options)

    def allreduce_from(
        self, source: Tensor, target: Tensor, options: Any, *, key: int = 0, pair: CodecPair | None = None
    ) -> Operation:
        """Raises ValueError for sums."""
        if options.reduceOp != dist.ReduceOp.AVG:
            raise ValueError(f"{options.reduceOp}: virtual sites only average")
        if not self._meeting.is_encoded(pair, source.nbytes):
            pair = None
        return self._join(source, target, self._meeting.average(pair, key), 0 if pair is None else source.nbytes)


class VirtualSites:
    """Local steps of these models, one per site, which have the same weights. A context: it has threads."""

    def __init__(self, models: Sequence[nn.Module], turns: Turns, outer: Outer, form: Form) -> None:
        meeting = Meeting(len(models))
        self.rounds = [
            Rounds(Living(group, range(len(models)), Site()), _weights_of(model), Site(), turns, outer, form)
            for group, model in ((_group(meeting, site), model) for site, model in enumerate(models))
        ]
        self._threads = ThreadPoolExecutor(len(models), "site")

    def __enter__(self) -> VirtualSites:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def each(self, call: Callable[[int, Rounds], None]) -> None:
        """Calls with number and `Rounds` of each site, in its thread."""
        for done in [self._threads.submit(call, *numbered) for numbered in enumerate(self.rounds)]:
            done.result()

    def step(self) -> None:
        """Each site has made a local step."""
        self.each(lambda _, rounds: rounds.step(1.0))

    def leave(self) -> None:
        """The last syncs: all models get the shared weights."""
        self.each(lambda _, rounds: rounds.leave())


def _group(meeting: Meeting, site: int) -> Any:
    return VirtualGroup(meeting, site)


def _weights_of(model: nn.Module) -> Weights:
    """Of all parameters: the optimizer only names them."""
    return Weights(model, torch.optim.SGD(model.parameters(), lr=0.0), None)
