import struct

import pytest
import torch

from commlayer.errors import MismatchError
from commlayer.weights import content
from commlayer.weights.answer import Arrival, Departure
from commlayer.weights.held import Held, Pool
from commlayer.weights.layout import Layout
from commlayer.weights.message import ANSWER_MAX_BYTES, DIFFERENCE, PART, PART_BYTES, WHOLE, Head

LAYOUT = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(7, dtype=torch.int64)})
TIED = torch.zeros(5)


def held(layout: Layout, version: int, seed: int) -> Held:
    memory = torch.randint(9, (layout.bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Held(version, content.digest(layout, memory), memory, layout)


def messages(departure: Departure) -> list[list[bytes]]:
    found = []
    while departure.message is not None:
        found.append([bytes(frame) for frame in departure.message])
        departure.advance()
    return found


def whole(state: Held, *, has_layout: bool = True) -> tuple[Head, list[list[bytes]]]:
    text = state.layout.text if has_layout else b""
    fingerprint = state.layout.fingerprint
    head = Head(4, "life", state.version, state.digest, fingerprint, -1, len(text), state.layout.bytes)
    return head, messages(Departure(WHOLE, head, text, state.memory.numpy().data, state))


def add(arrival: Arrival, parts: list[list[bytes]]) -> None:
    for _, place, part in parts:
        arrival.add(place, memoryview(part))


def filled(arrival: Arrival, parts: list[list[bytes]]) -> Held | None:
    assert {part[0] for part in parts} == {PART}
    assert not arrival.is_complete
    add(arrival, parts)
    assert arrival.is_complete
    return arrival.result()


def test_a_whole_state_comes_in_short_parts() -> None:
    state = held(LAYOUT, 3, 1)
    head, sent = whole(state)
    assert max(len(frame) for message in sent for frame in message) == PART_BYTES < ANSWER_MAX_BYTES
    found = filled(Arrival(WHOLE, Head.read(sent[0][1]), None, None), sent[1:])
    assert found is not None
    assert torch.equal(found.memory, state.memory)
    assert (found.version, found.digest, found.layout.entries) == (3, state.digest, LAYOUT.entries)
    assert head.layout == found.layout.fingerprint


def test_a_difference_comes_in_parts() -> None:
    base, after = held(LAYOUT, 3, 1), held(LAYOUT, 4, 1)
    after.memory[::3000] += 1
    digest = content.digest(LAYOUT, after.memory)
    code = content.encode(LAYOUT, base.memory, after.memory, content.room(LAYOUT))
    assert code is not None
    head = Head(4, "life", 4, digest, LAYOUT.fingerprint, 3, 0, len(code))
    pool = Pool(LAYOUT.bytes)
    for wrong in (False, True):
        arrival = Arrival(DIFFERENCE, head, base, pool)
        found = filled(arrival, messages(Departure(DIFFERENCE, head, b"", code, None))[1:])
        assert (found is None) == wrong
        if found is not None:
            assert torch.equal(found.memory, after.memory)
        base.memory[5] ^= 1  # damage: the next one is not taken


def test_a_difference_in_another_layout_is_refused() -> None:
    base = held(LAYOUT, 3, 1)
    larger = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(9_000, dtype=torch.int64)})
    head = Head(4, "life", 4, "digest", larger.fingerprint, 3, len(larger.text), 9)
    with pytest.raises(ValueError, match="of another layout"):
        Arrival(DIFFERENCE, head, base, Pool(LAYOUT.bytes))
    with pytest.raises(ValueError, match="of another layout"):
        Arrival(DIFFERENCE, head, None, None)


def test_a_state_in_another_layout_has_blocks_of_its_own() -> None:
    tied, free = Layout.of({"a": TIED, "b": TIED}), Layout.of({"a": torch.zeros(5), "b": torch.zeros(5)})
    pool = Pool(tied.bytes)
    pool.give(torch.zeros(tied.bytes, dtype=torch.uint8))
    state = held(free, 2, 1)
    arrival = Arrival(WHOLE, whole(state)[0], held(tied, 1, 1), pool)
    found = filled(arrival, whole(state)[1][1:])
    assert found is not None
    assert len(found.memory) == free.bytes == 2 * tied.bytes
    assert arrival.pool is not pool


def test_other_tensors_are_refused_before_their_values_come() -> None:
    _, sent = whole(held(Layout.of({"c": TIED}), 2, 1))
    arrival = Arrival(WHOLE, Head.read(sent[0][1]), held(LAYOUT, 1, 1), Pool(LAYOUT.bytes))
    with pytest.raises(MismatchError, match="c: float32"):
        filled(arrival, sent[1:2])


def test_damaged_answers_are_refused() -> None:
    state = held(LAYOUT, 3, 1)
    head, sent = whole(state)
    parts = sent[1:]
    for wrong in (
        [parts[1]],  # not the first
        [parts[0], parts[0]],
        [parts[0], parts[2]],
        [*parts, [PART, struct.pack("<QQ", 4, len(parts)), b"x"]],
        [[PART, b"short", b"x"]],
        [[PART, parts[0][1], b""]],
        [[PART, parts[0][1], parts[0][2] + b"x"]],
        [[PART, parts[0][1], b"[" * len(parts[0][2])]],
        [[PART, parts[0][1], parts[0][2].replace(b"300000", b"300001")]],
        [*parts[:-1], [PART, parts[-1][1], parts[-1][2] + b"x"]],
    ):
        arrival = Arrival(WHOLE, head, None, None)
        with pytest.raises(ValueError, match=r"."):
            add(arrival, wrong)
    for kind, changed in (
        (b"what", {}),
        (WHOLE, {"layout_bytes": 0}),
        (DIFFERENCE, {"layout_bytes": -1}),
    ):
        with pytest.raises(ValueError, match=r"."):
            Arrival(kind, Head(**(vars(head) | changed)), None, None)
    for size in (LAYOUT.bytes - 1, -1):
        with pytest.raises(ValueError, match="bytes of a state of"):
            Arrival(WHOLE, Head(**(vars(head) | {"layout_bytes": 0, "code_bytes": size})), state, None)
    with pytest.raises(ValueError, match="bytes of a state of"):
        Arrival(DIFFERENCE, Head(**(vars(head) | {"layout_bytes": 0, "code_bytes": LAYOUT.bytes + 1})), state, None)


def test_parts_of_another_answer_are_left_out() -> None:
    head, sent = whole(held(LAYOUT, 3, 1))
    arrival = Arrival(WHOLE, head, None, None)
    arrival.add(struct.pack("<QQ", 3, 0), memoryview(b"old"))
    assert filled(arrival, sent[1:]) is not None
