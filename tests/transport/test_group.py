"""The native group against numpy, over every way two ranks can be joined; and everything that can go wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from commlayer.config import Config
from commlayer.errors import (
    AbortedError,
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
)
from commlayer.plans.delivery import deliver
from commlayer.plans.plan import Plan
from commlayer.plans.select import Collective, Settings, plan_for
from commlayer.transport import group as groups
from commlayer.transport import native
from commlayer.transport.base import DType, Op
from commlayer.transport.group import NativeGroup
from commlayer.transport.paths import PATHS_MAX

from .world import PATIENCE_S, Exchange, Team, World, open_descriptors

Array = npt.NDArray[Any]

LOSS_PPM = 50_000
LARGE = 300_007
SIZES = (0, 1, 2, 37, 1023, 4099)

NUMPY: dict[DType, str] = {
    DType.U8: "u1",
    DType.I8: "i1",
    DType.I16: "i2",
    DType.I32: "i4",
    DType.I64: "i8",
    DType.F16: "f2",
    DType.BF16: "bf16",
    DType.F32: "f4",
    DType.F64: "f8",
    DType.U16: "u2",
    DType.U32: "u4",
    DType.U64: "u8",
}
BITWISE: dict[Op, Callable[..., Array]] = {
    Op.BAND: np.bitwise_and.reduce,
    Op.BOR: np.bitwise_or.reduce,
    Op.BXOR: np.bitwise_xor.reduce,
}
REDUCTIONS: dict[Op, Callable[..., Array]] = {
    Op.SUM: np.sum,
    Op.PRODUCT: np.prod,
    Op.MIN: np.min,
    Op.MAX: np.max,
    **BITWISE,
}
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def encode(values: npt.NDArray[np.int64], dtype: DType) -> Array:
    """Small whole numbers in a type; bf16, which numpy lacks, as the upper half of f32."""
    if dtype == DType.BF16:
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(NUMPY[dtype])


def decode(array: Array, dtype: DType) -> Array:
    return (array.astype("u4") << 16).view("f4") if dtype == DType.BF16 else array


class Ended:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self._errors: list[BaseException | None] = []
        self._called = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self._errors.append(error)
        self._called.set()

    def wait(self) -> BaseException | None:
        assert self._called.wait(PATIENCE_S)
        assert len(self._errors) == 1
        return self._errors[0]


class Case(NamedTuple):
    """One collective; `numel` as in `plan_for`."""

    collective: Collective
    dtype: DType
    numel: int
    op: Op = Op.SUM
    average: bool = False


def cases() -> Iterator[Case]:
    """All sizes in f32, all types and operators at one size, and a large one of each collective."""
    collectives: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
    for collective in collectives:
        for numel in (*SIZES, LARGE):
            yield Case(collective, DType.F32, numel)
        for dtype in DType:
            yield Case(collective, dtype, 37)
            if collective in ("all_reduce", "reduce_scatter", "reduce"):
                yield Case(collective, dtype, 37, average=True)
                for op in (Op.PRODUCT, Op.MIN, Op.MAX, *(() if dtype in FLOATS else BITWISE)):
                    yield Case(collective, dtype, 37, op)
    yield Case("barrier", DType.U8, 0)


def data(case: Case, size: int, count: int) -> list[npt.NDArray[np.int64]]:
    """Every rank's input: so small that no type overflows or rounds, whatever is computed."""
    low = 0 if NUMPY[case.dtype].startswith("u") else -2
    rng = np.random.default_rng(case.numel)
    return [rng.integers(low, 3, count) * (size if case.average else 1) for _ in range(size)]


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def make_plan(group: NativeGroup, case: Case, root: int = 0) -> Plan:
    return plan_for(
        case.collective,
        rank=group.rank,
        hosts=group.hosts,
        numel=case.numel,
        itemsize=2 if case.dtype == DType.BF16 else np.dtype(NUMPY[case.dtype]).itemsize,
        average=case.average,
        root=root,
        settings=Settings(staging_bytes=group.staging_bytes),
    )


def execute(group: NativeGroup, plan: Plan, source: Array, target: Array, case: Case, way: int) -> None:
    """Runs a plan in one of the ways there are."""
    arguments = (plan, address(source), address(target), case.dtype, case.op)
    if way == 0:
        group.run(*arguments, timeout_s=PATIENCE_S)
    elif way == 1:
        handle = group.submit(*arguments, timeout_s=PATIENCE_S, priority=3)
        handle.wait()
        assert handle.done()
    else:
        ended = Ended()
        group.submit(*arguments, timeout_s=PATIENCE_S).on_done(ended)
        assert ended.wait() is None


