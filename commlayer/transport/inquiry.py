"""`Inquiry`: after a failure, the ranks of a group tell each other their latest calls and agree on the culprit.

They do so through the Store, once per group and only when an operation has failed: a rank publishes its latest calls,
waits briefly for those of the others, and proposes a verdict. The first verdict holds for all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Store
from .call import Call, Calls, Exchanged
from .places import place_of

LOOK_S = 0.01
"""Pause between looks at the Store. Waits are counted in looks: while this process has no processor, or is stopped, its
looks stop, too. Otherwise it would give up, although an answer is there."""

ANSWER_LOOKS = 70
"""The most looks for the answers of the other ranks: a rank that computes, or is stuck, does not answer."""

VERDICT_LOOKS = 150
"""The most looks for the verdict of the rank that failed first."""

RANKS_MAX = 64
"""The most ranks whose answers are read."""

SIZED = {"all_reduce", "broadcast"}
"""Collectives to which all ranks pass as many elements."""


PAIRS_TOLD = 3
"""The most pairs of ranks with unequal lengths that a text names."""

MESSAGES_TOLD = 3
"""The most messages that a text names."""

ALL_CALLED = "all ranks have called it"
"""Of an operation that timed out: its data did not come."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The agreed explanation of a failure."""

    culprit: int | None
    """Group rank; None: unknown."""
    text: str
    """The calls of the ranks, as far as they explain the failure; may be empty."""


class Inquiry:
    """The inquiry of one group. `ranks` are the numbers to show, by rank of the group."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], calls: Calls) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._calls = calls
        self._guard = threading.Lock()
        self._begun = False
        self._verdict: Verdict | None = None

    def mismatch(self, call: Call | None, culprit: int | None) -> Verdict | None:
        """Why the ranks disagree. `culprit`: the engine's. None: the Store does not answer."""
        return self._once(lambda: self._judge(call, culprit, _differing))

    def timeout(self, call: Call | None, culprit: int | None, text: str) -> Verdict | None:
        """The ranks that did not come to a call of this rank, which timed out. `text` tells other ranks of that."""
        explain = functools.partial(_left_over, self._rank) if call is not None and call.is_message else _absent
        return self._once(lambda: self._judge(call, culprit, explain, text))

    def abort(self, reason: str) -> None:
        """Tells the other ranks that this one aborts the group. To be called before the abort: those that hear of it
        find the reason, however late this rank is. A Store that does not answer is not waited for long."""
        self._once(lambda: self._agree(Verdict(self._rank, reason)))

    def aborted(self) -> Verdict | None:
        """The verdict of the rank that failed first; None if it gives none."""
        return self._once(self._await_verdict)

    @property
    def held(self) -> Verdict | None:
        """The verdict, if this rank has it already."""
        return self._verdict

    def _once(self, body: Any) -> Verdict | None:
        """Runs `body` at the first call. In a thread, because a Store whose process is frozen answers no call."""

        def run() -> None:
            with contextlib.suppress(RuntimeError, ValueError, KeyError):  # the Store is gone; it left half an answer
                self._verdict = body()

        with self._guard:
            if not self._begun:
                self._begun = True
                thread = threading.Thread(target=run, name="commlayer-inquiry", daemon=True)
                thread.start()
                for _ in range(VERDICT_LOOKS + ANSWER_LOOKS):
                    thread.join(LOOK_S)
            return self._verdict

    def _publish(self) -> None:
        calls = [
            {
                "number": call.sequence,
                "rank": call.rank,
                "tag": call.tag,
                "ordinal": call.ordinal,
                "nbytes": call.nbytes,
                "key": [call.name, str(call.dtype), call.reduction, call.rank, [*map(str, call.signed), *call.weights]],
                "elements": sum(map(math.prod, call.inputs or call.outputs)),
                "exchanged": call.exchanged,
                "text": f"{call.title()} {call.arguments(self._ranks)}".rstrip()
                + f" ({call.label})" * bool(call.label)
                + f" in {place}" * bool(place),
            }
            for call in list(self._calls.latest)
            for place in [place_of(call)]
        ]
        self._store.set(f"calls/{self._rank}", json.dumps(calls))

    def _judge(self, call: Call | None, culprit: int | None, explain: Any, text: str = "") -> Verdict:
        self._publish()
        asked = sorted({self._rank, *filter(None, [culprit]), *range(min(len(self._ranks), RANKS_MAX))})
        answers: dict[int, list[dict[str, Any]]] = {}
        for _ in range(ANSWER_LOOKS):
            if len(answers) == len(asked) or self._store.check(["verdict"]):
                break
            for rank in asked:
                if rank not in answers and self._store.check([f"calls/{rank}"]):
                    answers[rank] = json.loads(self._store.get(f"calls/{rank}"))
            time.sleep(LOOK_S)
        found = explain(call, culprit, answers, asked, self._ranks)
        return self._agree(dataclasses.replace(found, text="; ".join(filter(None, [text, found.text]))))

    def _agree(self, proposed: Verdict) -> Verdict:
        held = self._store.compare_set("verdict", "", json.dumps(dataclasses.asdict(proposed)))
        return Verdict(**json.loads(held))

    def _await_verdict(self) -> Verdict | None:
        self._publish()
        for _ in range(VERDICT_LOOKS):
            if self._store.check(["verdict"]):
                return Verdict(**json.loads(self._store.get("verdict")))
            time.sleep(LOOK_S)
        return None


