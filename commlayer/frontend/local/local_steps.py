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
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from ...compress.fine import Fine
from ...config import Config, Policy
from ...dynamo import untraced
from ...errors import ConfigError
from ..gradients.disabled import refuse
from .arguments import Arguments, check_kinds
from .exact import ExactSteps
from .living import Living
from .measured import Measured
from .meeting import is_on_all
from .refusal import Refusal
from .rounds import FIELDS
from .training import Training
from .turns import EVERY_MAX, Turns

log = logging.getLogger("commlayer")

_entered: weakref.WeakSet[LocalSteps] = weakref.WeakSet()


@untraced
class LocalSteps:
    """A context around a training loop, in which each site makes `every` optimizer steps on its own between two syncs
    of a value. `with` begins and ends on all ranks, but those that `join`.

    `model` is a plain module, a site of one rank; or DistributedDataParallel, whose process group is then the site; or
    one that `fully_shard` has sharded, whose mesh is the site: each rank exchanges its part of the weights. `optimizer`
    changes the weights, which are float32. `group` has the ranks of the same place in all sites; None: they are found,
    and all ranks of WORLD take part. The engine sends; the job may have any backend.

    `every="auto"` measures the link and the step in a few exact steps, in which gradients are averaged, and takes the
    least H that hides the network, with H fragments at most; where that is 1, all steps stay exact. Later H follows the
    times of syncs. `exact_steps` is the number of exact steps at the start of a training. `policy` is that of their
    gradients, as of a HookState; None: the job's settings, or the default one, float32.

    `fragments` parts of the model are sent in turn, each every `every` steps, by a codec of `CODECS`. A sync is applied
    `delay` steps after its start, and not after the next one's start; None: when the next one starts. `outer` is
    (learning rate, momentum) of the optimizer of the shared weights, SGD with Nesterov momentum; None: by `every` and
    `delay`. `samples` returns the number of this rank's samples in a step, and is called once in each: sites then count
    by their samples. `buffers`: "average" averages floating-point buffers, as of BatchNorm, "own" leaves each rank its
    own. `fine` selects parameters that travel in bf16; None: those with fewer than two dimensions. After the death of a
    site, once local steps have begun, the others go on without it, down to `min_sites` of them; None: they raise
    PeerLostError. A site of several ranks goes as a whole. `uneven`: a site begins a turn as soon as another one does,
    after as many steps as it has made by then; sites count by their steps, or samples. End the loops of uneven sites by
    `trained`. `quorum`: a site whose loop is late is left out of a sync after a measured grace, while at least so
    many sites count in it; its steps are sent later. None: the others wait for it.

    `join` is the Store of a job that trains with `min_sites` and the same arguments: this process, which has no WORLD,
    becomes one more site; so do the ranks of a WORLD, if all of them are one site. `with` begins once it has the shared
    weights; `steps` and `trained` are then those of the job, and the optimizer has the hyperparameters of another site,
    and no state. `schedule`, of all sites, is stepped once after each optimizer step; that of a site that joins is
    brought to the job's step.

    When `with` ends well, all fragments are sent a last time, and all ranks have the shared weights. When it ends with
    an error, the other ranks get an AbortedError at their next sync.

    Raises ConfigError, on all ranks, when `with` begins: for arguments out of range, or that differ between the ranks;
    for models other than the above, and weights that differ. Raises, out of `optimizer.step()`, ConfigError for changes
    that the sites do not share, CommError for values that are not finite or differ, and the errors of operations:
    PeerLostError, OperationTimeoutError, AbortedError. With `join`, `with` raises ConfigError if this process does not
    fit, ClosedError if the training has ended, PeerLostError if it has died, and OperationTimeoutError if it has taken
    nobody for 30 minutes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int | str = "auto",
        fragments: int = 4,
        outer: tuple[float, float] | None = None,
        codec: str = "int4-int8",
        samples: Callable[[], float] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        delay: int | None = None,
        exact_steps: int = 0,
        buffers: str | None = None,
        fine: Fine | None = None,
        policy: Policy | None = None,
        min_sites: int | None = None,
        uneven: bool = False,
        quorum: int | None = None,
        schedule: LRScheduler | None = None,
        join: dist.Store | None = None,
    ) -> None:
        check_kinds(
            ("model", model, nn.Module, False),
            ("optimizer", optimizer, Optimizer, False),
            ("group", group, dist.ProcessGroup, True),
            ("fine", fine, Fine, True),
            ("policy", policy, Policy, True),
            ("schedule", schedule, LRScheduler, True),
            ("join", join, dist.Store, True),
        )
        self._model, self._optimizer = model, optimizer
        self._peers, self._store = group, join
        fine = fine or Fine()
        given = Arguments(
            every,
            fragments,
            delay,
            outer,
            codec,
            samples,
            exact_steps,
            buffers,
            fine,
            policy,
            min_sites,
            uneven,
            quorum,
        )
        self._training = Training(model, optimizer, schedule, given)
        self._measured: Measured | None = None
        self._hooks: list[RemovableHandle] = []
        self._is_averaged = False

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalSteps:
        if Config.is_disabled():
            refuse("LocalSteps", "the sites would never exchange their weights")
        if self._training.exact is not None or self._training.living is not None:
            raise ConfigError("LocalSteps: its `with` has begun before; make a LocalSteps for each `with`")
        if any(other._optimizer is self._optimizer for other in _entered):
            raise ConfigError(
                "LocalSteps: its optimizer is that of another LocalSteps, within whose `with` this one begins: each "
                "would send the other's changes; use one of them"
            )
        try:
            training = self._training
            training.meet(self._peers) if self._store is None else training.join(self._store)
        except BaseException:
            self._end(is_over=False)
            raise
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            *(module.register_load_state_dict_pre_hook(Refusal(self)) for module in self._model.modules()),
        ]
        _entered.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exact, _ = self._training.begun()
        try:
            if error is None:
                self._check_own()
                (self._training.rounds or exact).leave()
            else:
                self._training.give_up(error)
        except BaseException as late:
            if error is None:
                self._training.give_up(late)
            error = error or late
            raise
        finally:
            self._end(is_over=error is None or is_on_all(error))

    def _end(self, *, is_over: bool) -> None:
        """Lets go of the model and of the group. `is_over`: on all ranks."""
        _entered.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._training.end(is_over=is_over)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _check_own(self) -> None:
        if self._is_averaged:
            raise ConfigError("LocalSteps: a step within `averaged()` would change the shared weights; end it first")

    def _before_step(self, _: Optimizer, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._check_own()
        if self._training.rounds is None:
            has_closure = len(given) > 1 or named.get("closure") is not None  # the first is the optimizer
            self._training.begun()[0].average(self._optimizer, has_closure=has_closure)

    def _after_step(self, *_: Any) -> None:
        self._advance()
        self._training.site.stepped(self.steps)

    def _advance(self) -> None:
        """A step was made: all that follows for the sites."""
        if self._training.rounds is not None:
            self._training.rounds.step(self._training.count())
            return
        exact, living = self._training.begun()
        exact.stepped()
        is_auto = self._training.given.every == "auto"
        is_due = exact.can_tell and self._measured is None if is_auto else True
        if is_due and exact.steps >= self._training.given.exact_steps:
            self._begin_rounds(exact, living, is_auto=is_auto)

    def _begin_rounds(self, exact: ExactSteps, living: Living, *, is_auto: bool) -> None:
        """The last exact step was made: local steps begin, if they are worth it. All ranks come to the same result."""
        turns: Turns | None
        if is_auto:
            given = self._training.given
            self._measured = exact.measured(given.value_bytes(living.group.host_count), given.fragments)
            turns = given.turns_of(min(self._measured.every, EVERY_MAX))
        else:
            turns = self._training.given.turns()
        if turns is not None:
            exact.finish()
            rounds = self._training.rounds_of(living, turns)
            rounds.shared.adopt(living.group)
            self._training.open(rounds, living)
            self._training.rounds = rounds
            exact.end()
        exact.measure(False)
        if is_auto and living.group.rank() == 0:
            log.info("LocalSteps: %s", self.explain())

    @property
    def steps(self) -> int:
        """Steps of this rank, exact ones and those before a checkpoint included."""
        return self._training.steps

    @property
    def syncs(self) -> int:
        """Syncs that this rank has begun."""
        return 0 if self._training.rounds is None else self._training.rounds.syncs

    @property
    def trained(self) -> float:
        """Samples of all sites in the syncs that have ended, which are local steps without `samples`: the same on all
        ranks after the same sync. Exact steps are left out."""
        return 0.0 if self._training.rounds is None else self._training.rounds.shared.trained

    def passed(self, samples: float) -> bool:
        """Whether `trained` has passed a multiple of `samples` in the last step: on all ranks after the same sync, so
        that they can save there. Call it after each step, from the first one on."""
        if not samples > 0:
            raise ConfigError(f"LocalSteps.passed({samples!r}): give a number of samples above 0")
        return self._training.rounds is not None and self._training.rounds.passed(samples)

    @property
    def ranks(self) -> list[int]:
        """All ranks of the sites that train, site after site, the same on all of them after the same sync: without
        those that have died. The first site is that with the lowest first rank. Raises ConfigError before `with`."""
        return self._training.ranks or self._training.begun()[1].ranks

    @property
    def rank(self) -> int:
        """That of this process in `ranks`: its rank in the job; of a site that has joined, a number above all others.
        Raises ConfigError before `with`."""
        if self._training.rank is None:
            self._training.begun()
        assert self._training.rank is not None  # noqa: S101  # since `with` has begun
        return self._training.rank

    # ---- state ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """A context in which the model has the shared weights, to evaluate and save; afterwards this site's own again,
        also after an exception. Meanwhile each rank keeps its own weights in host memory, 4 bytes per value.

        All ranks of a site enter it. Raises ConfigError outside of `with`, and for a step within.
        """
        self._training.begun()
        if self._is_averaged:
            raise ConfigError("LocalSteps: averaged() within averaged(); use one of them")
        self._is_averaged = True
        try:
            with (
                self._training.rounds.shared.averaged()
                if self._training.rounds is not None
                else contextlib.nullcontext()
            ):
                yield self._model
        finally:
            self._is_averaged = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a checkpoint beside that of the model and of the optimizer; waits for nothing. Each
        rank saves its own, within `with`. A sync in flight is saved, too, and sent again after a restore.

        Raises ConfigError outside of `with`, and within `averaged()`, where the model lacks what this site has added.
        """
        exact, _ = self._training.begun()
        if self._is_averaged:
            raise ConfigError(
                "LocalSteps.state_dict within `averaged()`: the model has the shared weights there, and a restore with "
                "them would take back this site's steps; save model, optimizer and LocalSteps outside of it"
            )
        rounds = self._training.rounds
        return {
            **exact.state_dict(),
            "turns": None if rounds is None else dataclasses.astuple(rounds.turns),
            "rounds": None if rounds is None else rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the value of `state_dict`, before `with` begins; restore model and optimizer, too.

        Raises ConfigError within `with`, and unless `state` came from `state_dict`. Whether it fits the model and the
        states of the other ranks is checked when `with` begins.
        """
        if self._training.living is not None:
            raise ConfigError("LocalSteps.load_state_dict: a sync may be in flight; call it before `with` begins")
        if missing := {"exact", "turns", "rounds"} - set(state) or set(FIELDS) - set(state["rounds"] or FIELDS):
            raise ConfigError(f"LocalSteps.load_state_dict: not the state of a LocalSteps, it lacks {sorted(missing)}")
        self._training.restored = dict(state)

    def explain(self) -> str:
        """How this training exchanges weights, in words."""
        exact, _ = self._training.begun()
        if self._training.rounds is None:
            return exact.explain(self._measured)
        lines = [] if self._measured is None else [str(self._measured)]
        rounds, turns, outer = self._training.rounds, self._training.rounds.turns, self._training.rounds.shared.outer
        values = sum(fragment.size for fragment in rounds.shared.fragments)
        lines.append(
            f"{values} values in {turns.fragments} fragments, each sent every {turns.every} steps in "
            f"{self._training.given.codec} and applied {turns.mean_delay:g} steps later; outer SGD with learning rate "
            f"{outer.lr:g} and Nesterov momentum {outer.momentum:g}; {exact.steps} exact steps, {rounds.steps} local "
            f"steps and {rounds.syncs} syncs so far"
        )
        if rounds.pace.changes:
            lines.append(str(rounds.pace))
        if rounds.stand_in is not None:
            lines.append(str(rounds.stand_in))
        return "\n".join(lines)


@atexit.register
def _warn_of_open() -> None:
    for context in list(_entered):
        log.error(
            "LocalSteps: the process ends within `with`, after %d steps: the model has this site's own weights, and "
            "no last sync was made; leave the `with` block",
            context.steps,
        )
        context._training.stop_threads()  # one that is in the Store when Python ends would abort the process
