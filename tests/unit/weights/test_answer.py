import struct

import pytest
import torch

from commlayer.errors import MismatchError
from commlayer.weights import content
from commlayer.weights.answer import Arrival, Departure
from commlayer.weights.held import Held, Pool
from commlayer.weights.layout import Layout
from commlayer.weights.message import ANSWER_MAX_BYTES, DIFFERENCE, PART, TEXT, WHOLE, Head, Plan
from commlayer.weights.parts import PART_MOST_BYTES, PUBLISHER

LAYOUT = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(7, dtype=torch.int64)})
TIED = torch.zeros(5)
DIRECT = Plan("", PART_MOST_BYTES, [PUBLISHER])
SHARED = Plan("name", 64 << 10, ["10.0.0.1:1", PUBLISHER, "10.0.0.2:2"])


def held(layout: Layout, version: int, seed: int) -> Held:
    memory = torch.randint(9, (layout.bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Held(version, content.digest(layout, memory), memory, layout)


def messages(departure: Departure) -> list[list[bytes]]:
    found = []
    while departure.message is not None:
        found.append([bytes(frame) for frame in departure.message])
        departure.advance()
    return found


def leaving(state: Held, plan: Plan) -> Departure:
    text, block = state.layout.text, state.memory.numpy().data
    head = Head(4, "life", state.version, state.digest, state.layout.fingerprint, -1, len(text), len(block))
    tags = content.tags(block, plan.part_bytes) if plan.is_shared else b""
    return Departure(WHOLE, head, plan, text + tags, block, state)


def whole(state: Held, plan: Plan = DIRECT) -> tuple[Head, list[list[bytes]]]:
    departure = leaving(state, plan)
    return departure.head, messages(departure)


def arriving(kind: bytes, head: Head, held: Held | None, pool: Pool | None, plan: Plan = DIRECT) -> Arrival:
    return Arrival(kind, head, plan, held, pool, 0.0)


def add(arrival: Arrival, parts: list[list[bytes]]) -> None:
    for kind, place, part in parts:
        if arrival.is_own(place):
            if kind == TEXT:
                arrival.add_text(place, memoryview(part), 0.0)
            else:
                arrival.add(place, memoryview(part), PUBLISHER, 0.0)


def filled(arrival: Arrival, parts: list[list[bytes]]) -> Held | None:
    assert {part[0] for part in parts} <= {TEXT, PART}
    assert not arrival.is_complete
    add(arrival, parts)
    assert arrival.is_complete
    return arrival.result()


def test_a_whole_state_comes_in_short_parts() -> None:
    state = held(LAYOUT, 3, 1)
    head, sent = whole(state)
    assert max(len(frame) for message in sent for frame in message) == PART_MOST_BYTES < ANSWER_MAX_BYTES
    found = filled(arriving(WHOLE, Head.read(sent[0][1]), None, None), sent[1:])
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
        arrival = arriving(DIFFERENCE, head, base, pool)
        found = filled(arrival, messages(Departure(DIFFERENCE, head, DIRECT, b"", code, None))[1:])
        assert (found is None) == wrong
        if found is not None:
            assert torch.equal(found.memory, after.memory)
        base.memory[5] ^= 1  # damage: the next one is not taken


def test_a_difference_in_another_layout_is_refused() -> None:
    base = held(LAYOUT, 3, 1)
    larger = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(9_000, dtype=torch.int64)})
    head = Head(4, "life", 4, "digest", larger.fingerprint, 3, len(larger.text), 9)
    with pytest.raises(ValueError, match="of another layout"):
        arriving(DIFFERENCE, head, base, Pool(LAYOUT.bytes))
    with pytest.raises(ValueError, match="of another layout"):
        arriving(DIFFERENCE, head, None, None)


def test_a_state_in_another_layout_has_blocks_of_its_own() -> None:
    tied, free = Layout.of({"a": TIED, "b": TIED}), Layout.of({"a": torch.zeros(5), "b": torch.zeros(5)})
    pool = Pool(tied.bytes)
    pool.give(torch.zeros(tied.bytes, dtype=torch.uint8))
    state = held(free, 2, 1)
    arrival = arriving(WHOLE, whole(state)[0], held(tied, 1, 1), pool)
    found = filled(arrival, whole(state)[1][1:])
    assert found is not None
    assert len(found.memory) == free.bytes == 2 * tied.bytes
    assert arrival.pool is not pool


