import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights import content
from commlayer.weights.layout import Layout
from commlayer.weights.parts import PART_LEAST_BYTES, PART_MOST_BYTES

LAYOUT = Layout.of({"a": torch.zeros(700, dtype=torch.bfloat16), "b": torch.zeros(90), "c": torch.zeros(5).bool()})
SEEDS = st.integers(0, 1 << 31)


def drawn(seed: int) -> torch.Tensor:
    return torch.randint(256, (LAYOUT.bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def changed(memory: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed + 1)
    return memory + (torch.rand(memory.shape, generator=chance) < share).to(torch.uint8)


def coded(base: torch.Tensor, after: torch.Tensor, layout: Layout = LAYOUT) -> list[bytes]:
    expected_bytes = content.estimate(layout, base, after, content.room())
    return list(content.encode(layout, base, after, "name", expected_bytes))


@given(seed=SEEDS, share=st.sampled_from([0.0, 0.001, 0.02, 0.2]))
def test_a_difference_leads_there_and_back(seed: int, share: float) -> None:
    base = drawn(seed)
    after = changed(base, seed, share)
    memory, fresh, code = base.clone(), drawn(seed + 2), coded(base, after)
    random.Random(seed).shuffle(code)  # each part stands for itself
    for piece in code:
        assert content.apply(LAYOUT, memory, piece)
        assert content.apply(LAYOUT, fresh, piece, base)
    assert torch.equal(memory, after)
    assert torch.equal(fresh, after)
    for piece in code:
        assert content.apply(LAYOUT, memory, piece, is_back=True)
    assert torch.equal(memory, base)


@given(seed=SEEDS)
def test_a_difference_to_a_strange_state_is_longer_than_the_state(seed: int) -> None:
    base, after = drawn(seed), drawn(seed + 1)
    assert content.estimate(LAYOUT, base, after, content.room()) >= LAYOUT.bytes
    assert sum(map(len, coded(base, after))) >= LAYOUT.bytes


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_parts_are_short_and_estimates_near_however_changes_lie(width: int) -> None:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    layout = Layout.of({"a": torch.zeros(6_000_000, dtype=dtype)})
    chance = torch.Generator().manual_seed(width)
    base = torch.randint(256, (layout.bytes,), generator=chance, dtype=torch.uint8)
    after = base.clone()
    dense = after[layout.bytes // 2 : layout.bytes * 3 // 4]  # a quarter is strange, the rest has few changes
    dense.copy_(torch.randint(256, dense.shape, generator=chance, dtype=torch.uint8))
    after[::4096] += 1
    code = coded(base, after, layout)
    size = sum(map(len, code))
    assert max(map(len, code)) < PART_MOST_BYTES + 100
    assert len(code) < 40 + size / PART_LEAST_BYTES * 3
    assert size / 4 < content.estimate(layout, base, after, content.room()) < size * 2
    memory = torch.empty_like(base)
    assert all(content.apply(layout, memory, piece, base) for piece in code)
    assert torch.equal(memory, after)


@given(seed=SEEDS)
def test_a_damaged_code_is_safe_and_never_has_the_digest(seed: int) -> None:
    base, chance = drawn(seed), random.Random(seed)
    after = changed(base, seed, 0.05)
    code = [bytearray(piece) for piece in coded(base, after)]
    number = chance.randrange(len(code))
    damaged = code[number]
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.3:
        del damaged[chance.randrange(len(damaged)) :]
    is_intact = content.is_intact(bytes(damaged), "name", number)
    memory = base.clone()
    is_code = all(content.apply(LAYOUT, memory, bytes(piece)) for piece in code)
    is_same = is_code and content.digest(LAYOUT, memory) == content.digest(LAYOUT, after)
    assert is_same == (is_code and torch.equal(memory, after))
    assert is_same or not is_intact


def test_a_part_of_a_code_is_itself() -> None:
    (piece, *_) = coded(drawn(1), drawn(2))
    assert content.is_intact(piece, "name", 0)
    assert not content.is_intact(piece, "name", 1)
    assert not content.is_intact(piece, "nama", 0)
    assert not content.is_intact(bytes(len(piece)), "name", 0)
    assert not content.is_intact(piece[:24], "name", 0)
    assert not content.apply(LAYOUT, drawn(1), piece[:24])


def test_digests_tell_values_and_names_apart() -> None:
    memory = drawn(1)
    found = {content.digest(LAYOUT, memory)}
    for at in (0, 1, 699, LAYOUT.bytes - 1):
        other = memory.clone()
        other[at] ^= 1
        found.add(content.digest(LAYOUT, other))
    renamed = Layout([entry._replace(name=entry.name + "2") for entry in LAYOUT.entries])
    found.add(content.digest(renamed, memory))
    assert len(found) == 6
    assert content.digest(LAYOUT, memory.clone()) in found


def test_a_copy_between_lengths_is_refused() -> None:
    for source in (torch.zeros(4, dtype=torch.uint8), memoryview(b"12"), torch.zeros(3)):
        with pytest.raises(ValueError, match="for a place of 3"):
            content.copy(torch.zeros(3, dtype=torch.uint8), source)


@given(size=st.integers(0, 9 << 20))
def test_parts_cover_a_state(size: int) -> None:
    whole = content.Whole(torch.empty(size, dtype=torch.uint8))
    spans = [whole.span(number) for number in range(whole.parts)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans)][: len(spans)]
    assert not spans or spans[-1].stop == size
    assert all(0 < span.stop - span.start <= PART_LEAST_BYTES for span in spans)
    for wrong in (-1, whole.parts):
        with pytest.raises(ValueError, match=f"part {wrong} of {whole.parts}"):
            whole.span(wrong)


def test_each_part_has_a_tag_of_its_own() -> None:
    memory = torch.randint(256, (600_001,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    whole = content.Whole(memory)
    found = b"".join(whole.tags("name"))
    assert len(found) == content.TAG_BYTES * whole.parts
    assert len({found[at : at + 8] for at in range(0, len(found), 8)}) == whole.parts
    for number in range(whole.parts):
        assert content.tag(memory[whole.span(number)], "name", number) == found[8 * number : 8 * number + 8]
    for place in (0, 65_535, 600_000):
        other = memory.clone()
        other[place] ^= 1
        changed = b"".join(content.Whole(other).tags("name"))
        assert sum(found[at : at + 8] != changed[at : at + 8] for at in range(0, len(found), 8)) == 1
    assert b"".join(whole.tags("other")) != found
