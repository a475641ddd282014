"""`Training`: what all ranks have begun together, from their meeting until `with` ends."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...config import Config, number
from ...errors import ConfigError, PeerLostError
from ...plans.codec import VALUE_BYTES
from ..group.backend import CommProcessGroup
from ..group.split import group_among
from ..group.state import State
from .arguments import Arguments
from .exact import ExactSteps
from .exact_state import ExactState, policy_of
from .living import DESCRIPTION, Living
from .meeting import REMEDIES, Introduction, attend, is_on_all, meet
from .rounds import Rounds
from .site import Site, peers_of
from .sync import policy_of_syncs
from .turns import Turns
from .weights import Weights

RANK_IN_SITE = "rank in its site"
"""The setting that is alike between sites, and differs within one."""

log = logging.getLogger("commlayer")


class Training:
    """Before `meet` or `join` it has its arguments alone. `given`: those of `LocalSteps`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, given: Arguments) -> None:
        self._model, self._optimizer, self._schedule, self.given = model, optimizer, schedule, given
        self.restored: dict[str, Any] | None = None
        """The value of `LocalSteps.state_dict` from which it goes on."""
        self.site = Site()
        self.living: Living | None = None
        """None before it begins, and after its end."""
        self.exact: ExactSteps | None = None
        """None before it begins."""
        self.rounds: Rounds | None = None
        """None in exact steps."""
        self.rank: int | None = None
        self.ranks: list[int] = []
        """Those that train, after the end."""

    @property
    def steps(self) -> int:
        """See `LocalSteps.steps`."""
        exact = 0 if self.exact is None else self.exact.steps
        return exact + (0 if self.rounds is None else self.rounds.steps)

    def begun(self) -> tuple[ExactSteps, Living]:
        """Raises ConfigError before the beginning, and after the end."""
        if self.exact is None or self.living is None:
            raise ConfigError("LocalSteps: this works within `with LocalSteps(...) as local:`")
        return self.exact, self.living

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def meet(self, peers: dist.ProcessGroup | None) -> None:
        """Meets the other ranks, which begin, too. `peers`: those of this place in all sites; None: they are found."""
        given = peers or dist.distributed_c10d._get_default_group()
        attend(given)
        self.site = Site.of(self._model)
        ranks = dist.get_process_group_ranks(given) if peers is not None else peers_of(self.site)
        # A group of its own: ranks may skip steps, so syncs keep no order with other operations of the job.
        timeout = given.timeout if isinstance(given, CommProcessGroup) else None
        made = group_among(sorted(ranks), DESCRIPTION, policy_of_syncs(), timeout)
        assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
        group, own, site = made, Introduction(), self.site
        self.living = living = Living(group, dist.get_process_group_ranks(group), site)
        self.rank = dist.get_rank()
        try:
            self._prepare(living, own)
        except ConfigError as error:
            own.fault = str(error)
        token = site.agreed(lambda: meet(group, own, REMEDIES))
        alike = {name: value for name, value in own.settings.items() if name != RANK_IN_SITE}
        for within in site.groups:  # each rank has met others than its neighbour
            digests = own.digests if within is site.replicas and self.restored is None else {}
            told = Introduction(settings=alike, digests=digests)
            site.agreed(functools.partial(meet, within, told, REMEDIES))
        living.token = site.told(token)[0]
        site.separate(group.timeout)
        if self.given.min_sites is not None:
            site.agreed(functools.partial(living.watch, self.given.min_sites, self._silence_s))
        elif len(site.ranks) > 1:
            site.agreed(living.learn_sites)
        if self.rounds is None:
            assert self.exact is not None  # noqa: S101  # of _prepare
            share = self.given.value_bytes(group.host_count) / VALUE_BYTES / self.given.fragments
            self.exact.begin(group, share=share if self.given.every == "auto" else 0.0)
        else:
            self.open(self.rounds, living)
            if flying := self._flying():
                self.rounds.resume(flying)
        self._watch_loops(living)

    def join(self, store: dist.Store) -> None:
        """Joins a training that has begun."""
        given = self.given
        self.site = Site.of(self._model) if dist.is_initialized() else Site()
        size = dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized() and (size == 1 or sorted(self.site.ranks) != list(range(size))):
            raise ConfigError(
                f"LocalSteps(join=...): this process has a WORLD of {size} rank(s), and the ranks {self.site.ranks} "
                f"are its site; a site that joins has a WORLD if it has several ranks, and all of that are the site; "
                f"leave init_process_group to the others, or call it for this site alone"
            )
        if dist.is_initialized():
            attend(dist.distributed_c10d._get_default_group())
        self.site.separate(None)  # before an error of one rank, which the others would wait for here

        def equip() -> ExactSteps:
            if given.min_sites is None or self.restored is not None:
                what = "load_state_dict" if self.restored is not None else "min_sites=None"
                raise ConfigError(
                    f"LocalSteps(join=...) with {what}: a site joins as one of min_sites=, without a state"
                )
            return self._equip(None)

        self.exact = exact = self.site.agreed(equip)
        assert given.min_sites is not None  # noqa: S101  # of equip

        def begin(living: Living) -> None:
            self.living, self.rank = living, living.party.own
            self._weights.rank = self.rank
            given.check(living.group, self.site, joins=True)
            self.rounds = rounds = self.rounds_of(living, living.turns)
            course, steps = rounds.join()
            exact.steps = course["exact"]
            self._state.follow(course, steps)
            rounds.listen(self._silence_s)
            self._watch_loops(living)

        own, silence_s = self._joined_settings(), self._silence_s
        Living.join(store, own, given.min_sites, policy_of_syncs(), silence_s, self.site, begin)

    def open(self, rounds: Rounds, living: Living) -> None:
        """Local steps begin."""
        rounds.listen(self._silence_s)
        if living.goes_on:
            try:
                self._state.check("LocalSteps")
            except ConfigError as error:
                log.warning("no site can join this training: %s", error)
            else:
                living.open(self._joined_settings(), rounds.turns)

    def _watch_loops(self, living: Living) -> None:
        """The loops of this site begin."""
        self.site.watch(living.store, living.own_site, self.steps, self._model, self._silence_s)

    def _joined_settings(self) -> dict[str, Any]:
        """What a site that joins must have as all others, by name. All its ranks call."""
        frozen = self.site.told(self._weights.fixed_digests())
        return {
            "ranks per site": len(self.site.ranks),
            **self._state.settings(),
            **self.given.settings(self.given.turns(), self._weights, self.site),
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
        given = self.given
        given.check(group, self.site)
        self._weights = Weights(self._model, self._optimizer, given.buffers)
        self._weights.rank = self.rank
        fine = given.fine.of_parts(self._weights.parts)
        state = ExactState(policy_of(given.policy, self.site), group, fine=fine, optimizer=self._optimizer)
        count = None if given.samples is None else self.count
        return ExactSteps(self._weights, self.site, state, count, is_plain=not self.site.groups)

    def _prepare(self, living: Living, own: Introduction) -> None:
        """Checks the arguments, takes over the restored state, and tells both in `own`."""
        given, restored = self.given, self.restored
        turns = given.turns(restored)
        self.exact = self._equip(living.group)
        own.digests = self._weights.digests()
        if restored is not None:
            self.exact.restore(restored)
        if turns is not None and (not given.exact_steps if restored is None else restored["rounds"] is not None):
            self.rounds = self.rounds_of(living, turns)
        if self.rounds is not None and restored is not None:
            self.rounds.restore(restored["rounds"], Turns(*restored["turns"]))
            own.digests = self.rounds.shared.digests() | self._weights.fixed_digests()
        own.settings = {
            **given.settings(turns, self._weights, self.site),
            "ranks per site": len(self.site.ranks),
            RANK_IN_SITE: self.site.ranks.index(dist.get_rank()),
            "model": self._weights.shapes(),
            "restored": restored is not None,
            "exact steps so far": self.exact.steps,
            "order of gradients": self.exact.order,
            "syncs": None if self.rounds is None else self.rounds.syncs - bool(self._flying()),
        }

    def rounds_of(self, living: Living, turns: Turns) -> Rounds:
        """Local steps that have these turns, and have not begun."""
        rounds = Rounds(living, self._weights, self.site, turns, self.given.outer_of(turns), self.given.form)
        rounds.course = lambda: {"exact": self.begun()[0].steps, **self._state.course()}
        return rounds

    # ---- the end ----------------------------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """This rank makes no more steps, and the others need not wait for it: neither where all raise this error, as
        some may have found a death instead, and make another group. If another rank of its site has died or has given
        up before, raises PeerLostError, and MismatchError if it has ended its loop before: DDP and FSDP2 do not say
        that."""
        exact, living = self.begun()
        if (parted := self.site.parted(error)) is not None:
            self.give_up(parted)
            raise parted from error
        if is_on_all(error):
            living.withdraw(error)
            return
        if self.rounds is not None:
            self.rounds.halt()  # its thread would go on with syncs, and come to meetings
        living.withdraw(error)
        exact.abort()
        self.site.abort(error)
        is_own = isinstance(error, ConfigError) or not isinstance(error, RuntimeError)
        has_begun = self.rounds is not None
        if not is_own and (text := living.loss(error, silence_s=self._silence_s, has_begun=has_begun)):
            raise PeerLostError(text) from error

    def end(self, *, is_over: bool) -> None:
        """Lets go of the model and of the group. `is_over`: on all ranks."""
        if self.exact is not None:
            self.exact.end()
        if self.rounds is not None:
            self.rounds.close()
        living, self.living = self.living, None
        if living is not None:
            self.ranks = living.ranks
            living.close(ended=is_over)
        self.site.close()

    def stop_threads(self) -> None:
        """As the process ends within `with`."""
        self.site.unwatch()
        if self.rounds is not None:
            self.rounds.close()
        if self.living is not None:
            self.living.unwatch()

    def _flying(self) -> Mapping[str, Any] | None:
        """The sync that was in flight when the restored state was saved."""
        return None if self.restored is None or self.restored["rounds"] is None else self.restored["rounds"]["sync"]

    def count(self) -> float:
        """The samples of this site in a step; NaN if `samples` gives no count."""
        if self.given.samples is None:
            return 1.0
        count = number(self.given.samples())
        return self.site.total(count if 0 <= count < math.inf else math.nan)
