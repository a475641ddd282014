"""`Model`: predicts the step of each arm from the measured parts of the job's step (`headroom`).

Buckets are ready one after another in the backward pass, which takes two thirds of the computation. `StepModel`, the
model of `codec="auto"`, sends them:

    a bucket    latency of an operation + bytes x seconds per byte x the codec's share of them + coding
    a step      computation + time from the last bucket's start to the end of the network's work

With the overlap, buckets also travel during the next forward pass. The last one has the parameters that this pass needs
first, so its time stays. The step is the longest of computation and that bucket, the network's work, and the step
without overlap less a forward pass. A stale step does not wait for that bucket either.

The model ranks the arms; trials decide. It knows nothing of what competes for the cores, nor of ECMP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...compress.choice import StepModel
from ...compress.codec import codec_of
from ...compress.content import Candidate, Content, Load
from ...plans.codec import VALUE_BYTES
from ...plans.encoded import bytes_per_value
from ..headroom.split import Split
from .arm import Arm

FORWARD = 1 / 3
"""Share of the computation in the forward pass."""
SOCKETS_COST = 1.001
"""Nothing is known of paths, so an arm with more sockets is tried after its twin."""
CODING_NS = {"bf16": 0.8, "int8": 0.6, "int4-int8": 0.8, "int4": 1.0}
"""CPU time per value, of contribution and sum, encoded and decoded (docs/compression.md, AVX-512). Not measured here:
all hosts of a job must come to the same order of trials."""


@dataclass(frozen=True)
class Model:
    """The parts of a step, in seconds."""

    default_s: float
    """The step of the job as it is, measured."""
    computing_s: float
    nbytes: float
    """Bytes of gradients in a step, on one rank."""
    operations: float
    """Collectives in a step of the job as it is."""
    latency_s: float
    """The latency of one operation."""
    seconds_per_byte: float
    """Seconds per byte of gradients, as float32."""
    loss: float
    """Share of lost packets."""
    round_trip_s: float
    hosts: int

    @classmethod
    def of(cls, split: Split, hosts: int) -> Model:
        """The model from the parts of a job's step. Without a run on commlayer, its own backend's rate counts."""
        engine = split.engine
        step_s = split.as_is.median_s
        computing_s = min(split.left_out.median_s, step_s)
        nbytes = engine.nbytes if engine is not None else 0.0
        operations = max(1.0, engine.operations if engine is not None else 1.0)
        transfer_s = engine.transfer_s if engine is not None else split.all_s
        latency_s = min(split.latency_s or 0.0, 0.9 * transfer_s) / operations
        return cls(
            default_s=step_s,
            computing_s=computing_s,
            nbytes=nbytes,
            operations=operations,
            latency_s=latency_s,
            seconds_per_byte=(transfer_s - operations * latency_s) / nbytes if nbytes else 0.0,
            loss=max(split.tcp_loss, engine.loss if engine is not None else 0.0),
            round_trip_s=engine.round_trip_s if engine is not None else 0.0,
            hosts=hosts,
        )

    def seconds(self, arm: Arm) -> float:
        """The predicted step of an arm; that of the default is the measured one."""
        if arm.is_default:
            return self.default_s
        buckets = self._buckets(arm)
        busy_s = len(buckets) * self._bucket_s(buckets[-1])
        plain_s = self._plain_s(arm, buckets)
        if arm.staleness:
            step_s = max(self.computing_s, busy_s)
        elif arm.overlap:
            first_s = self.computing_s + self._bucket_s(buckets[-1])
            step_s = min(plain_s, max(first_s, busy_s, plain_s - FORWARD * self.computing_s))
        else:
            step_s = plain_s
        return step_s * (SOCKETS_COST if arm.ports > 1 else 1.0)

    def share(self, codec: str, *, partial: bool = False) -> float:
        """Bytes on the wire with a codec, in parts of those of float32. `partial`: gradients may be lost."""
        pair = codec_of(codec).pair
        return 1.0 if pair is None else bytes_per_value(pair[:2], self.hosts, partial=partial) / (2 * VALUE_BYTES)

    def bucket_count(self, arm: Arm) -> int:
        """Buckets of a step."""
        if not arm.bucket_mb:
            return max(1, round(self.operations))
        return max(1, math.ceil(self.nbytes / (arm.bucket_mb * 2**20)))

    def _bucket_s(self, load: Load) -> float:
        return load.bytes * self.seconds_per_byte + load.coding_s

    def _buckets(self, arm: Arm) -> list[Load]:
        """The work of each bucket."""
        count = self.bucket_count(arm)
        values = self.nbytes / VALUE_BYTES / count
        coding_s = CODING_NS.get(arm.codec, 0.0) * 1e-9 * values
        latency_s = self.latency_s
        if arm.loss_bound >= self.loss > 0:
            latency_s = max(0.0, latency_s - 2 * self.round_trip_s)  # nobody waits for packets sent again
        load = Load(self.nbytes / count * self.share(arm.codec, partial=arm.loss_bound > 0), coding_s + latency_s)
        return [load] * count

    def _plain_s(self, arm: Arm, buckets: list[Load]) -> float:
        count = len(buckets)
        backward_s = (1 - FORWARD) * self.computing_s
        starts_s = [FORWARD * self.computing_s + backward_s * (number + 1) / count for number in range(count)]
        content = Content(1, 1, 0)
        model = StepModel(
            candidates={arm.codec: Candidate(arm.codec, 1.0, 0.0)},
            loads=[{arm.codec: load} for load in buckets],
            contents=[content] * count,
            starts_s=starts_s,
            computing_s=self.computing_s,
            seconds_per_byte=self.seconds_per_byte,
            latency_s=0.0,
        )
        return model.seconds([arm.codec] * count)