def _differing(
    call: Call | None,
    culprit: int | None,
    answers: Mapping[int, Sequence[Mapping[str, Any]]],
    asked: Sequence[int],  # noqa: ARG001  # the explanations of a timeout use it
    ranks: Sequence[int],
) -> Verdict:
    """The first collective in which the ranks differ. The culprit is of the smallest party; of equal ones, of the one
    that is furthest from rank 0."""
    if call is not None and call.is_message:
        return Verdict(culprit, _unequal_message(answers, ranks) or _other_end(call, culprit, answers, ranks))
    calls = {rank: {heard["number"]: heard for heard in sent if heard["tag"] is None} for rank, sent in answers.items()}
    for number in sorted({number for of_rank in calls.values() for number in of_rank}):
        at = {rank: of_rank[number] for rank, of_rank in sorted(calls.items()) if number in of_rank}
        is_failed = call is not None and number == call.sequence
        parties: dict[str, list[int]] = {}
        for rank, heard in at.items():
            # Ranks may rightly have had unequal parts in earlier calls.
            sized = heard["key"][0] in SIZED or is_failed
            parties.setdefault(json.dumps([heard["key"], heard["elements"] if sized else None]), []).append(rank)
        if (found := _unequal(at, ranks)) is not None:
            return found
        if len(parties) > 1:
            told = [f"{name_ranks(party, ranks)} called {at[party[0]]['text']}" for party in parties.values()]
            smallest = min(parties.values(), key=lambda party: (len(party), -party[0]))
            return Verdict(smallest[0], "; ".join(told))
    if call is not None and call.exchanged is not None and culprit is not None and culprit not in answers:
        return Verdict(culprit, _own_lengths(call.exchanged, culprit, ranks))
    return Verdict(culprit, _unequal_message(answers, ranks))


