import struct

import pytest
import torch

from commlayer.errors import MismatchError
from commlayer.weights import content
from commlayer.weights.answer import Arrival, Departure, Place
from commlayer.weights.content import Code, Whole
from commlayer.weights.deal import Deal
from commlayer.weights.held import Held, Pool
from commlayer.weights.layout import Layout
from commlayer.weights.message import ANSWER_MAX_BYTES, DIFFERENCE, LAST, PART, TEXT, WHOLE, Head, Plan
from commlayer.weights.parts import PART_LEAST_BYTES, PUBLISHER

LAYOUT = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(7, dtype=torch.int64)})
TIED = torch.zeros(5)
DIRECT = Plan("", [PUBLISHER])
SHARED = Plan("name", ["10.0.0.1:1", PUBLISHER, "10.0.0.2:2"])


def held(layout: Layout, version: int, seed: int) -> Held:
    memory = torch.randint(9, (layout.bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Held(version, content.digest(layout, memory), Whole(memory), layout)


def messages(departure: Departure) -> list[list[bytes]]:
    found = []
    while departure.message is not None:
        found.append([bytes(frame) for frame in departure.message])
        departure.advance()
    return found


def leaving(state: Held, plan: Plan) -> Departure:
    text, whole = state.layout.text, state.whole
    tags_bytes = content.TAG_BYTES * whole.parts if plan.is_shared else 0
    head = Head(4, "life", state.version, state.digest, state.layout.fingerprint, -1, len(text), tags_bytes)
    return Departure(WHOLE, head, plan, text, whole, state, None)


def test_the_tags_of_a_long_state_are_made_some_at_a_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state, made = held(LAYOUT, 3, 1), list[int]()
    real = content.tag

    def tag(piece: memoryview, name: str, number: int) -> bytes:
        made.append(number)
        return real(piece, name, number)

    monkeypatch.setattr(content, "tag", tag)
    monkeypatch.setattr(content, "TAGGED", 5)
    for _ in range(2):
        before = len(made)
        departure = leaving(state, SHARED)
        while departure.message is not None and departure.message[0] != PART:
            assert len(made) - before <= 5
            before = len(made)
            departure.advance()
    assert made == list(range(state.whole.parts))


def whole(state: Held, plan: Plan = DIRECT) -> tuple[Head, list[list[bytes]]]:
    departure = leaving(state, plan)
    return departure.head, messages(departure)


def arriving(kind: bytes, head: Head, held: Held | None, pool: Pool | None, plan: Plan = DIRECT) -> Arrival:
    return Arrival(kind, head, plan, held, pool, 0.0)


def add(arrival: Arrival, parts: list[list[bytes]]) -> None:
    for kind, frame, part in parts:
        place = Place.read(frame)
        if arrival.is_own(place):
            if kind == TEXT:
                arrival.add_text(place, memoryview(part), 0.0)
            elif kind == LAST:
                arrival.end(memoryview(part), 0.0)
            else:
                arrival.add(place, memoryview(part), PUBLISHER, 0.0)


def filled(arrival: Arrival, parts: list[list[bytes]]) -> Held | None:
    assert {part[0] for part in parts} <= {TEXT, PART, LAST}
    assert not arrival.is_complete
    add(arrival, parts)
    assert arrival.is_complete
    return arrival.result()


def test_a_whole_state_comes_in_short_parts() -> None:
    state = held(LAYOUT, 3, 1)
    head, sent = whole(state)
    assert max(len(frame) for message in sent for frame in message) <= PART_LEAST_BYTES < ANSWER_MAX_BYTES
    found = filled(arriving(WHOLE, Head.read(sent[0][1]), None, None), sent[1:])
    assert found is not None
    assert torch.equal(found.memory, state.memory)
    assert (found.version, found.digest, found.layout.entries) == (3, state.digest, LAYOUT.entries)
    assert head.layout == found.layout.fingerprint


def code_between(base: Held, after: Held) -> Code:
    expected_bytes = content.estimate(LAYOUT, base.memory, after.memory, content.room())
    code = Code(expected_bytes)
    for number, piece in enumerate(content.encode(LAYOUT, base.memory, after.memory, after.digest, expected_bytes)):
        code.add(number, piece)
    code.is_ended = True
    return code


def pair() -> tuple[Held, Held, Head]:
    base, after = held(LAYOUT, 3, 1), held(LAYOUT, 4, 1)
    after.memory[::300] += 1
    return base, after, Head(4, "life", 4, content.digest(LAYOUT, after.memory), LAYOUT.fingerprint, 3)


def test_a_difference_comes_in_parts() -> None:
    base, after, head = pair()
    code = code_between(base, Held(4, head.digest, after.whole, LAYOUT))
    pool = Pool(LAYOUT.bytes)
    for wrong in (False, True):
        arrival = arriving(DIFFERENCE, head, base, pool)
        found = filled(arrival, messages(Departure(DIFFERENCE, head, DIRECT, b"", code, None, None))[1:])
        assert (found is None) == wrong
        if found is not None:
            assert torch.equal(found.memory, after.memory)
        base.memory[5] ^= 1  # damage: the next one is not taken


def test_a_difference_leaves_and_is_decoded_while_it_is_coded() -> None:
    base, after, head = pair()
    coded, growing = code_between(base, Held(4, head.digest, after.whole, LAYOUT)), Code()
    departure = Departure(DIFFERENCE, head, DIRECT, b"", growing, None, None)
    arrival = arriving(DIFFERENCE, head, base, Pool(LAYOUT.bytes))
    assert len(messages(departure)) == 1
    for number in range(coded.parts):
        growing.add(number, coded.part(number))
        assert departure.lasts
        (message,) = messages(departure)
        add(arrival, [message])
        assert not arrival.is_complete
    growing.is_ended = True
    ((kind, _, counts),) = messages(departure)
    assert (kind, struct.unpack("<Q", counts)) == (LAST, (coded.parts,))
    assert not departure.lasts
    found = filled(arrival, [[kind, Place(4).pack(), counts]])
    assert found is not None
    assert torch.equal(found.memory, after.memory)


def test_a_deal_reaches_a_reader_from_all_its_seats() -> None:
    state = held(LAYOUT, 3, 1)
    deal = Deal(state.whole, 2, 0.0)
    leaving_ones, arrivals = [], []
    plans = Plan("name", [PUBLISHER, "10.0.0.2:2"], 7), Plan("name", ["10.0.0.1:1", PUBLISHER], 7)
    for plan in plans:
        text, tags_bytes = state.layout.text, content.TAG_BYTES * state.whole.parts
        head = Head(4, "life", 3, state.digest, LAYOUT.fingerprint, -1, len(text), tags_bytes)
        leaving_ones.append(Departure(WHOLE, head, plan, text, state.whole, state, deal))
        arrivals.append(arriving(WHOLE, head, None, None, plan))
    own: list[list[list[bytes]]] = [[], []]
    while not deal.is_ended:
        for seat, departure in enumerate(leaving_ones):
            own[seat] += messages(departure)
            deal.passed(seat, len(deal.given[seat]))
    for seat, departure in enumerate(leaving_ones):
        own[seat] += messages(departure)
        assert plans[seat].own == seat
        add(arrivals[seat], own[seat][1:])
        assert not arrivals[seat].is_complete
    assert min(map(len, deal.given)) > 3
    for kind, frame, piece in own[0]:
        if kind == PART:
            arrivals[1].add(Place.read(frame), memoryview(piece), "10.0.0.1:1", 0.0)
    leaving_ones[0].give(1, 0)
    assert filled(arrivals[0], messages(leaving_ones[0])) is not None
    assert filled_already(arrivals[1], state)


def test_a_part_that_leaves_as_the_code_ends_is_counted() -> None:
    code = code_of(3)
    deal = Deal(code, 2, 0.0)
    departure = Departure(DIFFERENCE, Head(4), Plan("name", [PUBLISHER, "10.0.0.2:2"], 7), b"", code, None, deal)
    departure.advance()
    for number in range(3):
        assert left(departure) == Place(4, 0, number, number)
        code.is_ended = number == 2
        assert (deal.next(0) is None) == code.is_ended  # a seat's window is shorter now
        departure.advance()
    ((kind, _, counts),) = messages(departure)
    assert (kind, struct.unpack("<2Q", counts)) == (LAST, (3, 0))


def test_a_part_that_comes_while_another_leaves_is_not_left_out() -> None:
    code = code_of(3)
    departure = Departure(DIFFERENCE, Head(4), Plan("name", ["10.0.0.1:1", PUBLISHER]), b"", code, None, None)
    departure.advance()
    assert left(departure) == Place(4, 1, 0, 1)
    departure.advance()
    departure.give(0, 1)
    assert left(departure) == Place(4, 0, 1, 2)
    code.add(3, b"x")
    departure.advance()
    assert left(departure) == Place(4, 1, 1, 3)


def code_of(parts: int) -> Code:
    made = Code()
    for number in range(parts):
        made.add(number, b"x")
    return made


def left(departure: Departure) -> Place:
    assert departure.message is not None
    assert departure.message[0] == PART
    return Place.read(departure.message[1])


class Growing(Code):
    """Gets its last part, and is ended, while its parts are counted."""

    @property
    def parts(self) -> int:
        """Those before."""
        before = super().parts
        self.add(before, b"x")
        self.is_ended = True
        return before


def test_the_last_part_leaves_before_the_end_is_told() -> None:
    departure = Departure(DIFFERENCE, Head(4), DIRECT, b"", Growing(), None, None)
    departure.advance()
    assert departure.message is None


def filled_already(arrival: Arrival, state: Held) -> bool:
    found = arrival.result()
    return found is not None and torch.equal(found.memory, state.memory)


def test_a_difference_in_another_layout_is_refused() -> None:
    base = held(LAYOUT, 3, 1)
    larger = Layout.of({"a": torch.zeros(300_000), "b": torch.zeros(9_000, dtype=torch.int64)})
    head = Head(4, "life", 4, "digest", larger.fingerprint, 3, len(larger.text))
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
    for wrong, why in (
        ([parts[1]], "part 0 before the text"),
        ([parts[0], parts[0]], "piece 0 of the text, not piece 1"),
        ([parts[0], parts[2]], "part 1 of seat 0, not part 0"),
        ([*parts, [PART, Place(4, 0, len(parts) - 2, len(parts) - 2).pack(), b"x"]], "part .* of seat 0"),
        ([*parts[:-1], [LAST, Place(4).pack(), struct.pack("<Q", 10**6)]], "1000000 parts of a state of"),
        ([*parts[:-1], [LAST, Place(4).pack(), struct.pack("<Q", 1)]], r"\[1\] parts of the seats, of which"),
        ([*parts[:-1], [LAST, Place(4).pack(), b"1234567"]], "the number of parts before the text"),
        ([*parts[:-1], [LAST, Place(4).pack(), b""]], r"\[\] parts of the seats"),
        ([[TEXT, b"short", b"x"]], "a part without its place"),
        ([[TEXT, parts[0][1], b""]], "piece 0 of the text"),
        ([[TEXT, parts[0][1], parts[0][2] + b"x"]], "piece 0 of the text"),
        ([[TEXT, parts[0][1], b"[" * len(parts[0][2])]], "Expecting value"),
        ([[TEXT, parts[0][1], parts[0][2].replace(b"300000", b"300001")]], "its layout is another one than it says"),
        ([*parts[:-2], [PART, parts[-2][1], parts[-2][2] + b"x"]], "bytes for a place of"),
    ):
        arrival = arriving(WHOLE, head, None, None)
        with pytest.raises(ValueError, match=why):
            add(arrival, wrong)
    for kind, changed, why in (
        (b"what", {}, "a message of kind b'what'"),
        (WHOLE, {"layout": "other", "layout_bytes": 0}, "a state without its layout"),
        (DIFFERENCE, {}, "of another layout"),
    ):
        with pytest.raises(ValueError, match=why):
            arriving(kind, Head(**(vars(head) | changed)), state, None)
    tagged = Head(**(vars(head) | {"layout_bytes": 0, "tags_bytes": 8}))
    for kind in (WHOLE, DIFFERENCE):
        with pytest.raises(ValueError, match="8 bytes of tags of a state of"):
            add(arriving(kind, tagged, state, None), [[TEXT, Place(4).pack(), b"12345678"]])


def test_parts_of_another_answer_are_left_out() -> None:
    head, sent = whole(held(LAYOUT, 3, 1))
    arrival = arriving(WHOLE, head, None, None)
    add(arrival, [[TEXT, Place(3).pack(), b"old"]])
    assert filled(arrival, sent[1:]) is not None


def test_a_shared_answer_comes_from_several() -> None:
    state = held(LAYOUT, 3, 1)
    departure = leaving(state, SHARED)
    _, text, tags, *own, last = messages(departure)
    assert [Place.read(place).number for _, place, _ in own] == list(range(1, state.whole.parts, 3))
    assert departure.lasts
    arrival = arriving(WHOLE, departure.head, None, None, SHARED)
    add(arrival, [text, tags, *own, last])
    assert not arrival.is_complete
    departure.give(0, 0)
    for kind, place, part in messages(departure):
        assert kind == PART
        arrival.add(Place.read(place), memoryview(part), "10.0.0.1:1", 0.0)
    departure.give(2, 2)
    rest = messages(departure)
    assert arrival.book is not None
    with pytest.raises(ValueError, match="part 2 of seat 2, not part 0"):
        arrival.add(Place.read(rest[0][1]), memoryview(rest[0][2]), "10.0.0.2:2", 0.0)
    departure.give(2, 0)
    first = messages(departure)[0]
    wrong = bytearray(first[2])
    wrong[77] ^= 1
    with pytest.raises(ValueError, match="part 2 has other bytes"):
        arrival.add(Place.read(first[1]), memoryview(wrong), "10.0.0.2:2", 0.0)
    arrival.book.turn_to_publisher(2)
    departure.give(2, len(arrival.book.come[2]))
    assert filled(arrival, messages(departure)) is not None
