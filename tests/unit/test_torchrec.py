"""`commlayer.torchrec` by torchrec's protocol; examples/hosts/torchrec_job.py runs it under torchrec itself."""

import random

import pytest
import torch

from commlayer.errors import ConfigError
from commlayer.torchrec import Int8Rows


@pytest.mark.parametrize("width", [1, 8, 63, 64, 65, 128, 200])
def test_any_cut_at_whole_rows_decodes_to_the_same_values(width: int) -> None:
    """As in torchrec's all-to-all: one tensor is encoded, cut by `calc_quantized_size`, joined in another order."""
    draw, codec = random.Random(width), Int8Rows(width)
    rows = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    whole = codec.encode(rows)
    assert whole.dtype == codec.quantized_dtype
    assert whole.numel() == codec.calc_quantized_size(rows.numel())
    parts = [3, 0, 17, 20]
    cuts = whole.split([codec.calc_quantized_size(count * width) for count in parts])
    places = list(range(len(parts)))
    draw.shuffle(places)
    found = codec.decode(torch.cat([cuts[place] for place in places])).view(-1, width)
    expected = torch.cat([rows.split(parts)[place] for place in places])
    step = expected.abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)  # the scale is rounded up to bfloat16
    assert bool(((found - expected).abs() <= step * 0.5001).all())


def test_64_values_take_66_bytes() -> None:
    assert Int8Rows(128).calc_quantized_size(128 * 10) == 10 * 2 * 66
    assert Int8Rows(64).encode(torch.zeros(2, 64)).numel() == 2 * 66


def test_a_row_with_nan_spoils_no_other() -> None:
    rows = torch.ones(3, 8)
    rows[1, 2] = float("nan")
    found = Int8Rows(8).decode(Int8Rows(8).encode(rows)).view(3, 8)
    assert bool(found[1].isnan().all())
    torch.testing.assert_close(found[[0, 2]], torch.ones(2, 8), rtol=0.01, atol=0)


def test_types_shapes_and_a_default_device() -> None:
    codec = Int8Rows(4)
    rows = torch.tensor([[1.0, -1.0, 0.5, 0.0]], dtype=torch.bfloat16)
    with torch.device("meta"):
        assert codec.decode(codec.encode(rows)).device.type == "cpu"
    assert codec.decode(codec.encode(torch.empty(0, 4))).shape == (0,)
    turned = torch.arange(8.0).view(4, 2).t()  # not contiguous
    torch.testing.assert_close(codec.decode(codec.encode(turned)), turned.reshape(-1), rtol=0, atol=0.03)
    assert codec.padded_size(rows, [4, 8], 1, None) == (8, 0)


def test_bad_input_is_named() -> None:
    for width in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match=r"width=.*divides all widths"):
            Int8Rows(width)  # type: ignore[arg-type]
    codec = Int8Rows(8)
    with pytest.raises(ConfigError, match="12 values are no multiple of the width, 8"):
        codec.encode(torch.zeros(12))
    for encoded in (torch.zeros(67, dtype=torch.uint8), torch.zeros(66)):
        with pytest.raises(ConfigError, match="use the same codec on all ranks"):
            codec.decode(encoded)