def check(group: NativeGroup, case: Case, number: int) -> None:
    """One case on one rank, with the ranks' common data; `number` picks the way and the root."""
    n, rank, numel = group.size, group.rank, case.numel
    part = slice(rank * numel, (rank + 1) * numel)
    everything = data(case, n, numel * n if case.collective == "reduce_scatter" else numel)
    root = number % n
    expected = everything[root]
    if case.collective == "reduce" and rank != root:
        expected = everything[rank]
    elif case.collective in ("all_reduce", "reduce_scatter", "reduce"):
        expected = REDUCTIONS[case.op](np.stack(everything), axis=0)
        expected = expected // n if case.average else expected
    if case.collective == "reduce_scatter":
        expected = expected[part]
    elif case.collective == "all_gather":
        expected = np.concatenate(everything)
    source = encode(everything[rank], case.dtype)
    in_place = case.collective in ("all_reduce", "broadcast", "reduce")
    target = source if in_place else encode(np.full(len(expected), 9), case.dtype)
    before = source.copy()
    execute(group, make_plan(group, case, root), source, target, case, number % 3)
    np.testing.assert_array_equal(decode(target, case.dtype), expected, str(case))
    if target is not source:
        np.testing.assert_array_equal(source, before, str(case))


def check_delivery(group: NativeGroup, scale: int, number: int) -> None:
    """Every pair has its own length, often 0; every third time all send the same to all."""
    n, rank = group.size, group.rank
    same = number % 3 == 0
    lengths = [[scale * ((a + (0 if same else 2 * b) + number) % 3) for b in range(n)] for a in range(n)]
    rng = np.random.default_rng(number)
    given = [rng.integers(0, 255, row[0] if same else sum(row), np.uint8) for row in lengths]
    received = [lengths[peer][rank] for peer in range(n)]
    expected = []
    for peer, row in enumerate(lengths):
        start = 0 if same else sum(row[:rank])
        expected.append(given[peer][start : start + row[rank]])
    plan = deliver(rank, group.hosts, lengths[rank], received, group.staging_bytes, same=same)
    target = np.zeros(sum(received), np.uint8)
    execute(group, plan, given[rank], target, Case("barrier", DType.U8, 0), number % 3)
    np.testing.assert_array_equal(target, np.concatenate(expected))


