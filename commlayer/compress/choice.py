"""`Choice`: the codec of each bucket for `codec="auto"`, from measured times.

The model of a step: the network carries one bucket after another, each from the moment the backward pass has made it.
The time from the last bucket's start to the end of the network's work is *waiting*: no computation hides it.

    finish(i) = max(finish(i - 1), start(i)) + bytes(i, codec) / rate + values(i) * coding time(codec)
    waiting   = finish(last) - start(last)

Candidates are ordered by what they take from the gradient: float32, 16 bits, 8 bits, 4 and 8 bits, then codecs that
keep errors. The first one with little waiting is chosen for all buckets, but none that saves little over a milder one.
Then every bucket, from the first on, gets the mildest candidate that does not lengthen the step: early buckets travel
while the backward pass still computes.

All ranks decide alike: they agree on the measurements first, by the largest of their values.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
FAST_BYTES_S = 1.25e9
"""10 Gbit/s: coding costs as much as it saves there, and no codec is chosen."""


class Candidate(NamedTuple):
    """A codec to choose from."""

    codec: str
    """A value of `Policy.codec`."""
    bytes_per_value: float
    """On the wire, of contributions and sums together."""
    coding_s: float
    """CPU seconds per value."""
    keeps_errors: bool = False


class Bucket(NamedTuple):
    """The measurement of one bucket in one step; times count from the step's first bucket."""

    start_s: float
    end_s: float


@dataclasses.dataclass
class Decision:
    """The codecs from a step on, and the reason."""

    step: int
    codecs: list[str]
    rate_bytes_s: float
    """Measured while the network was busy."""
    waiting_s: float
    """Measured, per step."""
    step_s: float
    """Measured."""
    predicted: dict[str, float]
    """Step time, in seconds, if all buckets had the same codec; by codec."""
    predicted_s: float
    """Step time with `codecs`."""
    why: str


