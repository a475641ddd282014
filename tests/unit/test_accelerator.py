"""`Current` and `Cuda`: the calls that they make of torch, on stand-ins for its functions."""

import threading
from typing import Any, NamedTuple

import pytest
import torch

from commlayer.frontend.device.accelerator import Cuda, Current, read_word, write_word
from commlayer.frontend.device.driver import DriverError


class Stream(NamedTuple):
    """A stream: its device, and a name."""

    device: torch.device
    name: str


class Machine:
    """Two devices: the current one and its streams, by thread, and the devices that a thread has a context on."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.contexts: set[int] = set()

    @property
    def index(self) -> int:
        return getattr(self._local, "index", 0)

    @index.setter
    def index(self, index: int) -> None:
        self._local.index = index

    def exchange(self, index: int) -> int:
        before, self.index = self.index, index
        self.contexts.add(index)
        return before

    def maybe_exchange(self, index: int) -> int:
        """Makes no context on a device that has none: then the device changes once it is used."""
        before, self.index = self.index, index
        return before

    def current_stream(self, device: Any) -> Stream:
        default = Stream(torch.device("cuda", device.index), "default")
        streams: dict[int, Stream] = self._local.__dict__.setdefault("streams", {})
        return streams.get(device.index, default)

    def set_stream(self, stream: Stream) -> None:
        self.exchange(stream.device.index)
        self._local.__dict__.setdefault("streams", {})[stream.device.index] = stream


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("torch._C._accelerator_exchangeDevice", made.exchange)
    monkeypatch.setattr("torch._C._accelerator_maybeExchangeDevice", made.maybe_exchange)
    for module in ("torch.accelerator", "torch.cuda"):
        monkeypatch.setattr(f"{module}.current_stream", made.current_stream)
        monkeypatch.setattr(f"{module}.set_stream", made.set_stream)
    return made


@pytest.mark.parametrize("kind", [Current, Cuda])
def test_a_thread_leaves_no_context_on_the_first_device(machine: Machine, kind: type[Current]) -> None:
    """Each context takes half a gigabyte: with eight ranks per host, four of the first GPU's."""
    accelerator, stream = kind(), Stream(torch.device("cuda", 1), "side")

    def serve() -> None:
        with accelerator.on(stream):
            assert machine.current_stream(stream.device) is stream

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert machine.contexts == {1}


def test_a_stream_may_be_entered_by_two_threads_and_the_device_before_comes_back(machine: Machine) -> None:
    accelerator, stream = Current(), Stream(torch.device("cuda", 1), "side")
    machine.set_stream(Stream(torch.device("cuda", 1), "own"))
    machine.exchange(0)

    def other() -> None:
        with accelerator.on(stream):
            pass

    with accelerator.on(stream):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert machine.current_stream(stream.device) is stream
    assert machine.current_stream(stream.device).name == "own"
    assert machine.index == 0


def test_pinned_memory_is_on_the_host_whatever_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **options: asked.append(options))
    Current().pinned((2, 3), torch.float32)
    assert asked == [{"dtype": torch.float32, "device": "cpu", "pin_memory": True}]


def test_words_are_written_and_read_in_any_mode() -> None:
    with torch.inference_mode():
        word = torch.zeros(1, dtype=torch.int32)
    write_word(word, 7)
    assert word.item() == read_word(word) == 7


def test_other_accelerators_have_no_words() -> None:
    for function in (Current().wait_word, Current().write_word):
        with pytest.raises(DriverError, match="words of host memory"):
            function(None, torch.zeros(1, dtype=torch.int32))
