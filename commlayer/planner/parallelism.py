"""Which model parallelism: step, memory and bytes of every layout on a cluster, the fastest, and why not the others.

docs/parallelism.md has the model and the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..config import whole
from ..errors import ConfigError
from .cluster import Cluster, Links, Rank
from .layout import Layout, Outer
from .mesh import Form, Mesh
from .plan import seconds
from .prediction import Prediction, TooLarge, predict
from .search import unbeaten
from .transformer import Transformer

FAMILIES = ("DP", "FSDP", "PP", "PP with token slices", "1-D TP", "2-D TP", "2.5-D TP", "3-D TP", "EP")
"""The parallelisms by themselves. Others are named by their parts: `1-D TP x PP`."""
_FORMS: tuple[Form, ...] = ("1-D", "2-D", "2.5-D", "3-D")


@dataclass(frozen=True)
class Family:
    """The best layout of one parallelism or combination."""

    name: str
    best: Prediction | None
    """None: no layout runs the model."""
    reason: str
    """Why the winner is better, in a sentence; for the winner, what its step consists of."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Parallelisms:
    """What `parallelism` returns."""

    best: Prediction
    """The fastest; of equally fast ones, that with the least memory."""
    frontier: tuple[Prediction, ...]
    """The predictions that no other beats in step time and memory, by step time."""
    families: tuple[Family, ...]
    """The winner's first, then by the step of their best; at last those that cannot run."""
    tried: int = field(repr=False)
    """Layouts that were predicted, or did not fit."""


def parallelism(
    model: Transformer,
    hosts: Sequence[Sequence[Rank]],
    links: Links,
    *,
    slices: Sequence[int] = (2, 4, 8, 16),
    families: Iterable[str] | None = None,
) -> Parallelisms:
    """Compares all ways to divide `model` among the ranks of `hosts`.

    Tried are all products of a mesh, stages and replicas; both orders of stages and replicas over the hosts; FSDP and
    experts; micro-batches that divide the batch; panels kept or gathered twice; recomputation on or off. Within each,
    the layers are divided among the stages exactly, by speed and memory; replicas without stages get micro-batches by
    their speed. The hosts are taken in their order.

    Args:
        hosts: the ranks of each host; they may be unequal.
        slices: numbers of token slices that are tried with pipelines.
        families: names as in `Family.name`; only these are tried. None: all.

    Raises:
        ConfigError: bad numbers, an unknown family, families none of which can run (the error says why), or no layout
            within the memory (the error names the layout that comes nearest).
    """
    for place, length in enumerate(slices):
        if whole(length, 0) < 2:
            raise ConfigError(f"slices[{place}]={length} is not valid; give whole numbers of at least 2, or none")
    cluster = Cluster(hosts, links)
    wanted = None if families is None else set(families)
    _check_families(wanted)
    refused = _unshaped(model, len(cluster.ranks))
    nearest: TooLarge | None = None
    too_large: dict[str, TooLarge] = {}
    found: list[Prediction] = []
    tried = 0
    for layout in layouts(model, len(cluster.ranks), sorted(set(slices))):
        family = layout.family
        if wanted is not None and family not in wanted:
            continue
        reason = layout.refusal(model)
        if reason:
            refused.setdefault(family, reason)
            continue
        tried += 1
        result = predict(model, cluster, layout)
        if isinstance(result, Prediction):
            found.append(result)
            continue
        too_large[family] = min(too_large.get(family, result), result, key=lambda layout: layout.ratio)
        if nearest is None or result.ratio < nearest.ratio:
            nearest = result
    if not found and nearest is not None:
        raise ConfigError(
            f"memory_bytes={cluster.memory_bytes:.0f} is too small for any layout: {nearest}; give more memory or"
            " ranks, or shorter sequences"
        )
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items() if wanted is None or name in wanted)
        raise ConfigError(f"no layout divides the model among {len(cluster.ranks)} ranks: {reasons or 'none of these'}")
    found.sort(key=_order)
    frontier = tuple(
        found[i] for i in unbeaten([(prediction.step_s, prediction.memory_bytes, 0.0) for prediction in found])
    )
    return Parallelisms(found[0], frontier, tuple(_families(found, too_large, refused, wanted)), tried)


