"""`Content`: how many values of a bucket travel in which form; `Candidate`: a codec, and its bytes for a bucket.

`codec="auto"` compares codecs by their bytes. With most codecs these depend on the number of values alone, with
low-rank factors on the shapes of the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .codec import Form, codec_of
from .fine import Fine, cut
from .powersgd import matrix_of


class Content(NamedTuple):
    """The values of a bucket, by form. All ranks have the same."""

    values: int
    coarse: int
    """Values that an ordinary codec encodes."""
    fine: int
    """Values in 16 bits beside an ordinary codec."""
    exact: int = 0
    """Gradients in 16 bits beside low-rank factors."""
    left: int = 0
    """Values of the left low-rank factors."""
    right: int = 0


def content_of(parameters: Sequence[Tensor], starts: Sequence[int], size: int, fine: Fine, rank: int) -> Content:
    """The content of a bucket of `size` values, where the gradient of parameters[i] begins at starts[i]. `rank` is that
    of low-rank factors."""
    coarse, in_16_bits = cut(parameters, starts, size, fine)
    exact = left = right = 0
    for parameter in parameters:
        shape = None if fine.is_given(parameter) else matrix_of(parameter.shape, rank)
        if shape is None:
            exact += parameter.numel()
        else:
            left, right = left + rank * shape[0], right + rank * shape[1]
    return Content(size, _length(coarse), _length(in_16_bits), exact, left, right)


def _length(stretches: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


class Candidate(NamedTuple):
    """A codec to choose from."""

    codec: str
    """A value of `Policy.codec`."""
    bytes_per_value: float
    """Bytes on the wire, of contributions and sums together; of low-rank factors, per value of theirs."""
    coding_s: float
    """CPU seconds per value of the gradient."""
    keeps_errors: bool = False
    steps: float = 1.0
    """Steps of a training to the same loss, in parts of those with float32."""
    begins: int = 0
    """The step of the training from which on it may be chosen."""


class Load(NamedTuple):
    """The work of a bucket."""

    bytes: float
    """Bytes sent as soon as the bucket is ready."""
    coding_s: float
    late_bytes: float = 0.0
    """Bytes sent after the last bucket."""
    late_coding_s: float = 0.0

    @property
    def sent_bytes(self) -> float:
        """All bytes."""
        return self.bytes + self.late_bytes


def load_of(candidate: Candidate, content: Content, fine_bytes: float) -> Load:
    """The work of a bucket with this codec. `fine_bytes` are those of a value in 16 bits, contribution and sum."""
    value_bytes = candidate.bytes_per_value
    form = codec_of(candidate.codec).form
    if form is Form.LOW_RANK:
        coding_s = candidate.coding_s * (content.values - content.exact)
        return Load(fine_bytes * content.exact + value_bytes * content.left, 0.0, value_bytes * content.right, coding_s)
    if form is Form.EXACT:
        return Load(value_bytes * content.values, 0.0)
    return Load(value_bytes * content.coarse + fine_bytes * content.fine, candidate.coding_s * content.values)
