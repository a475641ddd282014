"""One writer, many readers: `commlayer.publish` and `commlayer.subscribe` over sockets."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import commlayer
from commlayer.errors import (
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    PeerLostError,
    UnreachableError,
)
from commlayer.weights import content
from commlayer.weights.publisher import Publisher
from commlayer.weights.subscription import Subscription
from tests import ranks  # the server from which processes fork has torch
from tests.process.test_metrics import free_port

PATIENCE_S = ranks.TIMEOUT_S
SHAPES = {
    "a": (torch.bfloat16, (37, 1001)),
    "b": (torch.float32, (513,)),
    "c": (torch.float16, (3, 5, 7)),
    "d": (torch.int64, ()),
    "e": (torch.bool, (11,)),
    "f": (torch.float64, (9, 2)),
    "g": (torch.complex64, (4,)),
    "empty": (torch.bfloat16, (0, 3)),
}


def state(seed: int = 0) -> dict[str, Tensor]:
    """Random bits: NaNs with payloads, infinities and all else."""
    chance = torch.Generator().manual_seed(seed)
    made = {}
    for name, (dtype, shape) in SHAPES.items():
        values = torch.empty(shape, dtype=dtype)
        most = 2 if dtype == torch.bool else 256
        raw = torch.randint(most, (values.numel() * values.element_size(),), generator=chance, dtype=torch.uint8)
        made[name] = raw.view(dtype).view(shape)
    return made


def change(tensors: dict[str, Tensor], seed: int, share: float) -> None:
    """Changes a share of the 16-bit values, most by one unit, and now and then anything else."""
    chance = torch.Generator().manual_seed(seed)
    bits = tensors["a"].view(torch.int16)
    is_changed = torch.rand(bits.shape, generator=chance) < share
    large = (torch.rand(bits.shape, generator=chance) < 0.1) * torch.randint(1, 999, bits.shape, generator=chance)
    sign = 1 - 2 * torch.randint(2, bits.shape, generator=chance)
    bits.add_((is_changed * (1 + large) * sign).short())
    if seed % 3 == 0:
        tensors["b"].view(torch.int32).add_(1)
        tensors["d"].add_(1)
        tensors["e"].logical_not_()
    if seed % 5 == 0:
        tensors["f"].fill_(float("nan"))


def bits(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def read(reader: Subscription, version: int) -> Any:
    """Reads up to a version."""
    while reader.version != version:
        found = reader.latest(PATIENCE_S)
        assert found is not None
    return found


STEPS = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 1000), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0])),
    st.tuples(st.just("read"), st.integers(0, 2), st.just(0.0)),
    st.tuples(st.just("reconnect"), st.integers(0, 2), st.just(0.0)),
    st.tuples(st.just("begin anew"), st.just(0), st.just(0.0)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, min_size=3, max_size=14))
def test_readers_have_the_bits_of_the_writer(program: list[tuple[str, int, float]]) -> None:
    """Random changes; readers that skip versions, come late and come again; a publisher that begins anew."""
    follow_program(program)


def follow_program(program: list[tuple[str, int, float]]) -> None:
    """Makes the steps of a program, and checks what the readers have."""
    address = f"127.0.0.1:{free_port()}"
    source, models = state(), [state(seed) for seed in (1, 2, 3)]
    publisher = commlayer.publish(source, address)
    publisher.commit(0)
    committed = {0: bits(source)}
    readers = [commlayer.subscribe(address) for _ in models]
    try:
        for kind, number, share in program:
            if kind == "commit":
                change(source, number, share)
                version = max(committed) + 1 + number % 2
                publisher.commit(version)
                committed[version] = bits(source)
                if number % 4:
                    assert publisher.settle(PATIENCE_S)
            elif kind == "read":
                found = readers[number].latest(0.05)
                if found is not None:
                    found.apply(models[number])
                    assert bits(models[number]) == committed[found.number]
            elif kind == "reconnect":
                readers[number].close()
                readers[number] = commlayer.subscribe(address)
            else:
                publisher.close(0.0)
                for reader in readers:
                    reader.close()
                publisher = commlayer.publish(source, address)
                version = max(committed) + 1
                publisher.commit(version)
                committed[version] = bits(source)
                readers = [commlayer.subscribe(address) for _ in models]
        digests = set()
        for reader, model in zip(readers, models, strict=True):
            if reader.version != max(committed):
                found = read(reader, max(committed))
                found.apply(model)
                digests.add(found.digest)
                assert bits(model) == committed[max(committed)]
        assert len(digests) <= 1
    finally:
        publisher.close(0.0)
        for reader in readers:
            reader.close()


def follow(address: str, pause_s: float, begun: Any, results: Any) -> None:
    """A reader in a process of its own: the versions with the bits of its model, and how many came as a whole."""
    model = state(7)
    seen, whole = {}, 0
    for version in commlayer.subscribe(address, timeout_s=PATIENCE_S):
        version.apply(model)
        seen[version.number] = bits(model)
        whole += version.is_whole
        if len(seen) == 1:
            begun.put(pause_s)
        time.sleep(pause_s)
    results.put((pause_s, seen, whole))


def test_three_processes_read_of_which_one_lags_and_one_joins_late(address: str) -> None:
    context = multiprocessing.get_context("forkserver")
    begun, results = context.Queue(), context.Queue()
    pauses = (0.0, 0.3, 0.001)
    readers = [context.Process(target=follow, args=(address, pause, begun, results)) for pause in pauses]
    source = state()
    committed = {}
    publisher = commlayer.publish(source, address)
    for version in range(40):
        change(source, version, 0.01)
        publisher.commit(version)
        committed[version] = bits(source)
        if version == 0:
            for reader in readers[:2]:
                reader.start()
            assert {begun.get(timeout=PATIENCE_S) for _ in range(2)} == set(pauses[:2])
        elif version == 20:
            readers[2].start()
            assert begun.get(timeout=PATIENCE_S) == pauses[2]
        time.sleep(0.02)
    publisher.close(PATIENCE_S)
    found = {pause: (seen, whole) for pause, seen, whole in (results.get(timeout=PATIENCE_S) for _ in readers)}
    for reader in readers:
        reader.join(PATIENCE_S)
        assert reader.exitcode == 0
    for seen, whole in found.values():
        assert whole == 1
        assert 39 in seen
        assert all(committed[version] == found_bits for version, found_bits in seen.items())
    assert min(found[0.001][0]) == 20
    assert len(found[0.3][0]) < len(committed)  # it skipped some


def write(address: str) -> None:
    publisher = commlayer.publish(state(), address)
    publisher.commit(3)
    time.sleep(600)


def test_a_killed_writer_is_an_error_and_another_one_is_found(address: str) -> None:
    context = multiprocessing.get_context("forkserver")
    writer = context.Process(target=write, args=(address,))
    writer.start()
    reader = commlayer.subscribe(address, timeout_s=PATIENCE_S)
    version = next(reader)
    reader._timeout_s = 0.5
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    with pytest.raises(PeerLostError, match=r"has been away for 0\.\d s; this reader holds version 3\."):
        next(reader)
    model = state(1)
    version.apply(model)  # which it still has
    assert bits(model) == bits(state())
    reader._timeout_s = PATIENCE_S
    with commlayer.publish(state(2), address) as publisher:
        publisher.commit(2)
        with pytest.raises(MismatchError, match="began anew, at version 2; this reader holds 3"):
            next(reader)
        publisher.commit(4)
        assert publisher.settle(PATIENCE_S)
        read(reader, 4).apply(model)
        assert bits(model) == bits(state(2))
    reader.close()


@pytest.fixture
def publisher(address: str) -> Iterator[Publisher]:
    made = commlayer.publish(state(), address)
    yield made
    made.close(0.0)


def test_another_model_is_refused_by_name(publisher: Publisher, address: str) -> None:
    publisher.commit(1)
    with commlayer.subscribe(address) as reader:
        version = next(reader)
        other = state(1)
        other["b"] = other["b"].double()
        before = bits(other)
        with pytest.raises(MismatchError, match=r"b: float64\[513\] here, float32\[513\] at the publisher"):
            version.apply(other)
        assert bits(other) == before
        del other["b"]
        with pytest.raises(MismatchError, match=r"b: missing here"):
            version.apply(other)


def test_an_apply_that_fails_changes_nothing(publisher: Publisher, address: str) -> None:
    publisher.commit(1)
    with commlayer.subscribe(address) as reader:
        version = next(reader)
        other = state(1)
        other["f"] = other["f"][:1, :1].expand(9, 2)  # copy_ refuses memory that overlaps
        before = bits(other)
        with pytest.raises(RuntimeError):
            version.apply(other)
        assert bits(other) == before


class Torn(Tensor):
    """Fails when it is written the second time."""

    writes = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_ and cls.writes == 1:
            cls.writes += 1
            raise KeyboardInterrupt
        if function is Tensor.copy_:
            cls.writes += 1
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_model_torn_between_two_versions_goes_back_to_the_first(address: str) -> None:
    source, model = nn.Module(), nn.Module()
    for module, kind in ((source, Tensor), (model, Torn)):
        module.register_buffer("first", torch.zeros(3))
        module.register_buffer("second", torch.zeros(3).as_subclass(kind))
    with commlayer.publish(source, address) as publisher, commlayer.subscribe(address) as reader:
        publisher.commit(1)
        next(reader).apply(model)
        for buffer in source.buffers():
            buffer.add_(1)
        publisher.commit(2)
        version = next(reader)
        with pytest.raises(KeyboardInterrupt):
            version.apply(model)
        assert not any(buffer.any() for buffer in model.buffers())
        version.apply(model)
        assert all(buffer.all() for buffer in model.buffers())
        publisher.close(0.0)


def test_a_model_that_was_changed_goes_back_to_its_own_values(address: str) -> None:
    class Fragile(Torn):
        writes = 0

    source, model = nn.Module(), nn.Module()
    for module, kind in ((source, Tensor), (model, Fragile)):
        module.register_buffer("first", torch.zeros(3))
        module.register_buffer("second", torch.zeros(3).as_subclass(kind))
    with commlayer.publish(source, address) as publisher, commlayer.subscribe(address) as reader:
        publisher.commit(1)
        next(reader).apply(model)
        for buffer in model.buffers():
            buffer.add_(5)
        publisher.commit(2)
        with pytest.raises(KeyboardInterrupt):
            next(reader).apply(model)
        assert [buffer.tolist() for buffer in model.buffers()] == [[5, 5, 5]] * 2
        publisher.close(0.0)


def test_versions_grow_and_the_model_stays_the_same(address: str) -> None:
    model = nn.Linear(3, 4)
    publisher = commlayer.publish(model, address)
    publisher.commit(5)
    for wrong in (5, 4):
        with pytest.raises(ConfigError, match=rf"commit\({wrong}\): the last version was 5"):
            publisher.commit(wrong)
    for strange in (-1, 1.5, True, None, 1 << 63):
        with pytest.raises(ConfigError, match="use a whole number"):
            publisher.commit(strange)  # type: ignore[arg-type]
    model.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(MismatchError, match=r"commit\(6\).*weight: float32\[5, 3\] now, float32\[4, 3\] when it was"):
        publisher.commit(6)
    publisher.close(0.0)
    publisher.close()
    with pytest.raises(ClosedError, match="publish anew"):
        publisher.commit(7)


def test_a_publisher_that_begins_anew_may_tie_other_tensors(address: str) -> None:
    both = torch.randn(3_000_000)
    model = {"a": torch.zeros(3_000_000), "b": torch.zeros(3_000_000)}
    with commlayer.subscribe(address, timeout_s=PATIENCE_S) as reader:
        version = 0
        for is_tied in (True, False, True):
            source = {"a": both, "b": both if is_tied else torch.randn(3_000_000)}
            with commlayer.publish(source, address) as publisher:
                for _ in range(3):
                    version += 1
                    source["b"][:9] += 1
                    publisher.commit(version)
                    found = None
                    while reader.version != version:
                        found = reader.latest(PATIENCE_S)
                        reader.is_ended = False  # as if the publisher before had been killed
                    assert found is not None
                    assert len(reader._held.memory) == 12_000_000 * (1 if is_tied else 2)  # type: ignore[union-attr]
                    found.apply(model)
                    assert bits(model) == bits(source)
                publisher.close(0.0)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tensors_of_the_state_stay_tied(address: str, is_tied: bool) -> None:
    first, second = torch.ones(3), torch.ones(3)
    source = {"a": first, "b": first if is_tied else second}
    with commlayer.publish(source, address) as publisher:
        publisher.commit(1)
        source["b"] = second if is_tied else first
        with pytest.raises(MismatchError, match=r"commit\(2\): .*a shares its memory with .* now, with .* published"):
            publisher.commit(2)
        publisher.close(0.0)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_with_tied_tensors_needs_equal_values(address: str, is_whole: bool) -> None:
    source = {"a": torch.ones(3), "b": torch.ones(3)}
    memory = torch.zeros(5)
    model = {"a": memory[:3], "b": memory[:3] if is_whole else memory[1:4]}
    with commlayer.publish(source, address) as publisher, commlayer.subscribe(address) as reader:
        publisher.commit(1)
        next(reader).apply(model)
        assert memory.tolist() == [1, 1, 1, not is_whole, 0]
        before = memory.clone()
        source["b"][0] += 1
        publisher.commit(2)
        with pytest.raises(MismatchError, match="a and b share memory here"):
            next(reader).apply(model)
        assert torch.equal(memory, before)
        publisher.close(0.0)


def test_a_reader_that_lags_is_answered_while_commits_are_faster_than_coding(
    publisher: Publisher, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, digest = publisher._state, content.digest
    assert isinstance(source, dict)

    found = None

    def busy(*state: Any) -> str:
        """Commits the next version while one is coded."""
        if threading.current_thread().name == "commlayer-code" and found is None:
            time.sleep(0.005)
            publisher.commit(publisher._version + 1)
        return digest(*state)

    with commlayer.subscribe(address) as reader:
        publisher.commit(1)
        next(reader)
        for version in (2, 3):
            change(source, version, 0.001)
            publisher.commit(version)
            assert publisher.settle(PATIENCE_S)
        monkeypatch.setattr(content, "digest", busy)
        publisher.commit(4)
        found = reader.latest(10)
        assert found is not None
        assert not found.is_whole


def test_a_change_while_commit_copies_is_an_error(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    source = publisher._state
    assert isinstance(source, dict)
    copy = Tensor.copy_

    def slow(target: Tensor, other: Tensor, **options: Any) -> Tensor:
        thread = threading.Thread(target=source["b"].zero_)
        thread.start()
        thread.join()
        return copy(target, other, **options)

    monkeypatch.setattr(Tensor, "copy_", slow)
    with pytest.raises(ConfigError, match="changed while commit copied them"):
        publisher.commit(1)
    monkeypatch.undo()
    publisher.commit(1)


def test_the_end_reaches_every_reader(address: str) -> None:
    for _ in range(10):
        publisher = commlayer.publish(state(), address)
        readers = [commlayer.subscribe(address) for _ in range(3)]
        publisher.commit(1)
        seen = [[next(reader).number] for reader in readers]
        publisher.commit(2)
        closing = threading.Thread(target=publisher.close, args=(PATIENCE_S,))
        closing.start()
        for numbers, reader in zip(seen, readers, strict=True):
            numbers += [version.number for version in reader]
            reader.close()
        closing.join()
        assert seen == [[1, 2]] * 3


def test_a_version_that_was_committed_just_before_the_end_is_read(address: str) -> None:
    """The publisher closes while its thread hears a reader that asks for the next version."""
    publisher, reader = commlayer.publish(state(), address), commlayer.subscribe(address)
    server: Any = publisher._server
    publisher.commit(1)
    seen = [next(reader).number]
    hear = server._hear
    closing = threading.Thread(target=publisher.close, args=(PATIENCE_S,))

    def late() -> bool:
        server._hear = hear
        publisher.commit(2)
        closing.start()
        time.sleep(0.2)  # it has told the thread by now
        return bool(hear())

    server._hear = late
    seen += [version.number for version in reader]
    closing.join()
    assert seen == [1, 2]


def secret(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def test_another_secret_is_refused(address: str, tmp_path: Path) -> None:
    ours, theirs = (secret(tmp_path / name, name.encode() * 16) for name in ("ours", "theirs"))
    with commlayer.publish(state(), address, secret_file=ours) as publisher:
        publisher.commit(1)
        for wrong in (theirs, ""):
            with (
                commlayer.subscribe(address, secret_file=wrong, timeout_s=PATIENCE_S) as reader,
                pytest.raises(ConfigError, match="its secret is another one"),
            ):
                next(reader)
        with commlayer.subscribe(address, secret_file=ours) as reader:
            assert next(reader).number == 1
        publisher.close(0.0)


def test_other_hosts_need_a_secret() -> None:
    for call in (lambda: commlayer.publish(state(), "0.0.0.0:29600"), lambda: commlayer.subscribe("192.0.2.1:29600")):
        with pytest.raises(ConfigError, match="without a secret"):
            call()


@pytest.mark.parametrize("empty", [{}, nn.ReLU()])
def test_a_state_without_tensors_is_refused(address: str, empty: Any) -> None:
    with pytest.raises(ConfigError, match=rf"the {type(empty).__name__} has no tensors; give a model with parameters"):
        commlayer.publish(empty, address)


def test_no_publisher_is_an_error_and_so_is_a_taken_port(publisher: Publisher, address: str) -> None:
    with pytest.raises(ConfigError, match="use a free port"):
        commlayer.publish(state(), address)
    absent = f"127.0.0.1:{free_port()}"
    with (
        commlayer.subscribe(absent, timeout_s=0.2) as reader,
        pytest.raises(UnreachableError, match=rf"no publisher at {absent} for 0\.\d s"),
    ):
        next(reader)
    with pytest.raises(ClosedError):
        next(reader)


def test_the_next_version_ends_the_one_before(publisher: Publisher, address: str) -> None:
    publisher.commit(1)
    with commlayer.subscribe(address) as reader:
        first = next(reader)
        assert bits(first.tensors()) == bits(state())
        assert reader.latest() is None
        first.apply(state(1))
        publisher.commit(2)
        next(reader)
        with pytest.raises(ClosedError, match="version 1: the next one was asked for"):
            first.apply(state(1))


def test_damage_is_noticed_and_repaired(publisher: Publisher, address: str) -> None:
    source = publisher._state
    assert isinstance(source, dict)
    publisher.commit(1)
    with commlayer.subscribe(address) as reader:
        next(reader)
        assert reader._held is not None
        reader._held.memory[17] ^= 4
        change(source, 1, 0.01)
        publisher.commit(2)
        with pytest.raises(CommError, match=r"version 2 .* is damaged: its digest is not .* holds version 1"):
            next(reader)
        repaired = read(reader, 2)
        assert repaired.is_whole
        assert bits(repaired.tensors()) == bits(source)


def test_a_failed_thread_is_an_error_of_commit(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "digest", lambda *_: 1 / 0)
    publisher.commit(1)
    assert not publisher.settle(PATIENCE_S)
    with pytest.raises(CommError, match="division by zero"):
        publisher.commit(2)
