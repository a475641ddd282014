"""Embeddings of torchrec in 8 bits: its exchanges take codecs, and this is commlayer's int8.

    from commlayer.torchrec import registry

    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry(width=64))

torchrec encodes what it sends in an all-to-all, whatever the backend. Its own int8 takes 1.25 bytes for a value; this
one takes 66 bytes for 64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError
from .plans.codec import CODECS
from .transport import kernels

_INT8 = CODECS["int8"]
OPERATIONS = ("POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL")
"""The operations of torchrec that send encoded values as they are. Its reduce-scatter adds them up on the way."""


class Int8Rows:
    """A `QuantizedCommCodec` of torchrec: each row is encoded by itself, so that any number of rows can be cut off.

    `width` is the number of values of a row, and divides the width of every table. 64 values take 66 bytes: a bfloat16
    scale, and a byte for each value, whose error is at most half a step of 1/127 of the largest (see
    docs/compression.md). A row whose width is no multiple of 64 is padded with zeros. A value that is not finite makes
    its 64 values NaN.
    """

    def __init__(self, width: int) -> None:
        """Raises ConfigError for a width that is no positive whole number."""
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ConfigError(f"torchrec codec: width={width!r}: use a positive whole number that divides all widths")
        self._width = width
        self._padded_width = -(-width // _INT8.block_values) * _INT8.block_values
        self._row_bytes = self._padded_width // _INT8.block_values * _INT8.block_bytes

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The type of encoded tensors."""
        return torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:  # noqa: ARG002
        """Bytes of `input_len` encoded values. Raises ConfigError unless these are whole rows."""
        if input_len % self._width:
            raise ConfigError(
                f"torchrec codec: {input_len} values are no multiple of the width, {self._width}: choose one that "
                f"divides the width of every table"
            )
        return input_len // self._width * self._row_bytes

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:  # noqa: ARG002
        """The bytes of a tensor of floating-point numbers and any shape, as one row of uint8 on its device."""
        nbytes = self.calc_quantized_size(input_tensor.numel())
        rows = input_tensor.detach().to("cpu", torch.float32).reshape(-1, self._width)
        padded = torch.nn.functional.pad(rows, (0, self._padded_width - self._width)).contiguous()
        encoded = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            kernels.encode(_INT8.number, encoded.data_ptr(), padded.data_ptr(), padded.numel())
        return encoded.to(input_tensor.device)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:  # noqa: ARG002
        """The values, float32, of encoded rows. Raises ConfigError unless these are whole rows of uint8."""
        if input_grad.dtype != torch.uint8 or input_grad.numel() % self._row_bytes:
            raise ConfigError(
                f"torchrec codec: cannot decode {input_grad.numel()} values of {input_grad.dtype}: a row of "
                f"{self._width} values has {self._row_bytes} bytes of torch.uint8; use the same codec on all ranks"
            )
        encoded = input_grad.detach().cpu().contiguous()
        padded = torch.empty(encoded.numel() // self._row_bytes, self._padded_width, device="cpu", dtype=torch.float32)
        if encoded.numel():
            kernels.decode(_INT8.number, padded.data_ptr(), encoded.data_ptr(), padded.numel())
        return padded[:, : self._width].reshape(-1).to(input_grad.device)

    def create_context(self) -> None:
        """None: nothing passes from the encoder to the decoder."""

    def padded_size(
        self,
        input_tensor: Tensor,  # noqa: ARG002
        dim_per_rank: list[int],
        my_rank: int,
        qcomm_ctx: None,  # noqa: ARG002
    ) -> tuple[int, int]:
        """The width of this rank's part, and the values by which torchrec is to pad it: none."""
        return dim_per_rank[my_rank], 0


def registry(width: int) -> dict[str, Any]:
    """A `qcomm_codecs_registry` for torchrec's sharders: int8 for embeddings and their gradients in all-to-alls.

    `width`: see `Int8Rows`. Raises ConfigError for a bad one, and ImportError without torchrec.
    """
    from torchrec.distributed.types import QuantizedCommCodecs  # torchrec is no dependency of commlayer

    return {name: QuantizedCommCodecs(Int8Rows(width), Int8Rows(width)) for name in OPERATIONS}
