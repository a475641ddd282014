"""`Follower`: the readers of a rollout engine hold the version that its driver names, or raise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import commlayer
from commlayer.errors import ConfigError, MismatchError, OperationTimeoutError, PeerLostError, UnreachableError
from commlayer.weights.follower import Follower
from commlayer.weights.publisher import Publisher
from tests.process.test_metrics import free_port

Published = tuple[Publisher, dict[str, Tensor], str]


@pytest.fixture
def published() -> Iterator[Published]:
    address = f"127.0.0.1:{free_port()}"
    state = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    with commlayer.publish(state, address) as publisher:
        yield publisher, state, address


def commit(published: Published, version: int) -> None:
    publisher, state, _ = published
    state["w"].fill_(version)
    publisher.commit(version)


def test_each_reader_takes_the_version_that_is_named(published: Published) -> None:
    with Follower(published[2], timeout_s=20) as first, Follower(published[2], timeout_s=20) as second:
        for version in (3, 4, 9):
            commit(published, version)
            for reader in (first, second):
                taken = reader.take(version)
                assert taken.number == version
                assert taken.tensors()["w"].unique().tolist() == [version]


def test_a_load_is_tried_again_without_the_publisher(published: Published) -> None:
    commit(published, 1)
    with Follower(published[2], timeout_s=20) as reader:
        first = reader.take(1)
        published[0].close()
        assert reader.take(1) is first


def test_a_version_that_does_not_come_is_an_error_and_the_reader_goes_on(published: Published) -> None:
    commit(published, 1)
    with Follower(published[2], timeout_s=1) as reader:
        reader.take(1)
        with pytest.raises(OperationTimeoutError, match=r"version 2 of .* did not come within 1 s.*holds version 1"):
            reader.take(2)
        commit(published, 2)
        assert reader.take(2).number == 2


def test_a_version_that_is_gone_is_never_replaced_by_a_later_one(published: Published) -> None:
    commit(published, 5)
    with Follower(published[2], timeout_s=20) as reader:
        with pytest.raises(MismatchError, match=r"version 4 of .* is gone; this reader holds version 5"):
            reader.take(4)
        assert reader.take(5).number == 5


def test_the_end_of_the_publisher_is_an_error_at_once(published: Published) -> None:
    commit(published, 1)
    with Follower(published[2], timeout_s=60) as reader:
        reader.take(1)
        published[0].close()
        with pytest.raises(PeerLostError, match=r"has closed, and version 2 .*holds version 1"):
            reader.take(2)


def test_nobody_at_the_address_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Follower(address, timeout_s=1) as reader, pytest.raises(UnreachableError, match=address):
        reader.take(0)


def test_another_secret_is_named(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for name, letter in (("ours", "a"), ("theirs", "b")):
        (tmp_path / name).write_text(letter * 32)
        (tmp_path / name).chmod(0o600)
    with (
        commlayer.publish({"w": torch.zeros(3)}, address, secret_file=str(tmp_path / "ours")) as publisher,
        Follower(address, secret_file=str(tmp_path / "theirs"), timeout_s=20) as reader,
    ):
        publisher.commit(0)
        with pytest.raises(ConfigError, match="secret"):
            reader.take(0)


def test_bad_arguments_are_named(published: Published) -> None:
    with pytest.raises(ConfigError, match="without a secret"):
        Follower("192.0.2.1:29600")
    with Follower(published[2]) as reader:
        for number in (-1, "3", 1.0, True):
            with pytest.raises(ConfigError, match="version"):
                reader.take(number)  # type: ignore[arg-type]
