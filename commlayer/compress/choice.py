"""`Choice`: the codec of each bucket for `codec="auto"`, from measured times.

The model of a step: the network carries one bucket after another, each from the moment the backward pass has made it.
The time from the last bucket's start to the end of the network's work is *waiting*: no computation hides it.

    finish(i) = max(finish(i - 1), start(i)) + bytes(i, codec) / rate + values(i) * coding time(codec)
    waiting   = finish(last) + late work + latency - start(last)

Late work is that of low-rank factors after the last bucket. `content.py` has the bytes, `link.py` rate and latency. The
part of the latency that the backward pass hides is taken off, so that the model agrees with the last measured steps.

Candidates are ordered by what they take from the gradient: float32, 16 bits, 8 bits, 4 and 8 bits, then codecs that
keep errors: 4 bits, low-rank factors, 1 bit. The first one with little waiting is chosen for all buckets, but none that
saves little over a milder one. With the last two a training needs more steps to the same loss (`Candidate.steps`), so
their steps count as longer than they are. Then every bucket, from the first on, gets the mildest candidate that does
not lengthen the step: early buckets travel while the backward pass still computes.

A link that has become fast looks like one with less latency, as long as short codes travel. So now and then some steps
try longer codes (`TRIAL`), as long as the time permits: if all of the busy time went with the bytes, trials would cost
`TRIAL_SHARE` of the time; and less after trials that changed nothing.

All ranks decide alike: they agree on the measurements first, by the largest of their values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .content import Candidate, Content, Load, load_of
from .link import DISTINCT, Link

Agree = Callable[[Sequence[float]], Sequence[float]]
"""Returns the largest of all ranks' values, one by one. Every rank must call it in the same steps."""

PERIOD = 20
"""Steps from one decision to the next."""
FIRST = 4
"""Steps before the first decision: DDP regroups its buckets in them."""
LITTLE_WAITING = 0.05
"""Share of a step: more is worth another codec."""
STATE_WAITING = 0.25
"""Share of a step: only more is worth a codec that keeps errors."""
WORTH = 0.05
"""Share of a step that a change must save; it keeps decisions from swinging with the noise of measurements."""
TOLERABLE = 1.02
"""Length of a step with milder codecs, over that with the current ones."""
TRIAL = 2
"""Steps of a trial of longer codes: the shortest one counts, as the first may make plans and memory."""
TRIAL_SHARE = 0.05
"""Share of the time that trials may cost."""
PATIENCE = 8
"""Trials that change nothing double the time to the next one, up to this factor."""
FELL = 0.8
"""Busy time of a period, over that of the last one with the same codecs: less is news, and ends the patience."""
FAST_BYTES_S = 1.25e9
"""10 Gbit/s: coding costs as much as it saves there, and no codec is chosen."""


class Bucket(NamedTuple):
    """The measurement of one bucket in one step; times count from the step's first bucket."""

    start_s: float
    end_s: float
    spans: list[tuple[float, float]]
    """(start, end) of its operations."""


@dataclasses.dataclass
class Decision:
    """The codecs from a step on, and the reason."""

    step: int
    codecs: list[str]
    rate_bytes_s: float
    """The rate measured while the network was busy."""
    latency_s: float
    """The latency measured per step."""
    waiting_s: float
    """The waiting measured per step."""
    step_s: float
    """The measured step."""
    predicted: dict[str, float]
    """Step time, in seconds, if all buckets had the same codec; by codec."""
    predicted_s: float
    """Step time with `codecs`."""
    why: str


