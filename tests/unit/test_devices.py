"""The way of operations on device tensors: to a neighbour that the configuration names, or through pinned memory."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlayer.errors import CommError, ConfigError, OperationTimeoutError
from commlayer.frontend.device.devices import Devices, backend_for, placed
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.device.pinned_handle import PinnedHandle
from commlayer.frontend.work.work import CommWork
from commlayer.transport.call import Call, Calls
from tests.fake_cuda import FakeCuda


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:commlayer,cuda:nccl", "cuda", "nccl"),
        ("cpu:commlayer,cuda:nccl", "cpu", "commlayer"),
        ("cuda:nccl,cpu:commlayer", "cuda", "nccl"),
        ("cpu:commlayer", "cuda", None),
    ],
)
def test_a_configuration_names_a_backend_per_device(config: str, device: str, expected: str | None) -> None:
    assert backend_for(config, device) == expected


class Group:
    """A group of one, with one collective that doubles its inputs."""

    def __init__(self, devices: Devices | None) -> None:
        self.devices = devices
        self.seen: list[Tensor] = []

    @placed(inputs=[1], outputs=[0])
    def double(self, outputs: list[Tensor], inputs: list[Tensor], factor: int = 2) -> CommWork:
        self.seen += inputs
        for result, given in zip(outputs, inputs, strict=True):
            result.copy_(given * factor)
        return CommWork(None, outputs)


def make(monkeypatch: pytest.MonkeyPatch, config: str | None, pinned: PinnedCopies | None = None) -> Devices:
    def get_backend_config(_: Any) -> str:
        if config is None:
            raise ValueError("Invalid process group specified")
        return config

    monkeypatch.setattr(dist, "get_backend_config", get_backend_config)
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    return Devices(group, "commlayer", dist.HashStore(), timedelta(seconds=10), pinned=pinned)


def test_without_an_accelerator_the_method_is_called_as_it_is() -> None:
    group = Group(None)
    target, source = torch.zeros(2), torch.ones(2)
    group.double([target], [source], factor=3).wait()
    assert group.seen[0] is source
    assert target.tolist() == [3.0, 3.0]


def test_tensors_on_the_cpu_are_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(make(monkeypatch, "cpu:commlayer,cuda:commlayer"))
    target, source = torch.zeros(2), torch.ones(2)
    group.double([target], [source]).wait()
    assert group.seen[0] is source
    assert target.tolist() == [2.0, 2.0]


class Elsewhere(Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_device_tensors_of_our_own_backend_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[list[Tensor], list[Tensor]]] = []

    class Spy(PinnedCopies):
        def run(self, call: Any, inputs: Any, outputs: Any, **_: Any) -> Any:
            taken.append((list(inputs), list(outputs)))
            host = [torch.full((2,), 5.0)], [torch.zeros(2)]
            work = call(*host)
            assert host[1][0].tolist() == [10.0, 10.0]
            return work

    group = Group(make(monkeypatch, "cpu:commlayer,cuda:commlayer", Spy(FakeCuda())))
    target, source = Elsewhere(torch.zeros(2)), Elsewhere(torch.ones(2))
    group.double([target], [source])
    assert taken[0][0][0] is source
    assert taken[0][1][0] is target
    assert group.seen[0].tolist() == [5.0, 5.0]


def test_device_tensors_go_to_the_neighbour_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        made.append((rank, size, timeout))
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    made: list[tuple[int, int, timedelta]] = []
    monkeypatch.setitem(dist.Backend._plugins, "OTHER", dist.Backend._BackendPlugin(create, False))
    devices = make(monkeypatch, "cpu:commlayer,cuda:other")
    neighbour = devices.neighbour("cuda")
    assert isinstance(neighbour, dist.ProcessGroup)
    assert devices.neighbour("cuda") is neighbour
    assert made == [(0, 1, timedelta(seconds=10))]
    assert devices.neighbour("cpu") is None

    monkeypatch.setitem(devices._neighbours, "cuda", NAMED)
    group = Group(devices)
    assert group.double([Elsewhere(torch.zeros(2))], [Elsewhere(torch.ones(2))]) == "the neighbour's"  # type: ignore[comparison-overlap]
    assert not group.seen


class Rooted:
    """A rank of a group, with collectives that have a root: notes the tensors that it copies out and back."""

    def __init__(self, devices: Devices, rank: int) -> None:
        self.devices = devices
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    @placed(inputs=[0], outputs=[0], root="reads")
    def broadcast(self, tensors: list[Tensor], *_: Any, **__: Any) -> CommWork:
        return CommWork(None, tensors)

    @placed(inputs=[0], outputs=[0], root="writes")
    def reduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> CommWork:
        return CommWork(None, tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_what_it_reads_and_writes(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    class Spy(PinnedCopies):
        def run(self, call: Any, inputs: Any, outputs: Any, **options: Any) -> Any:
            taken.append((len(inputs), len(outputs)))
            assert not options["at_once"]  # a receive starts out of order, a collective never
            return super().run(call, inputs, outputs, **options)

    taken: list[tuple[int, int]] = []
    cuda = FakeCuda()
    devices = make(monkeypatch, "cpu:commlayer,cuda:commlayer", Spy(cuda))
    monkeypatch.setattr(devices, "neighbour", lambda _: None)
    group, tensor = Rooted(devices, rank), cuda.tensor(1)
    broadcast, reduce = dist.BroadcastOptions(), dist.ReduceOptions()
    broadcast.rootRank = reduce.rootRank = 1
    works = [group.broadcast([tensor], broadcast), group.broadcast([tensor], root=1)]
    works += [group.reduce([tensor], reduce), group.reduce([tensor], 1, dist.ReduceOp.SUM)]
    assert taken == ([(1, 0)] * 2 + [(1, 1)] * 2 if rank == 1 else [(0, 1)] * 2 + [(1, 0)] * 2)
    assert all(work.result()[0] is tensor for work in works)
    devices.close()


def test_a_flight_record_names_the_line_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(Group):
        @placed(inputs=[1], outputs=[0])
        def double(self, outputs: list[Tensor], inputs: list[Tensor], factor: int = 2) -> CommWork:  # noqa: ARG002
            calls.add(call)
            return CommWork(None, outputs)

    calls, call, cuda = Calls(), Call("all_reduce"), FakeCuda()
    devices = make(monkeypatch, "cpu:commlayer,cuda:commlayer", PinnedCopies(cuda))
    monkeypatch.setattr(devices, "neighbour", lambda _: None)

    def script() -> None:
        Noted(devices).double([cuda.tensor(1)], [cuda.tensor(1)]).wait()

    script()
    assert call.frames[0] is script.__code__
    devices.close()


def test_coalesced_operations_are_one_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling(PinnedCopies):
        def run(self, call: Any, inputs: Any, outputs: Any, **_: Any) -> Any:
            call([torch.ones(2)] * len(inputs), [torch.zeros(2)])
            made.append(PinnedHandle())
            return CommWork(made[-1], list(outputs))

    made: list[PinnedHandle] = []
    devices = make(monkeypatch, "cpu:commlayer,cuda:commlayer", Doubling(FakeCuda()))
    group, device = Group(devices), torch.device("cuda", 0)
    devices.begin_coalescing(device)
    for _ in range(2):
        group.double([Elsewhere(torch.zeros(2))], [Elsewhere(torch.ones(2))])
    joined = devices.end_coalescing(device)
    made[0].end(None)
    assert not joined.is_completed()
    with pytest.raises(OperationTimeoutError):
        joined.wait(timedelta(milliseconds=10))
    made[1].end(CommError("rank 1 died"))
    with pytest.raises(CommError, match="rank 1 died"):
        joined.wait()
    assert joined.is_completed()
    assert not joined.is_success()


class Named:
    def double(self, *_: Any) -> str:
        return "the neighbour's"


NAMED: Any = Named()


@pytest.mark.parametrize("config", ["cpu:commlayer,cuda:commlayer", "cpu:commlayer,cuda:gloo", "cpu:commlayer", None])
def test_no_neighbour_where_none_is_named(monkeypatch: pytest.MonkeyPatch, config: str | None) -> None:
    assert make(monkeypatch, config).neighbour("cuda") is None


def test_a_backend_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = make(monkeypatch, "cpu:commlayer,xpu:nonsense")
    with pytest.raises(ConfigError, match="'nonsense' for xpu"):
        devices.neighbour("xpu")
