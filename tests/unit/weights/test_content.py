import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights import content
from commlayer.weights.layout import Layout

LAYOUT = Layout.of({"a": torch.zeros(700, dtype=torch.bfloat16), "b": torch.zeros(90), "c": torch.zeros(5).bool()})
SEEDS = st.integers(0, 1 << 31)


def drawn(seed: int) -> torch.Tensor:
    return torch.randint(256, (LAYOUT.bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def changed(memory: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed + 1)
    return memory + (torch.rand(memory.shape, generator=chance) < share).to(torch.uint8)


@given(seed=SEEDS, share=st.sampled_from([0.0, 0.001, 0.02, 0.2]))
def test_a_difference_leads_there_and_back(seed: int, share: float) -> None:
    base = drawn(seed)
    after = changed(base, seed, share)
    code = content.encode(LAYOUT, base, after, content.room(LAYOUT))
    assert code is not None
    memory = base.clone()
    assert content.apply(LAYOUT, memory, code)
    assert torch.equal(memory, after)
    assert content.apply(LAYOUT, memory, code, is_back=True)
    assert torch.equal(memory, base)


@given(seed=SEEDS)
def test_a_difference_to_a_strange_state_is_longer_than_the_state(seed: int) -> None:
    assert content.encode(LAYOUT, drawn(seed), drawn(seed + 1), content.room(LAYOUT)) is None


@given(seed=SEEDS)
def test_a_damaged_code_is_safe_and_never_has_the_digest(seed: int) -> None:
    base, chance = drawn(seed), random.Random(seed)
    after = changed(base, seed, 0.05)
    code = bytearray(content.encode(LAYOUT, base, after, content.room(LAYOUT)) or b"")
    for _ in range(chance.randint(1, 4)):
        code[chance.randrange(len(code))] ^= 1 << chance.randrange(8)
    if chance.random() < 0.3:
        del code[chance.randrange(len(code)) :]
    memory = base.clone()
    is_code = content.apply(LAYOUT, memory, bytes(code))
    is_same = is_code and content.digest(LAYOUT, memory) == content.digest(LAYOUT, after)
    assert is_same == (is_code and torch.equal(memory, after))


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


@pytest.mark.parametrize("part_bytes", [1 << 16, 1 << 17, 1 << 18])
def test_each_part_has_a_tag_of_its_own(part_bytes: int) -> None:
    memory = torch.randint(256, (600_001,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    found = content.tags(memory, part_bytes)
    assert found == content.tags(memory.numpy().tobytes(), part_bytes) == content.tags(memory.numpy().data, part_bytes)
    parts = memory.split(part_bytes)
    assert b"".join(content.tags(part, part_bytes) for part in parts) == found
    assert len(found) == content.TAG_BYTES * len(parts)
    for place in (0, part_bytes - 1, 600_000):
        other = memory.clone()
        other[place] ^= 1
        changed = content.tags(other, part_bytes)
        at = place // part_bytes * content.TAG_BYTES
        assert changed[at : at + content.TAG_BYTES] != found[at : at + content.TAG_BYTES]
        assert changed[:at] + changed[at + content.TAG_BYTES :] == found[:at] + found[at + content.TAG_BYTES :]
    swapped = torch.cat([memory[1 << 16 : 1 << 17], memory[: 1 << 16], memory[1 << 17 :]])
    assert content.tags(swapped, part_bytes) != found