@dataclasses.dataclass
class StepModel:
    """Predicts a step from agreed measurements."""

    candidates: Mapping[str, Candidate]
    loads: list[dict[str, Load]]
    """One load per bucket and codec."""
    contents: list[Content]
    starts_s: list[float]
    computing_s: float
    seconds_per_byte: float
    latency_s: float
    """The latency after the last bucket."""

    def fit(self, codecs: Sequence[str], measured_s: float) -> None:
        """Takes off the part of the latency that the backward pass has hidden in steps with these codecs."""
        hidden_s = self.seconds(codecs) - measured_s
        self.latency_s -= min(max(hidden_s, 0.0), self.latency_s)

    def seconds(self, codecs: Sequence[str]) -> float:
        """The length of a step."""
        finish_s, late_s = 0.0, self.latency_s
        for codec, start_s, loads in zip(codecs, self.starts_s, self.loads, strict=True):
            load = loads[codec]
            finish_s = max(finish_s, start_s) + load.bytes * self.seconds_per_byte + load.coding_s
            late_s += load.late_bytes * self.seconds_per_byte + load.late_coding_s
        return self.computing_s + max(finish_s + late_s - self.starts_s[-1], 0.0)

    def cost(self, codecs: Sequence[str]) -> float:
        """The length of a step, times the steps that the training needs."""
        pairs = zip(codecs, self.contents, strict=True)
        steps = sum(self.candidates[codec].steps * content.values for codec, content in pairs)
        return self.seconds(codecs) * steps / sum(content.values for content in self.contents)