def conform(world: World) -> None:
    with world, world.open_group() as team:
        table = list(cases())

        def body(rank: int) -> None:
            for number, case in enumerate(table):
                check(team[rank], case, number)
                if number % 16 == 0:  # in between, as they use counters in a way of their own
                    check_delivery(team[rank], (1, 100, 70_000, 400_001)[number // 16 % 4], number // 16)

        world.on_each(body)
        assert team[0].hosts == world.hosts
        assert all(engine.stats()["operations_failed"] == 0 for engine in world.engines)
        if world.size > len(world.hosts) == 1:
            assert all(engine.stats()["packets_sent"] == 0 for engine in world.engines)


def flat(size: int) -> list[tuple[int, ...]]:
    return [(rank,) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_shared_memory(size: int) -> None:
    conform(World([range(size)], "none"))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_memory_wire(size: int) -> None:
    conform(World(flat(size)))


@pytest.mark.parametrize("size", [2, 5])
def test_memory_wire_with_loss(size: int) -> None:
    world = World(flat(size), loss_ppm=LOSS_PPM)
    conform(world)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_udp(size: int) -> None:
    conform(World(flat(size), "udp"))


@pytest.fixture
def libfabric() -> None:
    """Skips where the ofi wire cannot be opened."""
    try:
        World(flat(1), "ofi").engines[0].close()
    except ConfigError as error:
        if "libfabric is not available" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("size", [2, 3])
def test_libfabric(libfabric: None, size: int) -> None:
    conform(World(flat(size), "ofi"))


def test_what_libfabric_does_not_have_is_named(libfabric: None) -> None:
    port = {"ifname": "nic", "address": "192.0.2.1", "prefix": 8, "mtu": 1500, "loopback": False, "version": 4}
    with pytest.raises(ConfigError, match=r"nic 192.0.2.1: .*no datagram endpoint.*fi_info"):
        native.Engine(Config(wire="ofi", ofi_provider="udp"), [port])
    with pytest.raises(ConfigError, match="COMMLAYER_OFI_PROVIDER"):
        native.Engine(Config(wire="ofi", ofi_provider="pigeon"), [port])


@pytest.mark.parametrize(("provider", "loopback"), [("udp", True), ("verbs", False), ("", False)])
def test_only_the_udp_provider_has_a_loopback(provider: str, loopback: bool) -> None:
    ports = native.choose_ports(Config(wire="ofi", ofi_provider=provider))
    assert any(port["loopback"] for port in ports) is loopback


@pytest.mark.parametrize("hosts", [[(0, 1), (2,)], [(0, 2), (1, 3)], [(0,), (1, 2, 3, 4)]])
def test_several_hosts(hosts: list[tuple[int, ...]]) -> None:
    conform(World(hosts, loss_ppm=LOSS_PPM))


def test_loss_is_repaired() -> None:
    with World(flat(2), loss_ppm=LOSS_PPM) as world, world.open_group() as team:
        world.on_each(lambda rank: check(team[rank], Case("all_reduce", DType.F32, LARGE), 0))
        stats = [engine.stats() for engine in world.engines]
        assert all(each["packets_retransmitted"] > 0 for each in stats)
        assert all(each["operations_done"] == 1 for each in stats)


def test_many_in_flight_in_several_groups() -> None:
    case = Case("all_reduce", DType.I32, 1000)
    with World([(0, 1), (2,)], loss_ppm=LOSS_PPM) as world, world.open_group() as one, world.open_group() as two:

        def body(rank: int) -> None:
            arrays = [np.full(case.numel, number + rank, "i4") for number in range(20)]
            handles = []
            for number, array in enumerate(arrays):
                group = (one, two)[number % 2][rank]
                plan = make_plan(group, case)
                handles.append(
                    group.submit(
                        plan,
                        address(array),
                        address(array),
                        case.dtype,
                        case.op,
                        timeout_s=PATIENCE_S,
                        priority=number % 8,
                    )
                )
            for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
                handle.wait(PATIENCE_S)
                assert (array == 3 * number + 3).all()

        world.on_each(body)


# ---- what can go wrong ----

SMALL = Case("all_reduce", DType.F32, 5)
JOINED = [pytest.param([(0, 1)], id="shared memory"), pytest.param([(0,), (1,)], id="network")]
Hosts = list[tuple[int, ...]]


def run(group: NativeGroup, case: Case = SMALL, timeout_s: float = PATIENCE_S) -> Array:
    array = np.full(case.numel, group.rank + 1, NUMPY[case.dtype])
    plan = make_plan(group, case)
    group.run(plan, address(array), address(array), case.dtype, case.op, timeout_s=timeout_s)
    return array


def submit(group: NativeGroup, array: Array, timeout_s: float = PATIENCE_S) -> groups.NativeHandle:
    plan = make_plan(group, SMALL)
    return group.submit(plan, address(array), address(array), SMALL.dtype, SMALL.op, timeout_s=timeout_s)


@pytest.fixture(params=JOINED)
def pair(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two ranks."""
    with World(request.param) as world, world.open_group() as team:
        yield team


def test_timeout(pair: Team) -> None:
    with pytest.raises(OperationTimeoutError, match=r"rank 0 of group 'group 1': the operation timed out"):
        run(pair[0], timeout_s=0.02)
    with pytest.raises(OperationTimeoutError):
        run(pair[0])
    with pytest.raises(AbortedError, match=r"rank 1 of group 'group 1'.*another rank failed first"):
        run(pair[1])


def test_a_short_wait_changes_nothing(pair: Team) -> None:
    array = np.full(5, 1, "f4")
    handle = submit(pair[0], array)
    assert not handle.done()
    for timeout_s in (0, 0.01):
        with pytest.raises(OperationTimeoutError, match="still in flight after waiting"):
            handle.wait(timeout_s)
    run(pair[1])
    handle.wait()
    assert (array == 3).all()


def test_endless_timeout(pair: Team) -> None:
    late = pair.world.threads.submit(run, pair[0], SMALL, float("inf"))
    run(pair[1], timeout_s=1e30)
    assert (late.result(PATIENCE_S) == 3).all()


def test_abort(pair: Team, caplog: pytest.LogCaptureFixture) -> None:
    array = np.zeros(5, "f4")
    ended = Ended()
    handle = submit(pair[0], array)
    handle.on_done(ended)
    pair[1].abort("as the test wants it")
    assert "rank 1 of group 'group 1' aborts: as the test wants it" in caplog.text
    with pytest.raises(AbortedError):
        handle.wait()
    assert isinstance(ended.wait(), AbortedError)
    for rank in (0, 1):
        with pytest.raises(AbortedError):
            run(pair[rank])


def test_mismatch() -> None:
    with World(flat(2)) as world, world.open_group() as team:

        def body(rank: int) -> str:
            with pytest.raises(MismatchError, match="same order with the same sizes") as caught:
                run(team[rank], Case("all_reduce", DType.F32, 1000 + rank))
            return str(caught.value)

        assert any("(rank" in text for text in world.on_each(body))


def test_closed(pair: Team) -> None:
    pair[0].close()
    pair[0].close()
    with pytest.raises(ClosedError, match="rank 0 of group 'group 1': the engine or group is closed"):
        run(pair[0])
    with pytest.raises(ClosedError):
        submit(pair[0], np.zeros(5, "f4"))
    pair[0].abort("too late to matter")


def test_close_while_in_flight(pair: Team) -> None:
    handle = submit(pair[0], np.zeros(5, "f4"))
    ended = Ended()
    handle.on_done(ended)
    pair[0].close()
    with pytest.raises(ClosedError):
        handle.wait()
    with pytest.raises(AbortedError):
        run(pair[1])
    assert isinstance(ended.wait(), ClosedError)


def test_close_under_a_caller(pair: Team) -> None:
    for rank in (0, 1):
        caller = pair.world.threads.submit(run, pair[rank])
        while pair[rank]._calls == 0 and not caller.done():
            pass
        pair[rank].close()
        with pytest.raises((ClosedError, AbortedError)):
            caller.result(PATIENCE_S)


def test_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    with World([(0,)], "none") as world, world.open_group() as team:
        called = threading.Event()

        def fail(_: BaseException | None) -> None:
            raise ValueError("as the test wants it")

        for callback in (fail, lambda _: called.set()):
            handle = submit(team[0], np.zeros(5, "f4"))
            try:
                handle.on_done(callback)
            except ValueError:  # it had ended already: then it is called here
                caplog.records.append(logging.makeLogRecord({}))
        assert called.wait(PATIENCE_S)
        assert caplog.records


def test_a_callback_may_close_everything() -> None:
    with World(flat(2)) as world, world.open_group() as team:
        array = np.zeros(5, "f4")
        handle = submit(team[0], array)
        closed = threading.Event()

        def close(_: BaseException | None) -> None:
            team[0].close()
            world.engines[0].close()
            closed.set()

        handle.on_done(close)
        run(team[1])
        assert closed.wait(PATIENCE_S)
        with pytest.raises(ClosedError):
            _ = world.engines[0].raw


def test_plans_are_loaded_for_as_long_as_they_live() -> None:
    with World([(0,)], "none") as world, world.open_group() as team:
        source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)

        def body(_: int) -> None:
            for length in range(1, 100):
                plan = deliver(0, ((0,),), [length], [length], team[0].staging_bytes)
                handles = [
                    team[0].submit(plan, address(source), address(target), DType.U8, Op.SUM, timeout_s=PATIENCE_S)
                    for _ in range(2)
                ]
                assert len(team[0]._plans) <= 2
                del plan
                for handle in handles:
                    handle.wait()

        futures = [world.threads.submit(body, 0) for _ in range(2)]
        for future in futures:
            future.result(PATIENCE_S)
        assert (target[:99] == source[:99]).all()
        assert not team[0]._plans


# ---- opening ----


@pytest.mark.parametrize("step", ["memory", "mapped", "open"])
def test_a_start_that_fails_leaves_nothing_behind(step: str) -> None:
    class LostError(Exception):
        pass

    def failing(exchange: Exchange) -> Callable[[int], Callable[[str, bytes], list[bytes]]]:
        def meet(rank: int) -> Callable[[str, bytes], list[bytes]]:
            def all_gather(name: str, value: bytes) -> list[bytes]:
                values = exchange(rank)(name, value)
                if name == step:
                    raise LostError
                return values

            return all_gather

        return meet

    with World([(0, 1)], "none") as world:
        world.open_group().__exit__()  # watches the processes, for good
        before = open_descriptors()
        with pytest.raises(LostError):
            world.open_group(failing(Exchange(2)))
        world.on_each(lambda _: None)
        assert open_descriptors() == before
        with world.open_group() as team:
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]


def test_engines_leave_nothing_behind() -> None:
    with World([(0, 1), (2,)]) as world, world.open_group():
        pass
    before = open_descriptors()
    with World([(0, 1), (2,)], "udp") as world, world.open_group() as team:
        world.on_each(lambda rank: run(team[rank]))
    assert open_descriptors() == before


def test_without_shared_memory_the_network_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share = groups._share_memory

    def refuse(local: Any, rank: int, descriptions: Any, exchange: Any) -> tuple[int, str]:
        fd, problem = share(local, rank, descriptions, exchange)
        return fd, "rank 1 has none" if rank == 1 else problem

    monkeypatch.setattr(groups, "_share_memory", refuse)
    with World([(0, 1, 2)]) as world, world.open_group() as team:
        assert team[0].hosts == ((0,), (1,), (2,))
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [6.0] * 3
        assert world.engines[0].stats()["packets_sent"] > 0
    assert "no shared memory (rank 1 has none)" in caplog.text


def test_no_path() -> None:
    with World(flat(2)) as world:
        world.descriptions[1]["ports"] = []
        with pytest.raises(ConfigError, match=r"rank 0 of group 'group 1': no network path to rank 1.*no address"):
            world.threads.submit(world.open_group, lambda _: lambda _, value: [value] * 2).result(PATIENCE_S)


def test_group_hosts() -> None:
    ranks = [{"host": host, "shm": shm} for host, shm in [("b", True), ("a", True), ("b", True), ("a", False)]]
    assert groups.group_hosts(ranks) == ((0, 2), (1,), (3,))


def test_describe() -> None:
    with World(flat(1), "udp", shm=False) as world:
        description = world.engines[0].describe()
        assert description["ports"][0]["port"] > 0
        assert description["bell"].startswith("cl-")
        assert not description["shm"]
        assert description["host"] == native.host_key()


def test_an_address_that_is_not_here() -> None:
    port = {"ifname": "eth7", "address": "192.0.2.1", "prefix": 24, "mtu": 1500, "loopback": False, "version": 4}
    with pytest.raises(CommError, match=r"opening the engine on eth7 192\.0\.2\.1"):
        native.Engine(Config(), [port])


def test_shared_engine() -> None:
    one = native.Engine.shared(Config())
    two = native.Engine.shared(Config())
    assert one is two
    one.release()
    assert two.describe()
    two.release()
    with pytest.raises(ClosedError):
        two.describe()
    three = native.Engine.shared(Config())
    assert three is not one
    three.release()


def test_interfaces() -> None:
    found = native.interfaces()
    assert any(port["loopback"] and port["address"] == "127.0.0.1" and port["prefix"] == 8 for port in found)
    assert native.kernels_level() in ("scalar", "avx2", "avx512")


def interface(name: str, address: str, mtu: int = 1500) -> dict[str, Any]:
    version = 6 if ":" in address else 4
    return {"ifname": name, "address": address, "prefix": 24, "mtu": mtu, "loopback": name == "lo", "version": version}


@pytest.mark.parametrize(
    ("ifname", "chosen"),
    [
        ((), ["10.0.0.1", "10.0.1.1", "127.0.0.1"]),
        (("eth1",), ["10.0.1.1", "127.0.0.1"]),
        (("^eth1",), ["10.0.0.1", "172.17.0.1", "127.0.0.1"]),
        (("docker*",), ["172.17.0.1", "127.0.0.1"]),
        (("lo",), ["127.0.0.1"]),
    ],
)
def test_choose_ports(monkeypatch: pytest.MonkeyPatch, ifname: tuple[str, ...], chosen: list[str]) -> None:
    found = [
        interface("lo", "::1", 65536),
        interface("lo", "127.0.0.1", 65536),
        interface("eth0", "2001:db8::1"),
        interface("eth0", "10.0.0.1"),
        interface("eth1", "10.0.1.1"),
        interface("docker0", "172.17.0.1"),
    ]
    monkeypatch.setattr(native, "interfaces", lambda: found)
    ports = native.choose_ports(Config(ifname=ifname))
    assert sorted(port["address"] for port in ports) == sorted(chosen)


def test_choose_ports_keeps_loopback_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native,
        "interfaces",
        lambda: [interface(f"eth{i}", f"10.0.{i}.1") for i in range(12)] + [interface("lo", "::1")],
    )
    ports = native.choose_ports(Config())
    assert len(ports) == PATHS_MAX
    assert ports[-1]["loopback"]


@pytest.mark.parametrize(
    ("ports", "mtu", "expected"),
    [
        ([interface("eth0", "10.0.0.1"), interface("lo", "127.0.0.1", 65536)], 0, 1472),
        ([interface("eth0", "10.0.0.1", 9000), interface("eth1", "2001:db8::1")], 0, 1452),
        ([interface("eth0", "10.0.0.1", 9000)], 1400, 1372),
        ([interface("lo", "127.0.0.1", 65536)], 0, 8972),
        ([], 0, 1472),
    ],
)
def test_datagram_bytes(ports: list[dict[str, Any]], mtu: int, expected: int) -> None:
    engine = native.Engine.__new__(native.Engine)
    engine.config, engine._ports = Config(mtu=mtu), ports
    assert engine._datagram_bytes() == expected
