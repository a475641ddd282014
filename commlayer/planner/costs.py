"""Costs of a model's layers and of the links between ranks: the input of every function of the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError
from ..scheduler.actions import Reduction
from ..scheduler.link import Discipline, Network
from ..scheduler.simulate import Simulation, StageCosts, simulate


def _check(owner: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{type(owner).__name__}.{name}={value} is not valid; give a finite number >= 0")


@dataclass(frozen=True)
class Layer:
    """One layer and one micro-batch on one rank, as measured.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    forward_s: float
    """Seconds of the forward pass."""
    backward_s: float
    """Seconds of the backward pass, without recomputation."""
    parameter_bytes: float
    """Bytes of the parameters; gradients are as large."""
    activation_bytes: float
    """Bytes kept from forward to backward."""
    output_bytes: float | None = None
    """Bytes of the output: sent if a stage ends here, kept under recomputation. None: `activation_bytes`."""
    update_s: float = 0.0
    """Seconds of the optimizer step, once a step."""

    def __post_init__(self) -> None:
        _check(self, [field.name for field in fields(self) if getattr(self, field.name) is not None])

    @property
    def sent_bytes(self) -> float:
        """Bytes that cross a stage boundary after this layer."""
        return self.activation_bytes if self.output_bytes is None else self.output_bytes

    def kept_bytes(self, recompute: bool) -> float:
        """Bytes kept from forward to backward: under recomputation of each layer (arXiv 1604.06174), its output."""
        return self.sent_bytes if recompute else self.activation_bytes


@dataclass(frozen=True)
class Link:
    """The outgoing link of every rank.

    Raises:
        ConfigError: a rate that is not above 0, or a negative latency.
    """

    rate_bps: float
    """Bits per second."""
    latency_s: float = 0.0
    """Seconds from departure to arrival."""

    def __post_init__(self) -> None:
        _check(self, ["latency_s"])
        if not self.rate_bps > 0:
            raise ConfigError(f"Link.rate_bps={self.rate_bps} is not above 0; give bits per second")

    def send_s(self, size: float) -> float:
        """Seconds that `size` bytes occupy the link."""
        return 8 * size / self.rate_bps

    def reduce_s(self, size: float, replicas: int) -> float:
        """Seconds that an all-reduce of `size` bytes between `replicas` occupies each rank's link.

        A rank sends 2 (d - 1) / d of the bytes, the least possible (Patarasuk and Yuan, doi
        10.1016/j.jpdc.2008.09.002).
        """
        return self.send_s(2 * (replicas - 1) / replicas * size)


@dataclass(frozen=True)
class Costs:
    """A model as a chain of layers, and the machine.

    Raises:
        ConfigError: no layers, or a negative value.
    """

    layers: Sequence[Layer]
    link: Link
    state_factor: float = 4.0
    """Bytes of memory per byte of parameters: weights, gradients and two moments of Adam in one precision make 4."""
    action_s: float = 0.0
    """Seconds of the interpreter for each forward and backward of a stage."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("Costs.layers is empty; give at least one Layer")
        _check(self, ["state_factor", "action_s"])

    def stage(
        self,
        first: int,
        end: int,
        *,
        replicas: int = 1,
        recompute: bool = False,
        speed: float = 1.0,
        send: Link | None = None,
        reduce: Link | None = None,
    ) -> StageCosts:
        """The layers from `first` up to `end` as a stage of the simulated pipeline.

        `speed`: of its rank, relative to the one on which the layers were measured. `send` and `reduce`: the links to
        the next stage and among the replicas; None: that of the costs.
        """
        layers = self.layers[first:end]
        forward_s = sum(layer.forward_s for layer in layers) / speed
        backward_s = sum(layer.backward_s for layer in layers) / speed
        return StageCosts(
            forward_s=forward_s,
            backward_s=backward_s + (forward_s if recompute else 0.0),
            send_s=(send or self.link).send_s(layers[-1].sent_bytes),
            reduce_s=(reduce or self.link).reduce_s(sum(layer.parameter_bytes for layer in layers), replicas),
            update_s=sum(layer.update_s for layer in layers) / speed,
            activation_bytes=sum(layer.kept_bytes(recompute) for layer in layers),
        )

    def memory_bytes(self, first: int, end: int, *, live: int, recompute: bool = False) -> float:
        """Bytes of a rank that holds the layers from `first` up to `end` and keeps `live` micro-batches of them.

        Under recomputation, one layer's activations exist in full on top.
        """
        layers = self.layers[first:end]
        working = max((layer.activation_bytes for layer in layers), default=0.0) if recompute else 0.0
        kept = sum(layer.kept_bytes(recompute) for layer in layers)
        return self.state_factor * sum(layer.parameter_bytes for layer in layers) + live * kept + working

    def simulate(
        self,
        schedule: Any,
        reduction: Reduction | None = None,
        *,
        replicas: int = 1,
        discipline: Discipline = "class",
        steps: int = 12,
    ) -> Simulation:
        """The predicted steps of `schedule`, where each layer is a stage, as `commlayer.pipeline.measure` returns them.

        `schedule` is one of torch, or a list of actions per rank; see `commlayer.scheduler.simulate`.
        """
        stages = [self.stage(index, index + 1, replicas=replicas) for index in range(len(self.layers))]
        network = Network(discipline, self.link.latency_s)
        return simulate(schedule, stages, reduction, network, action_s=self.action_s, steps=steps)