class Choice:
    """Chooses codecs; one per HookState. `share` is (n-1)/n of n hosts: a rank sends this part of each value twice."""

    def __init__(self, candidates: Sequence[Candidate], share: float, *, allow_state: bool) -> None:
        self.candidates = [each for each in candidates if allow_state or not each.keeps_errors]
        self._by_name = {each.codec: each for each in candidates}
        self._share = share
        self._start = "bf16"  # until the first decision: it has the range of float32
        self.codecs: list[str] = []
        """By bucket; empty until the first decision, and after the buckets have changed."""
        self.decisions: list[Decision] = []
        self._values: list[int] = []
        self._used: dict[int, str] = {}
        self._steps: list[tuple[float, list[Bucket], float]] = []  # length, buckets, seconds per byte
        self._buckets: dict[int, Bucket] = {}
        self._sizes: dict[int, int] = {}
        self._begun_s: float | None = None
        self._since = 0

    def codec(self, index: int) -> str:
        """The codec of a bucket in this step."""
        codec = self.codecs[index] if index < len(self.codecs) else self._start
        self._used[index] = codec
        return codec

    def begin_step(self, step: int, now_s: float, agree: Agree) -> None:
        """Begins a step: takes the last one's measurements in and decides if it is time. All ranks call it alike."""
        if self._begun_s is not None and self._sizes:
            self._end_step(now_s - self._begun_s)
        self._begun_s, self._buckets = now_s, {}
        self._since += 1
        if self._since > (PERIOD if self.decisions else FIRST):
            self._since = 0
            self._decide(step, agree)

    def note(self, index: int, values: int, start_s: float, end_s: float) -> None:
        """Takes the times of a bucket in; on any thread, before the next step begins."""
        if self._begun_s is not None:
            self._sizes[index] = values
            self._buckets[index] = Bucket(start_s - self._begun_s, end_s - self._begun_s)

    def _end_step(self, length_s: float) -> None:
        sizes = [self._sizes[index] for index in sorted(self._sizes)]
        complete = sorted(self._buckets) == list(range(len(sizes)))
        if sizes != self._values or not complete:
            self._values, self._steps, self.codecs = sizes, [], []
        else:
            used = [self._used.get(i, self._start) for i in range(len(sizes))]
            sent = sum(map(self._bytes, used, sizes))
            coding_s = sum(self._by_name[codec].coding_s * values for codec, values in zip(used, sizes, strict=True))
            buckets = [self._buckets[i] for i in range(len(sizes))]
            busy_s = _busy_s(buckets)
            self._steps.append((length_s, buckets, max(busy_s - coding_s, busy_s / 2) / sent if sent else 0.0))
        self._sizes = {}

    def _bytes(self, codec: str, values: int) -> float:
        return self._by_name[codec].bytes_per_value * values * self._share

    def _decide(self, step: int, agree: Agree) -> None:
        """Chooses the codecs of the next period, if there are measurements on every rank."""
        steps, self._steps = self._steps, []
        count = len(self._values)
        own = [1.0, 0.0, 0.0, 0.0, *[0.0] * count]
        if steps and count:
            length_s = statistics.median(length for length, _, _ in steps)
            waiting_s = statistics.median(max(b.end_s for b in each) - each[-1].start_s for _, each, _ in steps)
            seconds_per_byte = statistics.median(each for _, _, each in steps)
            starts = [statistics.median(each[i].start_s for _, each, _ in steps) for i in range(count)]
            own = [0.0, length_s, waiting_s, seconds_per_byte, *starts]
        lacking, length_s, waiting_s, seconds_per_byte, *starts = agree(own)
        if lacking or seconds_per_byte <= 0:
            return
        current = [self._used.get(i, self._start) for i in range(count)]
        computing_s = max(length_s - waiting_s, 0.0)

        def predict(codecs: Sequence[str]) -> float:
            finish_s = 0.0
            for codec, start_s, values in zip(codecs, starts, self._values, strict=True):
                work_s = self._bytes(codec, values) * seconds_per_byte + self._by_name[codec].coding_s * values
                finish_s = max(finish_s, start_s) + work_s
            return computing_s + max(finish_s - starts[-1], 0.0)

        predicted = {each.codec: predict([each.codec] * count) for each in self.candidates}
        codecs, why = self._mildest(predict, predicted, computing_s, 1 / seconds_per_byte)
        now_s, then_s = predict(current), predict(codecs)
        if codecs != current and then_s > (1 - WORTH) * now_s:
            options = [codecs, *([each.codec] * count for each in self.candidates)]
            milder = (each for each in options if self._is_milder(each, current) and predict(each) <= TOLERABLE * now_s)
            codecs, why = next(milder, current), f"a shorter code would save less than {WORTH:.0%}"
            then_s = predict(codecs)
        self.codecs = codecs
        self.decisions.append(Decision(step, codecs, 1 / seconds_per_byte, waiting_s, length_s, predicted, then_s, why))

    def _is_milder(self, codecs: Sequence[str], current: Sequence[str]) -> bool:
        """Whether these codecs take less from the gradients, of some buckets at least, and more from none."""
        order = [each.codec for each in self.candidates]
        return codecs != current and all(order.index(a) <= order.index(b) for a, b in zip(codecs, current, strict=True))

    def _mildest(
        self,
        predict: Callable[[Sequence[str]], float],
        predicted: dict[str, float],
        computing_s: float,
        rate_bytes_s: float,
    ) -> tuple[list[str], str]:
        count = len(self._values)
        if rate_bytes_s >= FAST_BYTES_S:
            return ["none"] * count, "10 Gbit/s and more need no codec"
        chosen = self.candidates[0]
        for each in self.candidates:
            waiting = 1 - computing_s / predicted[chosen.codec]
            if waiting <= (STATE_WAITING if each.keeps_errors else LITTLE_WAITING):
                break
            if predicted[each.codec] < (1 - WORTH) * predicted[chosen.codec]:
                chosen = each
        waiting = 1 - computing_s / predicted[chosen.codec]
        why = f"the mildest with at most {LITTLE_WAITING:.0%} waiting"
        if waiting > LITTLE_WAITING:
            why = f"shorter codes would save less than {WORTH:.0%}, or keep errors; {waiting:.0%} of the step waits"
        codecs = [chosen.codec] * count
        order = [each.codec for each in self.candidates]
        shortest_s = predict(codecs)
        for i in range(count):
            for codec in order[: order.index(chosen.codec)]:
                milder = [*codecs[:i], codec, *codecs[i + 1 :]]
                if predict(milder) <= shortest_s * 1.001:
                    codecs = milder
                    break
        return codecs, why

    def explain(self) -> str:
        """The last decision as a table."""
        if not self.decisions:
            return f"no decision yet: every bucket travels as {self._start}"
        last = self.decisions[-1]
        lines = [
            f"step {last.step}: {last.rate_bytes_s * 8e-6:.0f} Mbit/s measured",
            f"a step took {last.step_s * 1e3:.1f} ms, of which {last.waiting_s * 1e3:.1f} ms waiting",
            "all buckets as    predicted step",
            *(f"{codec:16}  {seconds * 1e3:8.1f} ms" for codec, seconds in last.predicted.items()),
            "bucket     values  codec      bytes sent",
            *(
                f"{i:6} {values:10}  {codec:9}  {self._bytes(codec, values):10.0f}"
                for i, (values, codec) in enumerate(zip(self._values, last.codecs, strict=True))
            ),
            f"chosen: {last.why}; predicted step {last.predicted_s * 1e3:.1f} ms",
        ]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the codecs in use."""
        return {"values": list(self._values), "codecs": list(self.codecs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`: goes on with its codecs while the buckets are the same, and if all of
        them are still candidates."""
        if {each.codec for each in self.candidates}.issuperset(state["codecs"]):
            self._values, self.codecs = list(state["values"]), list(state["codecs"])


def _busy_s(buckets: Sequence[Bucket]) -> float:
    """Seconds in which at least one bucket was on the network."""
    busy_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted(buckets):
        busy_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return busy_s