class Choice:
    """Chooses codecs; one per HookState. `share` is (n-1)/n of n hosts: a rank sends this part of each value twice.

    `candidates` begin with `none` and `bf16`. `unavailable` has other codecs, and the reason.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        share: float,
        *,
        allow_state: bool,
        unavailable: Mapping[str, str] | None = None,
    ) -> None:
        self.candidates = [candidate for candidate in candidates if allow_state or not candidate.keeps_errors]
        forbidden = [candidate for candidate in candidates if candidate not in self.candidates]
        self.unavailable = {entry.codec: "needs Policy(allow_state=True)" for entry in forbidden}
        self.unavailable |= unavailable or {}
        self._by_name = {candidate.codec: candidate for candidate in candidates}
        self._share = share
        self._start = "bf16"  # used until the first decision: it has the range of float32
        self.codecs: list[str] = []
        """One per bucket; empty until the first decision, and after the buckets have changed."""
        self.decisions: list[Decision] = []
        self._link = Link()
        self._values: list[int] = []
        self._contents: list[Content] = []
        self._steps: list[tuple[float, list[Bucket], float]] = []  # length, buckets, seconds that the network was busy
        self._buckets: dict[int, Bucket] = {}
        self._noted: dict[int, Content] = {}
        self._begun_s: float | None = None
        self._since = 0
        self._trial: list[str] = []  # longer codecs, of the steps until the next decision
        self._patience = 1
        self._unspent_s = 0.0  # since the last trial
        self._steady_s = 0.0  # busy time of the last period whose codecs stayed; 0: none
        self._steady_length_s = 0.0  # of its steps

    def codec(self, index: int) -> str:
        """The codec of a bucket in this step."""
        codecs = self._trial or self.codecs
        return codecs[index] if index < len(codecs) else self._start

    def begin_step(self, step: int, now_s: float, agree: Agree) -> None:
        """Begins a step: takes the last one's measurements in and decides if it is time. All ranks call it alike.

        It is time after a period, and when a candidate may be chosen for the first time.
        """
        if self._begun_s is None:
            self._compare_restored(agree)
        elif self._noted:
            self._end_step(now_s - self._begun_s)
        self._begun_s, self._buckets = now_s, {}
        self._since += 1
        has_new = bool(self.decisions) and any(candidate.begins == step for candidate in self.candidates)
        steps = TRIAL - 1 if self._trial else PERIOD if self.decisions else FIRST
        if has_new or self._since > steps:
            self._since = 0
            self._decide(step, agree)

    def _compare_restored(self, agree: Agree) -> None:
        """Drops restored codecs in the first step unless all ranks have the same, as beside a rank that is new."""
        state = repr((self._values, self.codecs)).encode()
        own = float(
            int.from_bytes(hashlib.blake2b(state, digest_size=6).digest(), "little")
        )  # 48 bits: a float holds them
        most, least = agree([own, -own])
        if most != -least:
            self._values, self.codecs = [], []

    def note(self, index: int, content: Content, spans: Sequence[tuple[float, float]]) -> None:
        """Takes a bucket in: (start, end) of its operations, the first of which starts with the bucket. On any thread,
        before the next step begins."""
        begun_s = self._begun_s
        if begun_s is not None:
            self._noted[index] = content
            own = [(start_s - begun_s, end_s - begun_s) for start_s, end_s in spans]
            self._buckets[index] = Bucket(own[0][0], max(end_s for _, end_s in own), own)

    def _end_step(self, length_s: float) -> None:
        contents = [self._noted[index] for index in sorted(self._noted)]
        values = [content.values for content in contents]
        complete = sorted(self._buckets) == list(range(len(values)))
        if values != self._values or not complete:
            self._values, self._steps, self.codecs, self._trial = values, [], [], []
        else:
            used = [self.codec(i) for i in range(len(values))]
            coding_s = sum(self._load(*load).coding_s for load in zip(used, contents, strict=True))
            buckets = [self._buckets[i] for i in range(len(values))]
            busy_s = _busy_s(buckets)
            self._steps.append((length_s, buckets, max(busy_s - coding_s, busy_s / 2)))
        self._contents, self._noted = contents, {}

    def _load(self, codec: str, content: Content) -> Load:
        bytes_, coding_s, late_bytes, late_coding_s = load_of(
            self._by_name[codec], content, self._by_name[self._start].bytes_per_value
        )
        return Load(bytes_ * self._share, coding_s, late_bytes * self._share, late_coding_s)

    def _bytes(self, codecs: Sequence[str]) -> float:
        loads = [self._load(*pair) for pair in zip(codecs, self._contents, strict=True)]
        return sum(load.sent_bytes for load in loads)

    def _decide(self, step: int, agree: Agree) -> None:
        """Chooses the codecs of the next period, if there are measurements on every rank."""
        steps, self._steps = self._steps, []
        count = len(self._values)
        own = [1.0, 0.0, 0.0, 0.0, *[0.0] * count]
        if self._trial and steps:
            steps = [min(steps, key=lambda step: step[0])]
        if steps and count:
            length_s = statistics.median(length for length, _, _ in steps)
            waiting_s = statistics.median(
                max(b.end_s for b in buckets) - buckets[-1].start_s for _, buckets, _ in steps
            )
            busy_s = statistics.median(busy for _, _, busy in steps)
            starts = [statistics.median(buckets[i].start_s for _, buckets, _ in steps) for i in range(count)]
            own = [0.0, length_s, waiting_s, busy_s, *starts]
        lacking, length_s, waiting_s, busy_s, *starts = agree(own)
        tried = [self.codec(i) for i in range(count)]
        is_trial, self._trial = bool(self._trial), []
        current = [self.codec(i) for i in range(count)]
        if lacking or busy_s <= 0 or self._bytes(tried) <= 0:
            return
        sent_bytes = self._bytes(tried)
        self._link.measure(sent_bytes, busy_s, is_trial=is_trial)
        allowed = [candidate for candidate in self.candidates if candidate.begins <= step]
        seconds_per_byte, latency_s = self._link.seconds_per_byte, self._link.latency_s
        times = list(starts), max(length_s - waiting_s, 0.0), seconds_per_byte, latency_s
        model = StepModel(self._by_name, self._loads(), self._contents, *times)
        model.fit(tried, length_s)
        is_longer = self._bytes(tried) > self._bytes(current)
        if is_trial and is_longer and self._learn(current, tried, model, self._steady_length_s - length_s):
            model = StepModel(self._by_name, self._loads(), self._contents, *times)
            model.fit(tried, length_s)
        if sent_bytes / busy_s >= FAST_BYTES_S:
            codecs, why = ["none"] * count, "10 Gbit/s and more need no codec"
        else:
            codecs, why = _mildest(model, allowed)
        cost = model.cost(current)
        if codecs != current and model.cost(codecs) > (1 - WORTH) * cost:
            options = [codecs, *([entry.codec] * count for entry in allowed)]
            milder = (
                option
                for option in options
                if self._is_milder(option, current) and model.cost(option) <= TOLERABLE * cost
            )
            codecs, why = next(milder, current), f"a shorter code would save less than {WORTH:.0%}"
        self.codecs = codecs
        if not is_trial:
            self._unspent_s += PERIOD * length_s
        if codecs != current or busy_s < FELL * self._steady_s:
            self._patience = 1
        elif is_trial:
            self._patience = min(2 * self._patience, PATIENCE)
        if not is_trial:
            self._steady_s = busy_s if codecs == current else 0.0
            self._steady_length_s = length_s
            self._trial = self._tried(current, model.loads, allowed, busy_s) if codecs == current else []
        predicted = {candidate.codec: model.seconds([candidate.codec] * count) for candidate in self.candidates}
        measured = 1 / seconds_per_byte, latency_s, waiting_s, length_s
        self.decisions.append(Decision(step, codecs, *measured, predicted, model.seconds(codecs), why))

    def _loads(self) -> list[dict[str, Load]]:
        """The loads, by bucket and codec."""
        return [
            {candidate.codec: self._load(candidate.codec, content) for candidate in self.candidates}
            for content in self._contents
        ]

    def _learn(self, current: Sequence[str], tried: Sequence[str], model: StepModel, saved_s: float) -> bool:
        """Takes what a trial's steps saved, and the model does not explain, for coding time of the codecs left out.

        That was measured while the CPU was idle, and the operations of a codec take time, too. Returns whether it did.
        """
        unexplained_s = saved_s - (model.seconds(current) - model.seconds(tried))
        left = dict.fromkeys(current, 0)
        for before, now, content in zip(current, tried, self._contents, strict=True):
            left[before] += content.values * (before != now)
        values = sum(left.values())
        if unexplained_s <= WORTH * model.seconds(tried) or not values:
            return False
        for i, entry in enumerate(self.candidates):
            if left.get(entry.codec):
                self.candidates[i] = entry._replace(coding_s=entry.coding_s + unexplained_s / values)
        self._by_name |= {candidate.codec: candidate for candidate in self.candidates}
        return True

    def _tried(
        self, current: Sequence[str], loads: Sequence[Mapping[str, Load]], allowed: Sequence[Candidate], busy_s: float
    ) -> list[str]:
        """The longest codes that a trial may have now, of milder codecs on the first buckets; without any, 16 bits in
        place of 32, which cost nothing. Empty: no trial."""
        sent_bytes = self._bytes(current)
        rank = {entry.codec: place for place, entry in enumerate(self.candidates)}
        most_bytes = sent_bytes * (1 + TRIAL_SHARE * self._unspent_s / (TRIAL * busy_s * self._patience))
        found: list[str] = []
        found_bytes = DISTINCT * sent_bytes
        for codec in (entry.codec for entry in allowed):
            longer, bytes_ = list(current), sent_bytes
            for i, load in enumerate(loads):
                if rank[codec] < rank[current[i]]:
                    bytes_ += load[codec].sent_bytes - load[current[i]].sent_bytes
                    longer[i] = codec
                if found_bytes <= bytes_ <= most_bytes:
                    found, found_bytes = list(longer), bytes_
        if not found and self._unspent_s >= self._patience * PERIOD * self._steady_length_s:
            shorter = [self._start if rank[codec] < rank[self._start] else codec for codec in current]
            found = shorter if DISTINCT * self._bytes(shorter) <= sent_bytes else []
        if found:
            self._unspent_s = 0.0
        return found

    def _is_milder(self, codecs: Sequence[str], current: Sequence[str]) -> bool:
        """Whether these codecs take less from the gradients, of some buckets at least, and more from none."""
        order = [candidate.codec for candidate in self.candidates]
        return codecs != current and all(order.index(a) <= order.index(b) for a, b in zip(codecs, current, strict=True))

    def explain(self) -> str:
        """The last decision as a table."""
        if not self.decisions:
            return f"no decision yet: every bucket travels as {self._start}"
        last = self.decisions[-1]
        used = list(enumerate(zip(self._values, last.codecs, strict=True)))
        lines = [
            f"step {last.step}: {last.rate_bytes_s * 8e-6:.0f} Mbit/s measured, and {last.latency_s * 1e3:.1f} ms more",
            f"a step took {last.step_s * 1e3:.1f} ms, of which {last.waiting_s * 1e3:.1f} ms waiting",
            "all buckets as    bytes sent  predicted step",
            *(self._row(candidate, last) for candidate in self.candidates),
            *(f"{codec:16}  not chosen from: {reason}" for codec, reason in self.unavailable.items()),
            "bucket     values  codec         bytes sent",
            *(f"{i:6} {values:10}  {codec:12}{self._sent(i, codec):12.0f}" for i, (values, codec) in used),
            f"chosen: {last.why}; predicted step {last.predicted_s * 1e3:.1f} ms",
            *([f"trial of {TRIAL} steps: {', '.join(self._trial)}"] if self._trial else []),
        ]
        return "\n".join(lines)

    def _sent(self, index: int, codec: str) -> float:
        return self._load(codec, self._contents[index]).sent_bytes

    def _row(self, candidate: Candidate, last: Decision) -> str:
        row = (
            f"{candidate.codec:16}{self._bytes([candidate.codec] * len(self._contents)):12.0f}"
            f"{last.predicted[candidate.codec] * 1e3:12.1f} ms"
        )
        remarks = [
            *([f"counts {candidate.steps:g} times: more steps to the same loss"] if candidate.steps > 1 else []),
            *([f"from step {candidate.begins} on"] if candidate.begins > last.step else []),
        ]
        return "  ".join([row, "; ".join(remarks)]) if remarks else row

    def state_dict(self) -> dict[str, Any]:
        """The codecs in use, for a checkpoint."""
        return {"values": list(self._values), "codecs": list(self.codecs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`, before the first step: goes on with its codecs while the buckets are
        the same, if all of them are still candidates, and if every rank has taken over the same."""
        if {candidate.codec for candidate in self.candidates}.issuperset(state["codecs"]):
            self._values, self.codecs = list(state["values"]), list(state["codecs"])


