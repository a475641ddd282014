"""The entries of a job in the Store."""

from __future__ import annotations

from torch.distributed import HashStore

from commlayer.transport.bootstrap import _job


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
