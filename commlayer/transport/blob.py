"""A list of values as one: descriptions of processes are alike, so they shrink to a tenth together."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence

from ..errors import CommError


def pack(values: Sequence[bytes]) -> bytes:
    """The values, compressed."""
    lengths = struct.pack(f"<I{len(values)}I", len(values), *map(len, values))
    return zlib.compress(lengths + b"".join(values))


def unpack(packed: bytes) -> list[bytes]:
    """The values again. Raises CommError for bytes that `pack` has not made."""
    try:
        plain = zlib.decompress(packed)
        (count,) = struct.unpack_from("<I", plain)
        lengths = struct.unpack_from(f"<{count}I", plain, 4)
    except (zlib.error, struct.error) as error:
        raise CommError(
            f"an entry of the job's Store is damaged ({error}): another version of commlayer, or another program, has "
            f"written it; install the same version on all ranks"
        ) from error
    starts = [0, *itertools.accumulate(lengths)]
    body = plain[4 + 4 * count :]
    return [body[start:end] for start, end in itertools.pairwise(starts)]
