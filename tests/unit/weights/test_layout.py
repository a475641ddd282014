import json
from typing import Any

import pytest
import torch
from torch import nn

from commlayer.errors import ConfigError, MismatchError
from commlayer.weights.layout import DTYPES, Layout, overlaps, tensors_of, width_of


def test_values_of_a_width_lie_together_and_views_fit() -> None:
    tensors = {name: torch.zeros(3, 2).to(dtype) for name, dtype in DTYPES.items()} | {"scalar": torch.tensor(1)}
    layout = Layout.of(tensors)
    assert sum(tensor.nbytes for tensor in tensors.values()) == layout.bytes
    assert [region.width for region in layout.regions] == [8, 4, 2, 1]
    for before, after in zip(layout.regions, layout.regions[1:], strict=False):
        assert before.offset + before.width * before.values == after.offset
    memory = torch.zeros(layout.bytes, dtype=torch.uint8)
    for name, view in layout.views(memory).items():
        assert (view.dtype, view.shape) == (tensors[name].dtype, tensors[name].shape)
        region = next(part for part in layout.regions if part.width == width_of(name if name in DTYPES else "int64"))
        assert region.offset <= view.storage_offset() * view.itemsize < region.offset + region.width * region.values
        view.view(torch.uint8).add_(1) if view.dim() else view.fill_(0x0101010101010101)
    assert memory.eq(1).all()  # each byte belongs to one tensor


def test_a_layout_comes_back_from_its_text() -> None:
    tied = nn.Module()
    tied.first, tied.second = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.second.weight = tied.first.weight
    layout = Layout.of(tensors_of(tied))
    assert layout.bytes == 4 * (9 + 3 + 3)
    same = Layout.read(layout.text)
    assert (same.entries, same.offsets, same.fingerprint) == (layout.entries, layout.offsets, layout.fingerprint)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({}, "a layout is a list"),
        ([1], "an entry has a name"),
        ([["a", "float32", [2]]], "an entry has a name"),
        ([[1, "float32", [2], -1]], "an entry has a name"),
        ([["a", "float31", [2], -1]], "'a' is of the unknown type 'float31'"),
        ([["a", [], [2], -1]], "an entry has a name"),
        ([["a", {}, [2], -1]], "an entry has a name"),
        ([["a", "float32", 2, -1]], "'a' has no shape"),
        ([["a", "float32", [-2], -1]], "'a' has no shape"),
        ([["a", "float32", [True], -1]], "'a' has no shape"),
        ([["a", "float32", [2], 0]], "'a' has the memory of an unknown tensor"),
        ([["a", "float32", [2], -1], ["b", "float32", [3], 0]], "'b' has the memory of a tensor with another shape"),
        (
            [["a", "float32", [2], -1], ["b", "float32", [2], 0], ["c", "float32", [2], 1]],
            "'c' has the memory of a tensor with another shape",
        ),
        ([["a", "float32", [2], -1], ["b", "int32", [2], 0]], "'b' has the memory of a tensor with another shape"),
    ],
)
def test_other_texts_are_refused(entries: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Layout.read(json.dumps(entries).encode())


def test_bytes_that_are_no_json_are_refused() -> None:
    for text, why in ((b"", "Expecting value"), (b"\xff", "decode"), (b"[" * 100_000, "nested too deeply")):
        with pytest.raises(ValueError, match=why):
            Layout.read(text)


def test_differences_are_named() -> None:
    ours = Layout.of({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(MismatchError, match=r"b: float32\[4\] here, float32\[3\] there; c: float32\[1\] here, missing"):
        ours.check(Layout.of({"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(1)}), "here", "there")
    ours.check(Layout.of({"b": torch.zeros(3), "a": torch.zeros(2)}), "here", "there")


def test_other_than_dense_tensors_are_refused() -> None:
    for wrong in (torch.eye(3).to_sparse(), 3, torch.zeros(3, device="meta")):
        with pytest.raises(ConfigError, match="a is"):
            tensors_of({"a": wrong})  # type: ignore[dict-item]
    none: list[Any] = [[torch.ones(2)], None]
    for given in none:
        with pytest.raises(
            ConfigError, match=r"(list|NoneType): publish and apply take a model .* or a dict of tensors"
        ):
            tensors_of(given)


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


class Gathered(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **options).items()}


def test_entries_that_are_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^0\._extra_state of the model's state_dict\(\) is neither"):
        tensors_of(nn.Sequential(Extra(2, 2)))
    with pytest.raises(ConfigError, match=r"^weight of the model's"):
        tensors_of(Gathered(2, 2))
    normed = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    normed[1].weight, normed[1].bias = nn.Parameter(torch.zeros(4)[1:3]), nn.Parameter(torch.zeros(0))
    assert len(tensors_of(normed)) == 7


def test_ties_are_compared_by_name() -> None:
    one, two = torch.zeros(2), torch.zeros(2)
    ours = Layout.of({"a": one, "b": one, "c": two})
    ours.check_ties(Layout.of({"c": two, "b": one, "a": one}), "here", "there")
    with pytest.raises(MismatchError, match="b shares its memory with c here, with a there"):
        ours.check_ties(Layout.of({"a": one, "b": two, "c": two}), "here", "there")


def test_overlaps_are_found() -> None:
    memory = torch.zeros(20)
    tensors = {
        "a": memory[:10],
        "b": memory[2:4],
        "c": memory[5:7],
        "d": memory[10:],
        "e": memory[19:],
        "f": memory[:0],
    }
    assert overlaps(tensors) == [("a", "b"), ("a", "c"), ("d", "e")]
    assert overlaps({"a": memory, "b": torch.zeros(20)}) == []


def test_prefixes_of_wrappers_are_left_out() -> None:
    model = nn.Linear(2, 2)
    assert list(tensors_of(torch.compile(model))) == ["weight", "bias"]  # type: ignore[arg-type]
