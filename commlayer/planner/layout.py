"""One way to lay a transformer over ranks: mesh, stages, replicas and experts; its exchanges and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from .exchange import Axis, Exchange, When
from .mesh import Mesh
from .transformer import Transformer

Outer = Literal["stages", "replicas"]
NO_MESH = Mesh()


@dataclass(frozen=True)
class Layout:
    """`mesh.ranks` x `stages` x `replicas` ranks. The ranks of a mesh have numbers in a row: they are neighbours."""

    mesh: Mesh = NO_MESH
    stages: int = 1
    """p, ranks of a pipeline, each with a part of the layers."""
    replicas: int = 1
    """d, copies that train on parts of the batch."""
    is_sharded: bool = False
    """Whether replicas keep 1/d of the parameters and gather the rest layer by layer (FSDP; ZeRO, arXiv 1910.02054)."""
    expert_ranks: int = 1
    """e, replicas among which the experts are divided; the tokens go to them."""
    batch: int = 1
    """Sequences of a micro-batch, on all ranks of a mesh together."""
    slices: int = 1
    """Parts of equal length of each sequence, which follow each other through the stages (TeraPipe, 2102.07988)."""
    kept: bool = True
    """Whether what a layer has gathered stays until its backward pass. False: gathered again. With `recompute` it stays
    from the second forward pass."""
    recompute: bool = False
    """Whether the backward pass repeats the forward of each layer (arXiv 1604.06174)."""
    outer: Outer = "stages"
    """The division whose parts are farthest from each other."""

    @property
    def ranks(self) -> int:
        """P."""
        return self.mesh.ranks * self.stages * self.replicas

    @property
    def stage_axis(self) -> Axis:
        """The ranks of one pipeline."""
        return Axis(self.stages, self.mesh.ranks * (self.replicas if self.outer == "stages" else 1))

    @property
    def replica_axis(self) -> Axis:
        """The ranks with the same part of the model."""
        return Axis(self.replicas, self.mesh.ranks * (1 if self.outer == "stages" else self.stages))

    @property
    def expert_axis(self) -> Axis:
        """The ranks that have all experts together."""
        return Axis(self.expert_ranks, self.replica_axis.stride)

    @property
    def copy_axis(self) -> Axis:
        """The ranks with the same experts."""
        return Axis(self.replicas // self.expert_ranks, self.replica_axis.stride * self.expert_ranks)

    def stage_of(self, rank: int) -> int:
        """The stage of a rank."""
        return rank // self.stage_axis.stride % self.stages

    def replica_of(self, rank: int) -> int:
        """The replica of a rank."""
        return rank // self.replica_axis.stride % self.replicas

    def refusal(self, model: Transformer) -> str:
        """The reason why the layout cannot run the model; empty: it can."""
        if self.recompute and not self.kept:
            return "recomputation gathers all again anyway"
        if self.stages > model.layers:
            return f"{model.layers} layers are fewer than {self.stages} stages"
        if model.sequences % self.batch:
            return f"{model.sequences} sequences are no multiple of micro-batches of {self.batch}"
        count = model.sequences // self.batch
        if count < self.replicas:
            return f"{count} micro-batches are fewer than {self.replicas} replicas"
        if (self.is_sharded or self.expert_ranks > 1 or self.stages > 1) and count % self.replicas:
            return f"{count} micro-batches are no multiple of {self.replicas} replicas"
        if self.replicas % self.expert_ranks or model.experts % self.expert_ranks:
            return (
                f"{model.experts} experts and {self.replicas} replicas cannot be divided by {self.expert_ranks} ranks"
            )
        if self.expert_ranks > 1 and self.mesh.ranks > 1:
            return "experts on ranks of their own and tensor parallelism exclude each other here"
        if self.mesh.is_grid and model.experts > 1:
            return f"{self.mesh.form} splits dense layers, and the model has {model.experts} experts"
        if self.mesh.is_grid and self.is_sharded:
            return f"{self.mesh.form} has no second sharding of its parameters here"
        if self.slices > 1 and (self.stages == 1 or self.mesh.is_grid or model.length % self.slices):
            return f"{self.slices} token slices need a pipeline, no grid, and a length that they divide"
        return self.mesh.refusal(model, self.batch)

    @property
    def gathers(self) -> bool:
        """Whether `kept` makes a difference."""
        return (self.is_sharded or self.mesh.is_grid) and not self.recompute

    def exchanges(self, model: Transformer) -> Iterator[Exchange]:
        """The exchanges of one layer: those of both passes of one micro-batch, and those of a step."""
        tokens = self.batch * model.length
        for exchange in self.mesh.exchanges(model, tokens, kept=self.kept):
            yield from self._repeated(exchange)
        for exchange in self._replicated(model):
            yield from self._repeated(exchange)
        if self.expert_ranks > 1:
            sent = model.top_k * tokens * model.width * model.value_bytes
            for _ in range(2):  # to the experts and back
                yield from self._repeated(Exchange("all_to_all", self.expert_axis, sent, "forward"))
                yield Exchange("all_to_all", self.expert_axis, sent, "backward")

    def _repeated(self, exchange: Exchange) -> Iterator[Exchange]:
        yield exchange
        if self.recompute and exchange.when == "forward":
            yield exchange

    def _replicated(self, model: Transformer) -> Iterator[Exchange]:
        for values, axis in (
            (model.dense_values // self.mesh.parts, self.replica_axis),
            (model.expert_values // (self.mesh.parts * self.expert_ranks), self.copy_axis),
        ):
            size = values * model.value_bytes
            if axis.size == 1 or size == 0:
                continue
            if not self.is_sharded:
                yield Exchange("all_reduce", axis, size, "step", is_parameters=True)
                continue
            yield Exchange("all_gather", axis, size, "forward", is_parameters=True)
            if not self.kept:
                yield Exchange("all_gather", axis, size, "backward", is_parameters=True)
            yield Exchange("reduce_scatter", axis, size, "backward", is_parameters=True)

    def boundary(self, model: Transformer, stage: int) -> Iterator[Exchange]:
        """What a stage receives with each micro-batch: the output of the stage before, and the next one's gradient.

        Each rank of a mesh sends its part. In 1-D the receivers gather the whole (Narayanan et al., 2104.04473).
        """
        whole = self.batch * model.length * model.width * model.value_bytes
        passes: tuple[tuple[When, bool], ...] = (("forward", stage > 0), ("backward", stage < self.stages - 1))
        for when, is_there in passes:
            if is_there:
                yield Exchange("send", self.stage_axis, whole // self.mesh.ranks, when)
                if self.mesh.form == "1-D":
                    yield Exchange("all_gather", Axis(self.mesh.side), whole, when)

    def received_bytes(self, model: Transformer, *, steps_only: bool = False) -> int:
        """Bytes that each rank receives for one layer and one micro-batch, without those between stages.

        `steps_only`: only those that travel once a step, however many micro-batches it has.
        """
        return sum(
            exchange.received_bytes for exchange in self.exchanges(model) if not steps_only or exchange.when == "step"
        )

    def live(self, stage: int, count: int) -> int:
        """Micro-batches of `count` whose activations a stage keeps at once: 1F1B's, with slices those of all, whose
        backward passes begin after the last forward pass (TeraPipe)."""
        return count if self.slices > 1 else min(count, self.stages - stage)

    def layer_bytes(self, model: Transformer, live: int) -> Fraction:
        """Memory that each further layer takes on a rank that keeps `live` micro-batches."""
        dense, experts = self._own_values(model)
        states = Fraction(dense + experts) / self.mesh.parts
        if self.is_sharded:
            states = (Fraction(dense, self.replicas) + Fraction(experts, self.copy_axis.size)) / self.mesh.parts
        found = model.state_bytes * states
        if self.is_sharded and self.kept and not self.recompute:
            found += model.value_bytes * Fraction(dense + experts, self.mesh.parts)
        kept = self._input_values(model) if self.recompute else self._kept_values(model)
        return found + live * model.value_bytes * kept

    def working_bytes(self, model: Transformer) -> Fraction:
        """Memory beside the layers': of the one that runs, what is gathered, and what is computed again."""
        tokens = self.batch * model.length
        values = Fraction(0)
        if self.recompute:
            values += self._kept_values(model)
        elif self.mesh.is_grid and not self.kept:
            values += max(self.mesh.panel_values(model, tokens))
        if self.is_sharded:  # two layers' parameters, as the next comes while one is used, and one's gradients
            values += (1 if self.kept and not self.recompute else 3) * Fraction(
                sum(self._own_values(model)), self.mesh.parts
            )
        return model.value_bytes * values

    def _own_values(self, model: Transformer) -> tuple[int, int]:
        return model.dense_values, model.expert_values // self.expert_ranks

    def _input_values(self, model: Transformer) -> Fraction:
        return Fraction(self.batch * model.length * model.width, self.mesh.ranks if self.mesh.is_grid else 1)

    def _kept_values(self, model: Transformer) -> Fraction:
        """Values of a micro-batch that a layer keeps on a rank from forward to backward."""
        tokens = self.batch * model.length
        if not self.mesh.is_grid:
            return tokens * (model.whole_values + Fraction(model.split_values, self.mesh.ranks))
        found = Fraction(tokens * (model.whole_values + model.split_values), self.mesh.ranks)
        return found + (sum(self.mesh.panel_values(model, tokens)) if self.kept else 0)

    @property
    def family(self) -> str:
        """The names of its parts: `1-D TP x PP`."""
        names = [f"{self.mesh.form} TP"] if self.mesh.ranks > 1 else []
        if self.stages > 1:
            names.append("PP with token slices" if self.slices > 1 else "PP")
        if self.expert_ranks > 1:
            names.append("EP")
        if self.is_sharded:
            names.append("FSDP")
        elif self.replicas > self.expert_ranks:
            names.append("DP")
        return " x ".join(names) or "one rank"

    def __str__(self) -> str:
        sizes = []
        if self.mesh.ranks > 1:
            dims = [self.mesh.side] * self.mesh.dimensions + [self.mesh.depth] * (self.mesh.depth > 1)
            sizes.append(f"{self.mesh.form} {'x'.join(map(str, dims))}")
        sizes += [f"{self.stages} stages"] * (self.stages > 1) + [f"{self.replicas} replicas"] * (self.replicas > 1)
        sizes += [f"experts on {self.expert_ranks}"] * (self.expert_ranks > 1) + ["sharded"] * self.is_sharded
        sizes += [f"micro-batches of {self.batch}"] + [f"{self.slices} slices"] * (self.slices > 1)
        sizes += ["gathered twice"] * (self.gathers and not self.kept) + ["recompute"] * self.recompute
        if self.stages > 1 and self.replicas > 1:
            sizes.append(f"{self.outer} outermost")
        return ", ".join(sizes)