def layouts(model: Transformer, ranks: int, slices: Sequence[int]) -> Iterator[Layout]:
    """All layouts of `ranks` ranks, also those that refuse the model."""
    for mesh in _meshes(ranks):
        rest = ranks // mesh.ranks
        for stages in _divisors(rest):
            shape = Layout(mesh, stages, rest // stages)
            for layout in _shared(model, shape):
                for batch in _divisors(model.sequences):
                    for cut in (1, *slices) if stages > 1 else (1,):
                        yield from _remembered(replace(layout, batch=batch, slices=cut))


def _meshes(ranks: int) -> Iterator[Mesh]:
    yield Mesh()
    for size in _divisors(ranks)[1:]:
        for form in _FORMS:
            for depth in _divisors(size)[1:] if form == "2.5-D" else (1,):
                try:
                    yield Mesh.of(form, size, depth)
                except ConfigError:
                    continue


def _shared(model: Transformer, shape: Layout) -> Iterator[Layout]:
    """`shape` with both orders, with and without FSDP, and its ways to place experts."""
    alone = shape.replicas == 1 or shape.stages == 1
    orders: tuple[Outer, ...] = ("stages",) if alone else ("stages", "replicas")
    for outer in orders:
        for is_sharded in (False, True) if shape.replicas > 1 and not shape.mesh.is_grid else (False,):
            for expert_ranks in _divisors(shape.replicas) if model.experts > 1 and shape.mesh.ranks == 1 else (1,):
                yield replace(shape, outer=outer, is_sharded=is_sharded, expert_ranks=expert_ranks)


def _remembered(layout: Layout) -> Iterator[Layout]:
    yield layout
    if layout.gathers:
        yield replace(layout, kept=False)
    yield replace(layout, recompute=True)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _unshaped(model: Transformer, ranks: int) -> dict[str, str]:
    """Why parallelisms by themselves do not exist for so many ranks."""
    found = {}
    if ranks == 1:
        return {}
    for form in _FORMS:
        try:
            if form != "2.5-D" or not any(mesh.form == form and mesh.ranks == ranks for mesh in _meshes(ranks)):
                Mesh.of(form, ranks, 2 if form == "2.5-D" else 1)
        except ConfigError as error:
            found[f"{form} TP"] = str(error)
    if model.experts == 1:
        found["EP"] = "the model has one expert"
    return found


def _check_families(wanted: set[str] | None) -> None:
    known = {*FAMILIES, "one rank"}
    for family in wanted or ():
        unknown = [part for part in family.split(" x ") if part not in known]
        if unknown:
            raise ConfigError(f"families: {unknown[0]!r} is unknown; combine {', '.join(FAMILIES)} as 1-D TP x PP")


def _order(prediction: Prediction) -> tuple[float, float, str]:
    return float(f"{prediction.step_s:.9g}"), prediction.memory_bytes, str(prediction.layout)


def _families(
    found: Sequence[Prediction], too_large: dict[str, TooLarge], refused: dict[str, str], wanted: set[str] | None
) -> Iterator[Family]:
    seen: dict[str, Prediction] = {}
    for prediction in found:
        seen.setdefault(prediction.layout.family, prediction)
    best = found[0]
    for name, prediction in seen.items():
        yield Family(name, prediction, _parts(best) if prediction is best else _reason(prediction, best))
    for name, large in sorted(too_large.items(), key=lambda item: item[1].ratio):
        if name not in seen:
            yield Family(name, None, f"does not fit: {large}")
    for name, why in refused.items():
        if name not in seen and name not in too_large and (name in FAMILIES if wanted is None else name in wanted):
            yield Family(name, None, f"cannot run: {why}")


def _parts(best: Prediction) -> str:
    named = [f"{name} {seconds(value)}" for name, value in best.parts.items() if value > 0.005 * best.step_s]
    return f"the fastest, {seconds(best.step_s)}: {', '.join(named)}"


def _reason(own: Prediction, best: Prediction) -> str:
    """Why `best` comes before `own`: the part of the step that is larger by most."""
    ratio = own.step_s / best.step_s
    if ratio < 1 + 1e-6:
        return "as fast as the winner" + (", with more memory" if own.memory_bytes > best.memory_bytes else "")
    name = max(own.parts, key=lambda part: own.parts[part] - best.parts[part])
    digits = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return f"{digits}x the winner's step: {name} {seconds(own.parts[name])} for {seconds(best.parts[name])}"


__all__ = ["FAMILIES", "Family", "Parallelisms", "layouts", "parallelism"]