def _unequal(at: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> Verdict | None:
    """The pairs of ranks of which one sends another length in this call than the other expects. The culprit is in most
    of them; of several such ranks, the sender of the first pair. None: no pair, or not calls of one kind."""
    given = {rank: Exchanged(*each["exchanged"]) for rank, each in at.items() if each["exchanged"]}
    if len({json.dumps(each["key"]) for each in at.values()}) > 1:
        return None
    told, named = [], []
    for source, target in itertools.permutations(given, 2):
        sent, expected = given[source].sent[target], given[target].received[source]
        if sent == expected:
            continue
        unit, size = given[source][2:]
        if given[target][2:] != (unit, size) or (sent or 0) % size or (expected or 0) % size:
            unit, size = "bytes", 1
        sends = f"{name_ranks([source], ranks)} sends {(sent or 0) // size} {unit}"
        told.append(f"{sends} to {name_ranks([target], ranks)}, which expects {(expected or 0) // size}")
        named += [source, target]
    if not told:
        return None
    call = next(iter(at.values()))["text"]
    more = f" and {len(told) - PAIRS_TOLD} more pairs" if len(told) > PAIRS_TOLD else ""
    text = f"in {call}, {', '.join(told[:PAIRS_TOLD])}{more}; make their lengths equal"
    return Verdict(max(named, key=named.count), text)


def _own_lengths(own: Exchanged, culprit: int, ranks: Sequence[int]) -> str:
    """What this rank exchanges with one that does not tell its lengths."""
    sent, received = ((each[culprit] or 0) // own.unit_bytes for each in own[:2])
    other = name_ranks([culprit], ranks)
    return (
        f"this rank sends {sent} {own.unit} to {other} and expects {received}, {other} has not told its lengths; "
        f"make their lengths equal"
    )


def _unequal_message(answers: Mapping[int, Sequence[Mapping[str, Any]]], ranks: Sequence[int]) -> str:
    """The two calls of a message that is not as long as its receiver wants it; empty: there is none."""
    for source, calls in sorted(answers.items()):
        for sent in (heard for heard in calls if heard["key"][0] == "send"):
            target = sent["rank"]
            for heard in answers.get(target, []):
                received = heard["key"][0], heard["rank"], heard["tag"], heard["ordinal"]
                if received == ("receive", source, sent["tag"], sent["ordinal"]) and heard["nbytes"] != sent["nbytes"]:
                    called = [(source, sent), (target, heard)]
                    return "; ".join(f"{name_ranks([rank], ranks)} called {each['text']}" for rank, each in called)
    return ""


def _left_over(
    own: int,
    call: Call | None,
    culprit: int | None,
    answers: Mapping[int, Sequence[Mapping[str, Any]]],
    asked: Sequence[int],  # noqa: ARG001  # as the other explanations
    ranks: Sequence[int],
) -> Verdict:
    """The culprit's messages from or to rank `own` that no call of that rank takes: their tags may be wrong."""
    if call is None or culprit is None or own not in answers:
        return Verdict(culprit, "")
    taken = {(heard["tag"], heard["ordinal"]) for heard in answers[own] if heard["key"][0] == call.name}
    other = "send" if call.name == "receive" else "receive"
    left = [
        heard["text"]
        for heard in answers.get(culprit, [])
        if heard["key"][0] == other and heard["rank"] == own and (heard["tag"], heard["ordinal"]) not in taken
    ]
    told = f"{name_ranks([culprit], ranks)} called {', '.join(left[-MESSAGES_TOLD:])}: other tags?" if left else ""
    return Verdict(culprit, told)


def _other_end(
    call: Call, culprit: int | None, answers: Mapping[int, Sequence[Mapping[str, Any]]], ranks: Sequence[int]
) -> str:
    """The latest message of the culprit with the tag of `call`."""
    if culprit is None:
        return ""
    matching = [heard["text"] for heard in answers.get(culprit, []) if heard["tag"] == call.tag]
    return f"{name_ranks([culprit], ranks)} called {matching[-1]}" if matching else ""


def _absent(
    call: Call | None,
    culprit: int | None,
    answers: Mapping[int, Sequence[Mapping[str, Any]]],
    asked: Sequence[int],
    ranks: Sequence[int],
) -> Verdict:
    """The ranks that did not come to `call`; the culprit is one of them."""
    if call is None:
        return Verdict(culprit, "")
    came = {
        rank
        for rank, calls in answers.items()
        if any(heard["tag"] is None and heard["number"] >= call.sequence for heard in calls)
    }
    absent = [rank for rank in asked if rank not in came]
    if not absent:
        return Verdict(culprit, ALL_CALLED)
    return Verdict(culprit if culprit in absent else absent[0], f"{name_ranks(absent, ranks)} did not call it")


def name_ranks(group_ranks: Sequence[int], ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2`: the numbers in `ranks` of these ranks of the group."""
    numbers = ", ".join(str(ranks[rank]) for rank in group_ranks)
    return f"rank{'s' * (len(group_ranks) > 1)} {numbers}"
