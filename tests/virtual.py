"""Virtual ranks: an encoded all-reduce within one thread, by the plans and the codecs of the engine.

The interpreter runs the plans with a fixed order of additions, so the result has the bits of the network's with
`deterministic=True`. tests/engine/test_encoded.py compares them. It can lose contributions; then the order is fixed for
two ranks only.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.plans import encoded
from commlayer.plans.codec import CODECS, Codec
from commlayer.plans.plan import Plan
from commlayer.plans.settings import Settings
from commlayer.transport import kernels
from commlayer.transport.base import Op
from tests.unit.plans import interpreter
from tests.unit.plans.interpreter import Place

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


START = Place(rank=0, block=0)


class Kernel(NamedTuple):
    """The engine's kernels of one codec, as a coder of the interpreter."""

    codec: Codec
    key: int = 0
    """The key of the operation: `codec_key`."""

    def encode(self, values: Array, place: Place = START) -> Bytes:
        """The values as bytes."""
        values = np.ascontiguousarray(values)
        encoded = np.empty(self.codec.encoded_bytes(values.nbytes), np.uint8)
        key = kernels.codec_key(self.key, place.rank)
        kernels.encode(
            self.codec.number, encoded.ctypes.data, values.ctypes.data, len(values), key=key, block=place.block
        )
        return encoded

    def decode(self, encoded: Bytes, count: int, place: Place = START, into: Array | None = None) -> Array:
        """The first `count` values; or `into`, to which they were added."""
        values = np.empty(count, np.float32) if into is None else into
        kernels.decode(
            self.codec.number,
            values.ctypes.data,
            encoded.ctypes.data,
            count,
            key=kernels.codec_key(self.key, place.rank),
            block=place.block,
            add=into is not None,
        )
        return values


class Reduced(NamedTuple):
    """The result of an encoded all-reduce."""

    total: Array
    """The sum or mean, the same on all ranks."""
    kept: list[Array]
    """The errors that each rank has to add to its next contribution, with `keep_errors`."""
    missing: list[list[tuple[int, int]]]
    """(offset, length) in bytes of each rank's lost contributions."""


@functools.lru_cache(maxsize=64)
def plans_of(
    hosts: tuple[tuple[int, ...], ...],
    numel: int,
    pair: tuple[str, str],
    divisor: int,
    keep_errors: bool,
    partial: bool = False,
) -> list[Plan]:
    """The plans of all ranks, as the engine's tests make them."""
    settings = Settings(codecs=pair, deterministic=not partial, keep_errors=keep_errors, partial=partial)
    return [encoded.all_reduce(rank, hosts, numel, 4, divisor, settings) for rank in range(sum(map(len, hosts)))]


def virtual_all_reduce(
    contributions: Sequence[Array],
    up: str,
    down: str,
    key: int,
    *,
    average: bool = True,
    keep_errors: bool = False,
    hosts: Sequence[Sequence[int]] | None = None,
    loss: float = 0.0,
) -> Reduced:
    """All-reduces the ranks' contributions, of which none is changed. `hosts`: by default one rank on each.

    `loss` is the probability that a part of a contribution is lost.
    """
    world, numel = len(contributions), len(contributions[0])
    places = tuple(map(tuple, hosts or [[rank] for rank in range(world)]))
    plans = plans_of(places, numel, (up, down), world if average else 1, keep_errors, loss > 0)
    sources = [np.array(contribution, order="C") for contribution in contributions]
    outputs = [np.empty_like(source) for source in sources]
    coders = {name: Kernel(CODECS[name], key) for name in (up, down)}
    missing = interpreter.run(plans, sources, outputs, Op.SUM, seed=key, loss=loss, coders=coders)
    if not all(np.array_equal(output.view("u4"), outputs[0].view("u4")) for output in outputs):
        raise RuntimeError("the virtual ranks disagree on the result: a defect of the plans or the codecs")
    kept = []
    for plan, source in zip(plans, sources, strict=True) if keep_errors else ():
        errors = np.zeros_like(source)
        for offset, length in plan.kept:
            part = slice(offset // 4, (offset + length) // 4)
            errors[part] = source[part]
        kept.append(errors)
    return Reduced(outputs[0], kept, missing)
