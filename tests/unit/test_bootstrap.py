"""The entries of a job in the Store, and the errors of its start."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from commlayer.errors import CommError, ConfigError, OperationTimeoutError
from commlayer.transport.bootstrap import JOB, Rendezvous, _announce, _job, agree, entry, stored_top
from commlayer.transport.description import FORMAT, check_description, check_job, printable, read_description
from commlayer.transport.members import Members


def test_each_world_has_a_fresh_key() -> None:
    store = HashStore()
    first, second = _job(store, True), _job(store, True)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert _job(store, False) == second  # a group of that world
    assert not second[2]


def test_groups_without_a_world_of_ours_share_a_key_that_may_be_old() -> None:
    store = HashStore()
    first, second = _job(store, False), _job(store, False)
    assert first == second
    assert first[2]
    assert _job(HashStore(), False)[1] != first[1]
    assert not _job(store, True)[2]


def test_each_job_on_a_store_has_its_own_address_of_samples() -> None:
    """One may join another; the first puts its key back then."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first, second = _job(store, True), _job(store, True)
    _announce(store, first[0], "hosta:1")
    _announce(store, second[0], "hostb:2")
    assert stored_top("127.0.0.1", store.port) == (second[1].hex(), "hostb:2")
    store.set(JOB, entry(first))
    assert stored_top("127.0.0.1", store.port) == (first[1].hex(), "hosta:1")
    store.set(JOB, entry(_job(HashStore(), True)))
    with pytest.raises(ValueError, match="gives no samples"):
        stored_top("127.0.0.1", store.port)


MEMBERS = Members("7", 0, [4, 9], {4: "hosta", 9: "hostb"})


def test_a_rank_that_does_not_come_is_named_with_its_host() -> None:
    rendezvous = Rendezvous(HashStore(), "7", 0, 2, timedelta(seconds=0.2), MEMBERS.ranks)
    rendezvous.members.hosts = MEMBERS.hosts
    late = re.escape("rank 4 of group '7': rank(s) 9 (hostb) did not reach step 'open' of the start within 0.2 s")
    with pytest.raises(OperationTimeoutError, match=late):
        rendezvous.exchange("open", b"")


def start(store: HashStore, rank: int, size: int = 2, timeout_s: float = 30.0) -> list[bytes]:
    """One rank's part of a start."""
    rendezvous = Rendezvous(store, "7", rank, size, timedelta(seconds=timeout_s))
    return [*rendezvous.exchange("describe", b"%d" % rank), *rendezvous.exchange("open", b"")]


def all_start(store: HashStore, order: Sequence[int] = (0, 1)) -> None:
    """The ranks come in this order; a start that hangs takes longer than the test waits."""
    size = len(order)
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(start, store, rank, size) for rank in order]
        told = [*(b"%d" % rank for rank in range(size)), *[b""] * size]
        assert [future.result(10) for future in started] == [told] * size


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("came", [0, 1])
def test_a_start_without_a_rank_does_not_spoil_later_ones(came: int, order: Sequence[int]) -> None:
    store = HashStore()
    for _ in range(3):
        with pytest.raises(OperationTimeoutError):
            start(store, came, timeout_s=0.05)
        all_start(store, order)
        all_start(store, order)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_rank_0_that_dies_in_a_start_does_not_spoil_later_ones(order: Sequence[int]) -> None:
    store = HashStore()
    for _ in range(2):
        Rendezvous(store, "7", 0, 3, timedelta(seconds=1))._publish(b"+dead")
        all_start(store, order)


def test_ranks_whose_rank_0_died_go_on_with_the_next() -> None:
    store = HashStore()
    Rendezvous(store, "7", 0, 3, timedelta(seconds=1))._publish(b"+dead")
    early = [Rendezvous(store, "7", rank, 3, timedelta(seconds=30)) for rank in (1, 2)]
    with ThreadPoolExecutor(3) as pool:
        going = [pool.submit(rank.exchange, "describe", b"%d" % rank.rank) for rank in early]
        last = Rendezvous(store, "7", 0, 3, timedelta(seconds=30))
        going.append(pool.submit(last.exchange, "describe", b"0"))
        assert [future.result(10) for future in going] == [[b"0", b"1", b"2"]] * 3


def test_ranks_that_wait_in_vain_name_none_of_each_other() -> None:
    store = HashStore()
    for rank in (1, 2):
        with pytest.raises(OperationTimeoutError, match=r": rank\(s\) 0 did not|: rank\(s\) 0, 2 did not"):
            start(store, rank, 3, timeout_s=0.05)
    with pytest.raises(OperationTimeoutError, match=r": rank\(s\) 1, 2 did not"):
        start(store, 0, 3, timeout_s=0.05)
    all_start(store, (0, 1, 2))


def test_a_rank_that_gave_up_may_come_again() -> None:
    store = HashStore()
    Rendezvous(store, "7", 1, 2, timedelta(seconds=1)).give_up(ConfigError("no such interface"))
    with pytest.raises(CommError, match=r"rank 1 of group '7' on .* could not start: no such interface"):
        start(store, 0)
    all_start(store)


def test_ranks_that_disagree_are_named_with_their_hosts() -> None:
    told = re.escape("AUTH differs within group '7': full on rank(s) 4 (hosta); '' on rank(s) 9 (hostb)")
    with pytest.raises(ConfigError, match=told):
        agree(MEMBERS, [{"AUTH": "full"}, {"AUTH": ""}], ConfigError)
    agree(MEMBERS, [{"AUTH": 0, "other": [1]}, {"AUTH": 0.0, "other": [1]}], ConfigError)


@pytest.mark.parametrize("values", [[{}, {"new": [1]}], [{"new": [1]}, {}]])
def test_a_setting_that_another_version_lacks_is_a_difference(values: list[dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match=r"new differs within group '7': .*not set on rank"):
        agree(MEMBERS, values, ConfigError)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b"{}",
        b'{"settings": {}, "policy": {}}',
        b'{"format": 1, "settings": {}, "policy": {}}',
        b'{"format": %d, "settings": {}, "policy": 1}' % FORMAT,
        b'{"format": %d, "settings": [], "policy": {}}' % FORMAT,
    ],
)
def test_a_text_that_is_no_description_is_refused(text: bytes) -> None:
    with pytest.raises(CommError, match=r"rank 4 of group '7': rank 9 \(hostb\) describes itself with .*same version"):
        read_description(text, MEMBERS, 1)
    assert read_description(b'{"format": %d, "settings": {}, "policy": {}, "new": 1}' % FORMAT, MEMBERS, 1)["new"] == 1


@pytest.mark.parametrize(("name", "value"), [("key", "00"), ("key", 1), ("job", -1), ("group", None), ("paired", 1)])
def test_a_job_that_is_none_is_refused(name: str, value: object) -> None:
    good = {"job": 1, "key": "0f" * 16, "group": 0, "paired": False}
    check_job(good, MEMBERS)
    with pytest.raises(CommError, match=rf"rank 4 \(hosta\) describes itself with {name}="):
        check_job({**good, name: value}, MEMBERS)


def test_a_description_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(CommError, match=r"rank 9 \(hostb\) describes itself with host='a\\udc80'"):
        check_description({"peer": 9, "host": "a\udc80"}, MEMBERS, 1)


def test_host_names_that_are_not_utf_8_can_be_printed() -> None:
    assert printable(b"node\x80".decode(errors="surrogateescape")) == "node?"
    assert printable("knoten-\u00e4\U0001f600") == "knoten-\u00e4\U0001f600"
