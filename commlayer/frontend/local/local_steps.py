"""`LocalSteps`: sites train on their own, and exchange what they have learned every H steps.

    with commlayer.LocalSteps(model, optimizer, every=24) as local:
        ...                                              # the training loop is unchanged

docs/local.md derives the rule by which a site takes over what the others have learned.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...compress.fine import Fine
from ...config import Config, number, policy_of_groups
from ...errors import ConfigError
from ..gradients.disabled import refuse
from ..group.backend import CommProcessGroup
from ..group.options import NAME, Options
from ..work.dynamo import untraced
from .meeting import Introduction, meet
from .outer import Outer
from .rounds import FIELDS, Form, Rounds
from .site import Site
from .turns import Turns
from .weights import BUFFERS, Weights

CODECS = ("none", "bf16", "int8", "int4-int8")
"""The codecs of small error, with sums of 8 bits or more: see docs/local.md."""

CLASS = 7
"""The class of syncs: all else goes first."""

REMEDIES = {
    "digests": "all sites start with the same weights; call torch.manual_seed with one number before the model is "
    "made, or load one checkpoint on all ranks",
    "model": "make the same model on all ranks",
    "syncs": "restore checkpoints that all ranks saved after the same sync",
}
"""Advice for values that differ between the ranks."""

log = logging.getLogger("commlayer")

_entered: weakref.WeakSet[LocalSteps] = weakref.WeakSet()


@untraced
class LocalSteps:
    """A context around a training loop, in which each site makes `every` optimizer steps on its own between two syncs
    of a value. `with` begins and ends on all ranks.

    `model` is a plain module, a site of one rank; or DistributedDataParallel, whose process group is then the site.
    `optimizer` changes its weights, which are float32. `group` has the ranks of the same number in all sites; None, for
    a plain module: WORLD. The engine sends; the job may have any backend.

    `fragments` parts of the model are sent in turn, each every `every` steps, by a codec of `CODECS`. A sync is applied
    `delay` steps after its start; None: after `every // fragments`, when the next fragment's turn comes. `outer` is
    (learning rate, momentum) of the optimizer of the shared weights, SGD with Nesterov momentum; None: by `every` and
    `delay`. `samples` returns the number of this rank's samples in a step, and is called once in each: sites then count
    by their samples. `buffers`: "average" averages floating-point buffers, as of BatchNorm, "own" leaves each rank its
    own. `fine` selects parameters that travel in bf16; None: those with fewer than two dimensions.

    When `with` ends well, all fragments are sent a last time, and all ranks have the shared weights. When it ends with
    an error, the other ranks get an AbortedError at their next sync.

    Raises ConfigError, on all ranks, when `with` begins: for arguments out of range, or that differ between the ranks;
    for models other than the above, and weights that differ. Raises, out of `optimizer.step()`, ConfigError for changes
    that the sites do not share, CommError for values that are not finite or differ, and the errors of operations:
    PeerLostError, OperationTimeoutError, AbortedError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int,
        fragments: int = 4,
        outer: tuple[float, float] | None = None,
        codec: str = "int4-int8",
        samples: Callable[[], float] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        delay: int | None = None,
        buffers: str | None = None,
        fine: Fine | None = None,
    ) -> None:
        for name, given, kind, may_lack in (
            ("model", model, nn.Module, False),
            ("optimizer", optimizer, Optimizer, False),
            ("group", group, dist.ProcessGroup, True),
            ("fine", fine, Fine, True),
        ):
            if not isinstance(given, kind) and not (may_lack and given is None):
                raise ConfigError(f"LocalSteps({name}={given!r}): give a {kind.__name__}{', or None' * may_lack}")
        self._model, self._optimizer = model, optimizer
        self._every, self._fragments, self._delay, self._outer = every, fragments, delay, outer
        self._codec, self._samples, self._buffers = codec, samples, buffers
        self._given_group, self._fine = group, fine or Fine()
        self._restored: dict[str, Any] | None = None
        self._group: CommProcessGroup | None = None
        self._rounds: Rounds | None = None
        self._hooks: list[RemovableHandle] = []
        self._is_averaged = False

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalSteps:
        if Config.is_disabled():
            refuse("LocalSteps", "the sites would never exchange their weights")
        if self._rounds is not None or self._group is not None:
            raise ConfigError("LocalSteps: its `with` has begun before; make a LocalSteps for each `with`")
        given = self._given_group or dist.distributed_c10d._get_default_group()
        # A group of its own: ranks may skip steps, so syncs keep no order with other operations of the job.
        made = dist.new_group(
            dist.get_process_group_ranks(given),
            backend=NAME,
            pg_options=Options(dataclasses.replace(policy_of_groups(Config.from_environment()), priority=CLASS)),
            use_local_synchronization=True,
            group_desc="commlayer.LocalSteps",
        )
        assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
        self._group = made
        try:
            self._begin(made)
        except BaseException:
            self._end()
            raise
        _entered.add(self)
        return self

    def _begin(self, group: CommProcessGroup) -> None:
        own = Introduction()
        try:
            self._rounds = rounds = self._prepare(group, own)
            if self._restored is not None:
                rounds.restore(self._restored)
                own.digests = rounds.digests()
            own.settings["syncs"] = self.syncs - bool(self._flying())
        except ConfigError as error:
            own.fault = str(error)
        meet(group, own, REMEDIES)
        if flying := self._flying():
            rounds.resume(flying)
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._model.register_load_state_dict_pre_hook(self._refuse_load),
        ]

    def _prepare(self, group: CommProcessGroup, own: Introduction) -> Rounds:
        """Checks the arguments, and tells them in `own`."""
        turns = Turns.of(self._every, self._fragments, self._delay)
        outer = Outer.default(turns) if self._outer is None else Outer.of(self._outer)
        if self._codec not in CODECS:
            raise ConfigError(
                f"LocalSteps(codec={self._codec!r}): use one of {', '.join(CODECS)}: the errors of others are too "
                f"large for weights"
            )
        if self._buffers not in BUFFERS:
            raise ConfigError(f"LocalSteps(buffers={self._buffers!r}): use one of {', '.join(map(repr, BUFFERS))}")
        if self._samples is not None and not callable(self._samples):
            raise ConfigError(f"LocalSteps(samples={self._samples!r}): give a function that returns a count, or None")
        self._weights = Weights(self._model, self._optimizer, self._buffers)
        self._site = Site(self._site_group(group))
        own.settings = {
            **dataclasses.asdict(turns),
            "outer": tuple(outer),
            "codec": self._codec,
            "buffers": self._buffers,
            "samples": self._samples is not None,
            "ranks per site": self._site.size,
            "rank in its site": self._site.rank,
            "model": self._weights.shapes(),
            "fine": [name for name, each in self._weights.parameters.items() if each in self._fine],
            "restored": self._restored is not None,
        }
        own.digests = self._weights.digests()
        form = Form(self._codec, self._fine, self._samples is not None)
        return Rounds(group, self._weights, self._site, turns, outer, form)

    def _site_group(self, group: CommProcessGroup) -> dist.ProcessGroup | None:
        """The process group of a DDP model. Raises ConfigError unless this rank alone is in both groups."""
        if not isinstance(self._model, DistributedDataParallel):
            return None
        site: dist.ProcessGroup = self._model.process_group
        both = set(dist.get_process_group_ranks(site)) & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise ConfigError(
                f"LocalSteps(DistributedDataParallel): its process group and `group` share the ranks {sorted(both)}, "
                f"but DDP averages within a site, and `group` connects sites; make the model with process_group=, the "
                f"ranks of this site, and give group=, the ranks of the same number in all sites"
            )
        return site

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rounds, group = self._begun()
        try:
            if error is None:
                self._before_step()
                rounds.leave()
        except BaseException as late:
            error = late
            raise
        finally:
            if error is not None:
                group.abort()  # the others would wait for this rank's next sync
            self._end()

    def _begun(self) -> tuple[Rounds, CommProcessGroup]:
        if self._rounds is None or self._group is None:
            raise ConfigError("LocalSteps: this works within `with LocalSteps(...) as local:`")
        return self._rounds, self._group

    def _end(self) -> None:
        """Lets go of the model and of the group."""
        _entered.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        if self._is_averaged:
            raise ConfigError("LocalSteps: a step within `averaged()` would change the shared weights; end it first")

    def _after_step(self, *_: Any) -> None:
        rounds, _group = self._begun()
        count = 1.0
        if self._samples is not None:
            device = next(iter(self._weights.parameters.values())).device
            count = self._site.total(_count(self._samples), device)
        rounds.step(count)

    @property
    def steps(self) -> int:
        """Local steps of this rank, including those before a checkpoint."""
        return self._rounds.steps if self._rounds is not None else 0

    @property
    def syncs(self) -> int:
        """Syncs that this rank has begun."""
        return self._rounds.syncs if self._rounds is not None else 0

    # ---- state ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """A context in which the model has the shared weights, to evaluate and save; afterwards this site's own again.

        All ranks of a site enter it. Raises ConfigError outside of `with`, and for a step within.
        """
        rounds, _ = self._begun()
        if self._is_averaged:
            raise ConfigError("LocalSteps: averaged() within averaged(); use one of them")
        self._is_averaged = True
        try:
            with rounds.averaged():
                yield self._model
        finally:
            self._is_averaged = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a checkpoint beside that of the model and of the optimizer; waits for nothing. Each
        rank saves its own, within `with`. A sync in flight is saved, too, and sent again after a restore."""
        return self._begun()[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the value of `state_dict`, before `with` begins; restore model and optimizer, too.

        Raises ConfigError within `with`, and unless `state` came from `state_dict`. Whether it fits the model and the
        states of the other ranks is checked when `with` begins.
        """
        if self._group is not None:
            raise ConfigError("LocalSteps.load_state_dict: a sync may be in flight; call it before `with` begins")
        if missing := set(FIELDS) - set(state):
            raise ConfigError(f"LocalSteps.load_state_dict: not the state of a LocalSteps, it lacks {sorted(missing)}")
        self._restored = dict(state)

    def _flying(self) -> Mapping[str, Any] | None:
        """The sync that was in flight when the restored state was saved."""
        return None if self._restored is None else self._restored["sync"]

    def _refuse_load(self, *_: Any) -> None:
        raise ConfigError(
            "load_state_dict of a model within `with LocalSteps(...)`: the sites would count it as learned; end `with` "
            "first, or restore before it begins"
        )

    def explain(self) -> str:
        """How this training exchanges weights, in words."""
        rounds, _ = self._begun()
        turns, outer = rounds.turns, rounds.outer
        values = sum(each.size for each in rounds.fragments)
        return (
            f"{values} values in {turns.fragments} fragments, each sent every {turns.every} steps in {self._codec} and "
            f"applied {turns.delay} steps later; outer SGD with learning rate {outer.lr:g} and Nesterov momentum "
            f"{outer.momentum:g}; {rounds.steps} steps and {rounds.syncs} syncs so far"
        )


def _count(samples: Callable[[], float]) -> float:
    """This rank's samples of a step; NaN if `samples` gives no count."""
    count = number(samples())
    return count if 0 <= count < math.inf else math.nan


@atexit.register
def _warn_of_open() -> None:
    for each in list(_entered):
        log.error(
            "LocalSteps: the process ends within `with`, after %d steps: the model has this site's own weights, and "
            "no last sync was made; leave the `with` block",
            each.steps,
        )