def _mildest(model: StepModel, candidates: Sequence[Candidate]) -> tuple[list[str], str]:
    """The mildest codecs with little waiting, and the reason."""
    count = len(model.contents)
    chosen = candidates[0]
    for candidate in candidates:
        waiting = 1 - model.computing_s / model.seconds([chosen.codec] * count)
        if waiting <= (STATE_WAITING if candidate.keeps_errors else LITTLE_WAITING):
            break
        if model.cost([candidate.codec] * count) < (1 - WORTH) * model.cost([chosen.codec] * count):
            chosen = candidate
    codecs = [chosen.codec] * count
    shortest_s = model.seconds(codecs)
    waiting = 1 - model.computing_s / shortest_s
    why = f"the mildest with at most {LITTLE_WAITING:.0%} waiting"
    if waiting > LITTLE_WAITING:
        why = f"shorter codes would save less than {WORTH:.0%}, or keep errors; {waiting:.0%} of the step waits"
    order = [candidate.codec for candidate in candidates]
    for i in range(count):
        for codec in order[: order.index(chosen.codec)]:
            milder = [*codecs[:i], codec, *codecs[i + 1 :]]
            if model.seconds(milder) <= shortest_s * 1.001:
                codecs = milder
                break
    return codecs, why


def _busy_s(buckets: Sequence[Bucket]) -> float:
    """Seconds in which at least one bucket was on the network."""
    busy_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted(span for bucket in buckets for span in bucket.spans):
        busy_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return busy_s