def test_other_tensors_are_refused_before_their_values_come() -> None:
    _, sent = whole(held(Layout.of({"c": TIED}), 2, 1))
    arrival = arriving(WHOLE, Head.read(sent[0][1]), held(LAYOUT, 1, 1), Pool(LAYOUT.bytes))
    with pytest.raises(MismatchError, match="c: float32"):
        filled(arrival, sent[1:2])


def test_damaged_answers_are_refused() -> None:
    state = held(LAYOUT, 3, 1)
    head, sent = whole(state)
    parts = sent[1:]
    for wrong in (
        [parts[1]],  # before the text
        [parts[0], parts[0]],
        [parts[0], parts[2]],
        [*parts, [PART, struct.pack("<QQ", 4, len(parts) - 1), b"x"]],
        [[TEXT, b"short", b"x"]],
        [[TEXT, parts[0][1], b""]],
        [[TEXT, parts[0][1], parts[0][2] + b"x"]],
        [[TEXT, parts[0][1], b"[" * len(parts[0][2])]],
        [[TEXT, parts[0][1], parts[0][2].replace(b"300000", b"300001")]],
        [*parts[:-1], [PART, parts[-1][1], parts[-1][2] + b"x"]],
    ):
        arrival = arriving(WHOLE, head, None, None)
        with pytest.raises(ValueError, match=r"."):
            add(arrival, wrong)
    for kind, changed in (
        (b"what", {}),
        (WHOLE, {"layout_bytes": 0}),
        (DIFFERENCE, {"layout_bytes": -1}),
    ):
        with pytest.raises(ValueError, match=r"."):
            arriving(kind, Head(**(vars(head) | changed)), None, None)
    for size in (LAYOUT.bytes - 1, -1):
        with pytest.raises(ValueError, match="bytes of a state of"):
            arriving(WHOLE, Head(**(vars(head) | {"layout_bytes": 0, "code_bytes": size})), state, None)
    with pytest.raises(ValueError, match="bytes of a state of"):
        arriving(DIFFERENCE, Head(**(vars(head) | {"layout_bytes": 0, "code_bytes": LAYOUT.bytes + 1})), state, None)


def test_parts_of_another_answer_are_left_out() -> None:
    head, sent = whole(held(LAYOUT, 3, 1))
    arrival = arriving(WHOLE, head, None, None)
    add(arrival, [[TEXT, struct.pack("<QQ", 3, 0), b"old"]])
    assert filled(arrival, sent[1:]) is not None


def test_a_shared_answer_comes_from_several() -> None:
    state = held(LAYOUT, 3, 1)
    departure = leaving(state, SHARED)
    _, text, *own = messages(departure)
    assert [struct.unpack("<QQ", place)[1] for _, place, _ in own] == list(range(1, 19, 3))
    assert departure.lasts
    arrival = arriving(WHOLE, departure.head, None, None, SHARED)
    add(arrival, [text, *own])
    assert not arrival.is_complete
    departure.give(0, 0)
    for kind, place, part in messages(departure):
        assert kind == PART
        arrival.add(place, memoryview(part), "10.0.0.1:1", 0.0)
    departure.give(2, 2)
    rest = messages(departure)
    assert arrival.book is not None
    with pytest.raises(ValueError, match="part 8, not part 2"):
        arrival.add(rest[0][1], memoryview(rest[0][2]), "10.0.0.2:2", 0.0)
    departure.give(2, 0)
    first = messages(departure)[0]
    wrong = bytearray(first[2])
    wrong[77] ^= 1
    with pytest.raises(ValueError, match="part 2 has other bytes"):
        arrival.add(first[1], memoryview(wrong), "10.0.0.2:2", 0.0)
    arrival.book.turn_to_publisher(2)
    departure.give(2, arrival.book.at(2))
    assert filled(arrival, messages(departure)) is not None
