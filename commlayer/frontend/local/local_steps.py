"""`LocalSteps`: sites train on their own, and exchange what they have learned every H steps.

    with commlayer.LocalSteps(model, optimizer, every=24) as local:
        ...                                              # the training loop is unchanged

docs/local.md derives the rule by which a site takes over what the others have learned.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from ...compress.codec import codec_of
from ...compress.fine import Fine
from ...config import Config, Policy, number
from ...errors import ConfigError, PeerLostError
from ...plans.codec import VALUE_BYTES
from ..gradients.candidates import bytes_per_value
from ..gradients.disabled import refuse
from ..group.backend import CommProcessGroup
from ..group.options import NAME, Options
from ..group.state import State
from ..work.dynamo import untraced
from .arguments import Arguments, check_kinds
from .exact import ExactSteps
from .exact_state import ExactState, policy_of
from .living import DESCRIPTION, Living
from .measured import Measured
from .meeting import REMEDIES, Introduction, is_on_all, meet
from .rounds import FIELDS, Rounds
from .site import Site, peers_of
from .sync import policy_of_syncs
from .turns import EVERY_MAX, Turns
from .weights import Weights

RANK_IN_SITE = "rank in its site"
"""The setting that is alike between sites, and differs within one."""

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
    least H that hides the network, with H fragments at most; where that is 1, all steps stay exact. `exact_steps` is
    the number of exact steps at the start of a training. `policy` is that of their gradients, as of a HookState; None:
    the job's settings, or the default one, float32.

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
        self._given_group = group
        fine = fine or Fine()
        self._given = Arguments(
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
        self._schedule, self._store = schedule, join
        self._restored: dict[str, Any] | None = None
        self._site = Site()  # until `with` begins
        self._living: Living | None = None
        self._exact: ExactSteps | None = None
        self._rounds: Rounds | None = None  # None in exact steps
        self._measured: Measured | None = None
        self._hooks: list[RemovableHandle] = []
        self._is_averaged = False
        self._rank: int | None = None
        self._ranks: list[int] = []  # after `with`

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalSteps:
        if Config.is_disabled():
            refuse("LocalSteps", "the sites would never exchange their weights")
        if self._exact is not None or self._living is not None:
            raise ConfigError("LocalSteps: its `with` has begun before; make a LocalSteps for each `with`")
        try:
            self._meet() if self._store is None else self._join(self._store)
        except BaseException:
            self._end(is_over=False)
            raise
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            *(module.register_load_state_dict_pre_hook(_refuse_load) for module in self._model.modules()),
        ]
        _entered.add(self)
        return self

    def _meet(self) -> None:
        """Meets the other ranks, which begin, too."""
        given = self._given_group or dist.distributed_c10d._get_default_group()
        if isinstance(given, CommProcessGroup):
            given.barrier().wait()  # raises PeerLostError after a death; new_group would wait for its timeout
        self._site = Site.of(self._model)
        ranks = dist.get_process_group_ranks(given) if self._given_group is not None else peers_of(self._site)
        # A group of its own: ranks may skip steps, so syncs keep no order with other operations of the job.
        made = dist.new_group(
            ranks,
            backend=NAME,
            pg_options=Options(policy_of_syncs()),
            timeout=given.timeout if isinstance(given, CommProcessGroup) else None,
            use_local_synchronization=True,
            group_desc=DESCRIPTION,
        )
        assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
        group, own, site = made, Introduction(), self._site
        self._living = living = Living(group, dist.get_process_group_ranks(group), site)
        self._rank = dist.get_rank()
        try:
            self._prepare(living, own)
        except ConfigError as error:
            own.fault = str(error)
        token = site.agreed(lambda: meet(group, own, REMEDIES))
        alike = {name: value for name, value in own.settings.items() if name != RANK_IN_SITE}
        for within in site.groups:  # each rank has met others than its neighbour
            digests = own.digests if within is site.replicas and self._restored is None else {}
            told = Introduction(settings=alike, digests=digests)
            site.agreed(functools.partial(meet, within, told, REMEDIES))
        living.token = site.told(token)[0]
        if self._given.min_sites is not None or self._given.quorum is not None:
            site.separate(group.timeout)
        if self._given.min_sites is not None:
            site.agreed(functools.partial(living.watch, self._given.min_sites, self._silence_s))
        if self._rounds is None:
            assert self._exact is not None  # noqa: S101  # of _prepare
            self._exact.begin(group, measures=self._given.every == "auto")
        else:
            self._open(self._rounds, living)
            if flying := self._flying():
                self._rounds.resume(flying)

    def _join(self, store: dist.Store) -> None:
        """Joins a training that has begun."""
        given = self._given
        self._site = Site.of(self._model) if dist.is_initialized() else Site()
        size = dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized() and (size == 1 or sorted(self._site.ranks) != list(range(size))):
            raise ConfigError(
                f"LocalSteps(join=...): this process has a WORLD of {size} rank(s), and the ranks {self._site.ranks} "
                f"are its site; a site that joins has a WORLD if it has several ranks, and all of that are the site; "
                f"leave init_process_group to the others, or call it for this site alone"
            )
        self._site.separate(None)  # before an error of one rank, which the others would wait for here

        def equip() -> ExactSteps:
            if given.min_sites is None or self._restored is not None:
                what = "load_state_dict" if self._restored is not None else "min_sites=None"
                raise ConfigError(
                    f"LocalSteps(join=...) with {what}: a site joins as one of min_sites=, without a state"
                )
            return self._equip(None)

        self._exact = exact = self._site.agreed(equip)
        assert given.min_sites is not None  # noqa: S101  # of equip

        def begin(living: Living) -> None:
            self._living, self._rank = living, living.party.own
            given.check(living.group, self._site, joins=True)
            self._rounds = rounds = self._rounds_of(living, living.turns)
            course, steps = rounds.join()
            exact.steps = course["exact"]
            self._state.follow(course, steps)
            rounds.listen(self._silence_s)

        own, silence_s = self._joined_settings(), self._silence_s
        Living.join(store, own, given.min_sites, policy_of_syncs(), silence_s, self._site, begin)

    def _open(self, rounds: Rounds, living: Living) -> None:
        """Local steps begin."""
        rounds.listen(self._silence_s)
        if living.goes_on:
            try:
                self._state.check("LocalSteps")
            except ConfigError as error:
                log.warning("no site can join this training: %s", error)
            else:
                living.open(self._joined_settings(), rounds.turns)

    def _joined_settings(self) -> dict[str, Any]:
        """What a site that joins must have as all others, by name. All its ranks call."""
        frozen = self._site.told(self._weights.fixed_digests())
        return {
            "ranks per site": len(self._site.ranks),
            **self._state.settings(),
            **self._given.settings(self._given.turns(), self._weights, self._site),
            "frozen": {name: [each[name] for each in frozen] for name in frozen[0]},
            "policy of syncs": dataclasses.asdict(policy_of_syncs()),
        }

    @property
    def _state(self) -> State:
        return State(self._model, self._optimizer, self._schedule)

    @property
    def _silence_s(self) -> float:
        return Config.from_environment().peer_timeout_s

    def _equip(self, group: CommProcessGroup | None) -> ExactSteps:
        """Checks the arguments. `group`: of the sites, if it is known."""
        given = self._given
        given.check(group, self._site)
        self._weights = Weights(self._model, self._optimizer, given.buffers)
        fine = given.fine.of_parts(self._weights.parts)
        state = ExactState(policy_of(given.policy, self._site), group, fine=fine, optimizer=self._optimizer)
        count = None if given.samples is None else self._count
        return ExactSteps(self._weights, self._site, state, count, is_plain=not self._site.groups)

    def _prepare(self, living: Living, own: Introduction) -> None:
        """Checks the arguments, takes over the restored state, and tells both in `own`."""
        given, restored = self._given, self._restored
        turns = given.turns(restored)
        self._exact = self._equip(living.group)
        own.digests = self._weights.digests()
        if restored is not None:
            self._exact.restore(restored)
        if turns is not None and (not given.exact_steps if restored is None else restored["rounds"] is not None):
            self._rounds = self._rounds_of(living, turns)
        if self._rounds is not None and restored is not None:
            self._rounds.restore(restored["rounds"])
            own.digests = self._rounds.shared.digests() | self._weights.fixed_digests()
        own.settings = {
            **given.settings(turns, self._weights, self._site),
            "ranks per site": len(self._site.ranks),
            RANK_IN_SITE: self._site.ranks.index(dist.get_rank()),
            "model": self._weights.shapes(),
            "restored": restored is not None,
            "exact steps so far": self._exact.steps,
            "order of gradients": self._exact.order,
            "syncs": None if self._rounds is None else self._rounds.syncs - bool(self._flying()),
        }

    def _rounds_of(self, living: Living, turns: Turns) -> Rounds:
        rounds = Rounds(living, self._weights, self._site, turns, self._given.outer_of(turns), self._given.form)
        rounds.course = lambda: {"exact": self._begun()[0].steps, **self._state.course()}
        return rounds

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exact, _ = self._begun()
        try:
            if error is None:
                self._check_own()
                (self._rounds or exact).leave()
            else:
                self._give_up(error)
        except BaseException as late:
            if error is None:
                self._give_up(late)
            error = error or late
            raise
        finally:
            self._end(is_over=error is None or is_on_all(error))

    def _give_up(self, error: BaseException) -> None:
        """This rank makes no more steps, and the others need not wait for it: neither where all raise this error, as
        some may have found a death instead, and make another group. If another rank of its site has died or has given
        up before, raises PeerLostError: DDP and FSDP2 do not say that."""
        exact, living = self._begun()
        if is_on_all(error):
            living.withdraw(error)
            return
        if self._rounds is not None:
            self._rounds.halt()  # its thread would go on with syncs, and come to meetings
        living.withdraw(error)
        exact.abort()
        self._site.abort(error)
        is_own = isinstance(error, ConfigError) or not isinstance(error, RuntimeError)
        has_begun = self._rounds is not None
        if not is_own and (text := living.loss(error, silence_s=self._silence_s, has_begun=has_begun)):
            raise PeerLostError(text) from error

    def _begun(self) -> tuple[ExactSteps, Living]:
        if self._exact is None or self._living is None:
            raise ConfigError("LocalSteps: this works within `with LocalSteps(...) as local:`")
        return self._exact, self._living

    def _end(self, *, is_over: bool) -> None:
        """Lets go of the model and of the group. `is_over`: on all ranks."""
        _entered.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._exact is not None:
            self._exact.end()
        if self._rounds is not None:
            self._rounds.close()
        living, self._living = self._living, None
        if living is not None:
            self._ranks = living.ranks
            living.close(ended=is_over)
        self._site.close()

    def _stop_threads(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        if self._living is not None:
            self._living.unwatch()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _check_own(self) -> None:
        if self._is_averaged:
            raise ConfigError("LocalSteps: a step within `averaged()` would change the shared weights; end it first")

    def _before_step(self, _: Optimizer, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._check_own()
        if self._rounds is None:
            has_closure = len(given) > 1 or named.get("closure") is not None  # the first is the optimizer
            self._begun()[0].average(self._optimizer, has_closure=has_closure)

    def _after_step(self, *_: Any) -> None:
        if self._rounds is not None:
            self._rounds.step(self._count())
            return
        exact, living = self._begun()
        exact.stepped()
        is_auto = self._given.every == "auto"
        is_due = exact.can_tell and self._measured is None if is_auto else True
        if is_due and exact.steps >= self._given.exact_steps:
            self._begin_rounds(exact, living, is_auto=is_auto)

    def _begin_rounds(self, exact: ExactSteps, living: Living, *, is_auto: bool) -> None:
        """The last exact step was made: local steps begin, if they are worth it. All ranks come to the same result."""
        turns: Turns | None
        if is_auto:
            pair = codec_of(self._given.codec).pair
            self._measured = exact.measured(VALUE_BYTES if pair is None else bytes_per_value(pair) / 2)
            turns = self._given.turns_of(min(self._measured.every, EVERY_MAX))
        else:
            turns = self._given.turns()
        if turns is not None:
            exact.finish()
            rounds = self._rounds_of(living, turns)
            rounds.shared.adopt(living.group)
            self._open(rounds, living)
            self._rounds = rounds
            exact.end()
        exact.measure(False)
        if is_auto and living.group.rank() == 0:
            log.info("LocalSteps: %s", self.explain())

    def _count(self) -> float:
        """The samples of this site in a step; NaN if `samples` gives no count."""
        if self._given.samples is None:
            return 1.0
        count = number(self._given.samples())
        return self._site.total(count if 0 <= count < math.inf else math.nan)

    @property
    def steps(self) -> int:
        """Steps of this rank, exact ones and those before a checkpoint included."""
        exact = 0 if self._exact is None else self._exact.steps
        return exact + (0 if self._rounds is None else self._rounds.steps)

    @property
    def syncs(self) -> int:
        """Syncs that this rank has begun."""
        return 0 if self._rounds is None else self._rounds.syncs

    @property
    def trained(self) -> float:
        """Samples of all sites in the syncs that have ended, which are local steps without `samples`: the same on all
        ranks after the same sync. Exact steps are left out."""
        return 0.0 if self._rounds is None else self._rounds.shared.trained

    def passed(self, samples: float) -> bool:
        """Whether `trained` has passed a multiple of `samples` in the last step: on all ranks after the same sync, so
        that they can save there. Call it after each step, from the first one on."""
        if not samples > 0:
            raise ConfigError(f"LocalSteps.passed({samples!r}): give a number of samples above 0")
        return self._rounds is not None and self._rounds.passed(samples)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group whose sites train, the same on all of them after the same sync: without those that
        have died. With `min_sites` all ranks of these sites, site after site; the first site is that with the lowest
        first rank. Raises ConfigError before `with`."""
        return self._ranks or self._begun()[1].ranks

    @property
    def rank(self) -> int:
        """That of this process in `ranks`: its rank in the job; of a site that has joined, a number above all others.
        Raises ConfigError before `with`."""
        if self._rank is None:
            self._begun()
        assert self._rank is not None  # noqa: S101  # since `with` has begun
        return self._rank

    # ---- state ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """A context in which the model has the shared weights, to evaluate and save; afterwards this site's own again.

        All ranks of a site enter it. Raises ConfigError outside of `with`, and for a step within.
        """
        self._begun()
        if self._is_averaged:
            raise ConfigError("LocalSteps: averaged() within averaged(); use one of them")
        self._is_averaged = True
        try:
            with self._rounds.shared.averaged() if self._rounds is not None else contextlib.nullcontext():
                yield self._model
        finally:
            self._is_averaged = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a checkpoint beside that of the model and of the optimizer; waits for nothing. Each
        rank saves its own, within `with`. A sync in flight is saved, too, and sent again after a restore."""
        exact, _ = self._begun()
        rounds = self._rounds
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
        if self._living is not None:
            raise ConfigError("LocalSteps.load_state_dict: a sync may be in flight; call it before `with` begins")
        if missing := {"exact", "turns", "rounds"} - set(state) or set(FIELDS) - set(state["rounds"] or FIELDS):
            raise ConfigError(f"LocalSteps.load_state_dict: not the state of a LocalSteps, it lacks {sorted(missing)}")
        self._restored = dict(state)

    def _flying(self) -> Mapping[str, Any] | None:
        """The sync that was in flight when the restored state was saved."""
        return None if self._restored is None or self._restored["rounds"] is None else self._restored["rounds"]["sync"]

    def explain(self) -> str:
        """How this training exchanges weights, in words."""
        exact, _ = self._begun()
        if self._rounds is None:
            return exact.explain(self._measured)
        lines = [] if self._measured is None else [str(self._measured)]
        rounds, turns, outer = self._rounds, self._rounds.turns, self._rounds.shared.outer
        values = sum(fragment.size for fragment in rounds.shared.fragments)
        lines.append(
            f"{values} values in {turns.fragments} fragments, each sent every {turns.every} steps in "
            f"{self._given.codec} and applied {turns.mean_delay:g} steps later; outer SGD with learning rate "
            f"{outer.lr:g} and Nesterov momentum {outer.momentum:g}; {exact.steps} exact steps, {rounds.steps} local "
            f"steps and {rounds.syncs} syncs so far"
        )
        if rounds.stand_in is not None:
            lines.append(str(rounds.stand_in))
        return "\n".join(lines)


def _refuse_load(*_: Any) -> None:
    raise ConfigError(
        "load_state_dict of a model within `with LocalSteps(...)`: the sites would count it as learned; end `with` "
        "first, or restore before it begins"
    )


@atexit.register
def _warn_of_open() -> None:
    for context in list(_entered):
        log.error(
            "LocalSteps: the process ends within `with`, after %d steps: the model has this site's own weights, and "
            "no last sync was made; leave the `with` block",
            context.steps,
        )
        context._stop_threads()  # one that is in the Store when Python ends would abort the process
