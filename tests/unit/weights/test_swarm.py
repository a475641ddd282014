import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights.parts import PUBLISHER
from commlayer.weights.swarm import SEATS_MOST, Reader, address_of, deal, is_loopback


def readers(count: int, *, host: str = "10.0.0", first: int = 0) -> list[Reader]:
    return [Reader(number, f"{host}.{number % 200 + 1}:{29600 + number}") for number in range(first, first + count)]


def test_a_group_gets_each_part_from_the_publisher_once() -> None:
    group = readers(8)
    found = deal(group, [], 0.0)
    for number, sources in enumerate(found):
        assert sources == [PUBLISHER if seat == number else group[seat].address for seat in range(8)]


@given(count=st.integers(1, 200), holding=st.integers(0, 30))
def test_no_link_carries_a_content_more_than_a_little_more_than_once(count: int, holding: int) -> None:
    asking, holders = readers(count), readers(holding, host="10.1.0")
    found = deal(asking, holders, 0.0)
    load: dict[str, float] = {}
    for reader, sources in zip(asking, found, strict=True):
        assert reader.address not in sources
        assert len(sources) <= SEATS_MOST
        for source in sources:
            load[source] = load.get(source, 0.0) + 1 / len(sources)
    assert load.get(PUBLISHER, 0.0) <= (0.0 if holding else 1.001)
    assert all(load.get(reader.address, 0.0) < 1.3 for reader in asking)
    assert all(load.get(reader.address, 0.0) <= 1.001 for reader in holders)


@given(count=st.integers(2, 100), number=st.integers(0, 99))
def test_every_part_comes_from_the_publisher_at_last(count: int, number: int) -> None:
    asking = readers(count)
    sources_of = {reader.address: sources for reader, sources in zip(asking, deal(asking, [], 0.0), strict=True)}
    for source in sources_of:
        steps = 0
        while source != PUBLISHER:
            source = sources_of[source][number % len(sources_of[source])]
            steps += 1
            assert steps < 12


def test_late_readers_get_all_from_those_that_asked_for_less() -> None:
    holders = readers(20)
    loads = []
    for late in readers(40, first=20):
        (sources,) = deal([late], holders, 0.0)
        assert len(sources) == SEATS_MOST
        loads = [reader.load for reader in holders]
    assert max(loads) - min(loads) < 0.2
    assert sum(loads) == pytest.approx(40)


def test_readers_that_failed_do_not_serve() -> None:
    group = readers(4)
    group[1].serves_from_s = 60.0
    group[2].shares_from_s = 60.0
    found = deal(group, [], 1.0)
    assert found[1] == [group[0].address, group[3].address]
    assert found[2] == [PUBLISHER]
    assert found[0] == [PUBLISHER, group[3].address]
    assert found[3] == [group[0].address, PUBLISHER]
    assert all(PUBLISHER in sources and len(sources) == 4 for sources in deal(group, [], 61.0))


def test_one_that_serves_gives_all_to_one_that_may_not() -> None:
    group = readers(2)
    group[1].serves_from_s = 60.0
    assert deal(group, [], 1.0) == [[PUBLISHER], [group[0].address]]


def test_loopback_and_other_addresses_are_apart() -> None:
    near, far = readers(2, host="127.0.0"), readers(2)
    assert deal([*near, *far], [], 0.0) == [
        [PUBLISHER, near[1].address],
        [near[0].address, PUBLISHER],
        [PUBLISHER, far[1].address],
        [far[0].address, PUBLISHER],
    ]
    assert is_loopback("[::1]:5")
    assert deal([far[0]], near, 0.0) == [[PUBLISHER]]


def test_readers_without_an_address_get_all_from_the_publisher() -> None:
    assert deal([Reader(0), *readers(2)], readers(3, first=5), 0.0)[0] == [PUBLISHER]


@pytest.mark.parametrize("text", ["", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:x", "10.0.0.1:70000"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use HOST:PORT"):
        address_of(text)


def test_names_of_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="'host' does not appear to be an IPv4 or IPv6 address"):
        address_of("host:1")


def test_addresses_are_those_of_zmq() -> None:
    assert address_of("[fe80::1]:5") == "[fe80::1]:5"
    assert address_of("10.0.0.1:5") == "10.0.0.1:5"


def test_a_reader_gives_what_it_holds() -> None:
    reader = Reader(0, "10.0.0.1:1")
    for digest in ("a", "b", "b", "c"):
        reader.holds(digest)
    reader.sent = "code"
    assert [reader.gives(name) for name in ("a", "b", "c", "code")] == [False, True, True, True]
    reader.holds("")
    assert not reader.gives("c")
