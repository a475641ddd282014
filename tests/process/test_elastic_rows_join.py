"""`commlayer.elastic`: rows of ranks, over which FSDP2 shards the model, join a job."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import commlayer
from commlayer.frontend.elastic import membership
from commlayer.frontend.elastic.elastic import Job
from commlayer.frontend.elastic.replica import Replica
from commlayer.frontend.elastic.rows import Rows
from commlayer.frontend.group import newcomers, transfer
from commlayer.frontend.group.parts import part_of
from commlayer.frontend.group.party import Party
from commlayer.frontend.group.state import State
from commlayer.transport.bootstrap import stored_key
from commlayer.transport.native import Engine
from tests import ranks
from tests.process import elastic_joins
from tests.process.elastic_joins import Plan, build_row, digest_of, loss_of

FIRST = 4
"""Two rows of two."""
BY_TWO = Plan(first=FIRST, shards=2, joins=(0,))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 16))])
def test_random_joins_kills_and_leaves_of_rows(seed: int) -> None:
    elastic_joins.check(elastic_joins.random_rows(seed))


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "AdamW"])
def test_rows_join_and_compute(is_exact: bool) -> None:
    """The state comes in pieces, and the rows ask one after the other."""
    plan = Plan(*(3, (2, 5), FIRST, 2, is_exact), piece_s=0.05, pause_s=0.1, by_speed=False, waits=True, clip_norm=None)
    found = elastic_joins.check(plan)
    assert [each.end for each in found] == ["done"] * 8
    assert [each.joined > 0 for each in found] == [False] * FIRST + [True] * 4
    assert {each.number for each in found[FIRST:]} == {4, 5, 6, 7}
    last = found[0].history[max(found[0].history)]
    assert sorted(last) == list(range(8))


@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.slow), "bf16"])
def test_a_row_of_hosts_that_share_no_memory_joins(codec: str) -> None:
    plan = Plan(5, (1,), FIRST, 2, pause_s=0.1, waits=True, clip_norm=0.1, codec=codec)
    found = elastic_joins.check(plan, environ=ranks.UDP)
    assert [each.end for each in found] == ["done"] * 6
    assert found[FIRST].joined > 0


def begin(rank: int, timeout_s: float = 20.0) -> tuple[nn.Module, torch.optim.Optimizer, Any, Job]:
    """A job of two rows; the other processes are a row that joins."""
    timeout = timedelta(seconds=timeout_s)
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    store: Any = ranks.store()
    joins = rank >= FIRST
    if joins:
        ranks.init(rank - FIRST, 2, store=dist.PrefixStore("a row", store), timeout=timeout)
    else:
        ranks.init(rank, FIRST, timeout=timeout)
    model, optimizer, schedule = build_row(BY_TWO, int(joins))
    job = commlayer.elastic(model, optimizer, schedule=schedule, join=store if joins else None)
    return model, optimizer, schedule, job


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str, then: Callable[..., Any], *, times: int = 1) -> None:
    """Calls `then` once this function of the owner has returned so many times."""
    real, count = getattr(owner, name), 0

    def call(*given: Any, **options: Any) -> Any:
        nonlocal count
        found = real(*given, **options)
        count += 1
        if count == times:
            then()
        return found

    setattr(owner, name, call)


SELDOM = ("asked", "numbered", "has told", "receives")
PHASES: dict[str, tuple[Any, str, int]] = {
    "numbered": (Party, "name", 2),
    "asked": (newcomers, "_wait", 0),
    "met": (Rows, "make", 1),
    "has told": (Replica, "meet", 1),
    "receives": (transfer.Receiving, "pump", 3),
    "loaded": (State, "load", 1),
    "packs": (transfer.Transfers, "pack", 1),
    "sends": (transfer.Sending, "pump", 3),
}
"""Where a process dies: a function, and after how many calls of it; 0: as it is called. A party calls `name` as it is
made."""


def _trained(job: Any, model: Any, epochs: int, before: Callable[[], Any] = lambda: None) -> str:
    """Steps of 0.02 s and more; `before` is called in each. The text of a PeerLostError."""
    try:
        with job:
            sampler = job.sampler(range(64), 16, by_speed=False)
            while sampler.epoch < epochs:
                for share in sampler:
                    time.sleep(0.02)
                    before()
                    loss_of(model, share).backward()
                    job.step()
    except commlayer.PeerLostError as error:
        return str(error)
    return ""


def _die_at(rank: int, size: int, phase: str, victim: int) -> tuple[str, list[int], int, str]:
    elastic_joins.slow(0.02)
    model, optimizer, schedule, job = begin(rank)
    owner, name, times = PHASES[phase]
    if rank == victim and times:
        after(owner, name, die, times=times)
    elif rank == victim:
        setattr(owner, name, die)
    ranks.meet("begun", size)
    text = _trained(job, model, 30)
    members = [] if text else job.members
    return digest_of(model, optimizer, schedule), members, job.steps, text


@pytest.mark.parametrize(
    "phase",
    ["met", "loaded", *(pytest.param(each, marks=pytest.mark.slow) for each in SELDOM)],
)
def test_a_death_in_a_row_that_joins_costs_that_row_alone(phase: str) -> None:
    ended = ranks.outcomes(_die_at, 6, phase, 5)
    assert ended[5].exit_code == -signal.SIGKILL
    assert [each.error for each in ended[:5]] == [None] * 5
    assert "row" in ended[4].result[3]
    for rank in range(FIRST):
        digest, members, steps, text = ended[rank].result
        assert (members, steps, text) == ([0, 1, 2, 3], 120, "")
        assert digest == ended[rank % 2].result[0]


@pytest.mark.parametrize("phase", [pytest.param("packs", marks=pytest.mark.slow), "sends"])
def test_another_row_gives_the_state_when_that_of_the_giver_dies(phase: str) -> None:
    ended = ranks.outcomes(_die_at, 6, phase, 1)
    assert ended[1].exit_code == -signal.SIGKILL
    assert [ended[rank].error for rank in (0, 2, 3, 4, 5)] == [None] * 5
    assert " 1 of its row, 0, 1, died" in ended[0].result[3]
    for rank in (2, 3, 4, 5):
        digest, members, steps, text = ended[rank].result
        assert (members, steps, text) == ([2, 3, 4, 5], 120, "")
        assert digest == ended[2 + rank % 2].result[0]


def _refused(rank: int, size: int) -> list[str]:
    """The row of ranks 4 and 5 tries again and again, and is taken in at last."""
    store: Any = ranks.store()
    if rank < FIRST:
        ranks.init(rank, FIRST, timeout=timedelta(seconds=20))
    else:
        ranks.init(rank - FIRST, 2, store=dist.PrefixStore("a row", store), timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("rows", "shards"))["shards"]

    def shard(model: nn.Module, over: Any = mesh, **options: Any) -> Any:
        return fully_shard(model, mesh=over, **options)

    if rank < FIRST:
        model = shard(nn.Linear(4, 2))
        with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1)) as job:
            sampler = job.sampler(range(16), 8)
            store.set(f"open {rank}", "")
            end = 0
            while job.steps < end or not end:
                for share in sampler:
                    time.sleep(0.01)
                    model(torch.ones(len(share), 4)).sum().backward()
                    assert job.step()
                    if len(sampler.shares) > FIRST and not end:
                        end = job.steps + 3  # as the row knows, too
                    if job.steps == end:
                        break
        return [str(each) for each in job.members]
    store.wait([f"open {each}" for each in range(FIRST)])
    is_last, texts = rank == 5, []

    def ask(model: Any, batch_size: int = 8, **options: Any) -> None:
        optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
        with commlayer.elastic(model, optimizer, join=store, **options) as job:
            with pytest.raises(commlayer.ConfigError) as caught:
                job.sampler(range(16), batch_size)
            texts.append(str(caught.value))

    ask(shard(nn.Linear(4, 3 if is_last else 2)))  # only one of them, and both hear of it
    ask(shard(nn.Linear(4, 2), shard_placement_fn=lambda each: Shard(each.ndim - 1)))
    ask(shard(nn.Linear(4, 2), init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "shards"))["shards"]))
    ask(shard(nn.Linear(4, 2)), batch_size=4)
    ask(shard(nn.Linear(4, 2)), min_size=3)
    ask(shard(nn.Linear(4, 2)), optimizer=torch.optim.AdamW)
    real = torch.__version__
    torch.__version__ = "1.0"  # type: ignore[assignment]
    ask(shard(nn.Linear(4, 2)))
    torch.__version__ = real
    model = shard(nn.Linear(4, 2))
    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), join=store) as job:
        sampler = job.sampler(range(16), 8)
        end = job.steps + 3
        while job.steps < end:
            for share in sampler:
                model(torch.ones(len(share), 4)).sum().backward()
                job.step()
                if job.steps == end:
                    break
    return texts


def test_a_row_that_does_not_fit_is_refused_and_harms_nobody() -> None:
    ended = ranks.outcomes(_refused, 6)
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:FIRST]] == [list("012345")] * FIRST
    for each in ended[FIRST:]:
        for text, said in zip(
            each.result,
            [
                r"the model \(weight\) is float32\[3, 4\] .* here and float32\[2, 4\] .* in the job",
                r"the model \(weight\) is .*Shard\(dim=1\).* here and .*Shard\(dim=0\).* in the job",
                "the ranks of a row is 1 here and 2 in the job",
                "batch_size is 4 here and 8 in the job",
                "min_size is 3 here and 1 in the job",
                r"the optimizer \(AdamW\) is .* here and missing in the job",
                r"torch is 1\.0 here and ",
            ],
            strict=True,
        ):
            assert re.search(said, text), text


def _ask_a_job_without_rows(rank: int, size: int) -> None:
    store: Any = ranks.store()
    model: Any = nn.Linear(4, 2)
    if rank == 0:
        ranks.init(0, 1)
        with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1)) as job:
            for _ in job.sampler(range(8), 4):
                store.wait(["refused"])
                model(torch.ones(1, 4)).sum().backward()
                job.step()
            assert job.members == [0]
        return
    own = dist.PrefixStore("a row", store)
    for loss_bound, said in ((0.1, "WORLD has loss_bound=0.1"), (0.0, "fully_shard is used here and not used in")):
        ranks.init(0, 1, store=own, pg_options=commlayer.Options(commlayer.Policy(loss_bound=loss_bound)))
        model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refusal = pytest.raises(commlayer.ConfigError, match=said)
        with refusal, commlayer.elastic(model, optimizer, join=store) as job:
            job.sampler(range(8), 4)
        dist.destroy_process_group()
    store.set("refused", "")


def test_a_row_is_refused_by_a_job_without_rows() -> None:
    assert [each.error for each in ranks.outcomes(_ask_a_job_without_rows, 2)] == [None] * 2


def _look_for_the_key(rank: int, size: int) -> str:
    """Also the row is on a part of the job's Store."""
    store: Any = ranks.store()
    model, _, _, job = begin(rank)
    ranks.meet("begun", size)
    with job:
        sampler, end = job.sampler(range(64), 16, by_speed=False), 0
        while not end or job.steps < end:
            for share in sampler:
                if len(sampler.shares) == size and not end:
                    end = job.steps + 3  # the same on all ranks
                loss_of(model, share).backward()
                job.step()
                if job.steps == end:
                    break
    engine = Engine.current()
    assert engine is not None
    assert engine.job is not None
    after, key = stored_key("127.0.0.1", store.port), engine.job[1].hex()
    ranks.meet("end", size)
    return "the job's" if (after == key) == (rank < FIRST) else f"{after}, own {key}"


def test_tools_find_the_key_of_the_job_and_not_that_of_a_row_that_joins() -> None:
    assert ranks.run(_look_for_the_key, 6) == ["the job's"] * 6


def _with_a_store_of_its_own(rank: int, size: int) -> Any:
    """Two rows of one WORLD, on another Store than the job's; each asks by itself. Later the first rows leave."""
    store: Any = ranks.store()
    if rank < FIRST:
        ranks.init(rank, FIRST, timeout=timedelta(seconds=20))
    else:
        served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == FIRST else None
        if served is not None:
            store.set("port", str(served.port))
        own = served or dist.TCPStore("127.0.0.1", int(store.get("port")), None, False)
        dist.init_process_group("commlayer", store=own, rank=rank - FIRST, world_size=4, timeout=timedelta(seconds=20))
    joins = rank >= FIRST
    model, optimizer, schedule = build_row(BY_TWO, rank * joins)
    seen = {(dist.get_rank(), dist.get_world_size())}
    steps: list[int] = []
    elastic_joins.slow(0.02)
    with commlayer.elastic(model, optimizer, schedule=schedule, join=store if joins else None) as job:
        sampler = job.sampler(range(64), 16, by_speed=False)
        while sampler.epoch < 20 and not job.left:
            for share in sampler:
                time.sleep(0.01 if len(job.members) == 8 or joins else 0.3)
                loss_of(model, share).backward()
                if len(job.members) == 8 and not joins:
                    job.leave()  # long before the others have the state
                if job.step():
                    steps.append(len(job.members))
        seen.add((dist.get_rank(), dist.get_world_size()))
    found = digest_of(model, optimizer, schedule), job.number, job.left, job.members, job.steps, seen
    ranks.meet("end", size)
    dist.destroy_process_group()
    return found


def test_rows_of_another_store_take_over_from_those_that_leave() -> None:
    """The last row that has the state stays until another has it."""
    ended = ranks.outcomes(_with_a_store_of_its_own, 8)
    assert [each.error for each in ended] == [None] * 8
    for rank, each in enumerate(ended):
        digest, number, left, members, steps, seen = each.result
        assert seen == {(rank % FIRST, FIRST)}  # each has its own WORLD
        assert left == (rank < FIRST)
        if rank < FIRST:
            assert number == rank
            assert steps < 80
        else:
            assert members == [4, 5, 6, 7]
            assert number in members
            assert number % 2 == rank % 2
            assert steps == 80
            assert digest == ended[FIRST + rank % 2].result[0]


def _die_in_the_forward_pass(rank: int, size: int) -> tuple[list[int], str]:
    """Rank 5 does, once it computes."""
    model, _, _, job = begin(rank)
    ranks.meet("begun", size)
    text = _trained(job, model, 20, lambda: die() if (rank, job.steps) == (5, 60) else None)
    return job.members, text


def test_a_rank_of_a_row_that_has_joined_is_named_by_its_number_in_the_job() -> None:
    """FSDP2's error has its rank in the WORLD of the row."""
    ended = ranks.outcomes(_die_in_the_forward_pass, 6)
    assert ended[5].exit_code == -signal.SIGKILL
    assert [each.error for each in ended[:5]] == [None] * 5
    assert [each.result for each in ended[:FIRST]] == [([0, 1, 2, 3], "")] * FIRST
    assert " 5 of its row, 4, 5, died" in ended[4].result[1]
    assert "rank(s) 0, 1, 2, 3 go on without it, if they are enough" in ended[4].result[1]


def _join_mixed_rows(rank: int, size: int) -> tuple[str, list[int]]:
    """The ranks of the first rows, 0 and 2, and 1 and 3, do not follow each other."""
    store: Any = ranks.store()
    joins = rank >= FIRST
    if joins:
        ranks.init(rank - FIRST, 2, store=dist.PrefixStore("a row", store), timeout=timedelta(seconds=20))
    else:
        ranks.init(rank, FIRST, timeout=timedelta(seconds=20))
    rows = [[0, 1]] if joins else [[0, 2], [1, 3]]
    mesh = DeviceMesh("cpu", rows, mesh_dim_names=("rows", "shards"))["shards"]
    torch.manual_seed(joins)
    model: Any = fully_shard(nn.Linear(30, 7), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with commlayer.elastic(model, optimizer, join=store if joins else None) as job:
        sampler = job.sampler(range(64), 16, by_speed=False)
        end = 0
        while not end or job.steps < end:
            for share in sampler:
                if len(sampler.shares) == size and not end:
                    end = job.steps + 3  # the same on all ranks
                time.sleep(0.02)
                loss_of(model, share).backward()
                job.step()
                if job.steps == end:
                    break
        if rank == 4:  # FSDP2's errors have ranks of the row's WORLD
            error = commlayer.PeerLostError("one of FSDP2's")
            error.culprit = 1
            text = job._membership.world.loss(error)
            assert "rank 4: rank 5 of its row, 4, 5, died, ended or did not answer" in text
    state = [each for of in optimizer.state.values() for each in of.values()]
    found = [part_of(each).tolist() for each in (*model.parameters(), *state)]
    dist.destroy_process_group()
    return str(found), job.members


def test_each_rank_of_a_row_gets_the_state_of_its_place() -> None:
    found = ranks.run(_join_mixed_rows, 6)
    assert [members for _, members in found] == [[0, 1, 2, 3, 4, 5]] * 6
    assert found[4] == found[0] == found[1]
    assert found[5] == found[2] == found[3]
    assert found[4] != found[5]


def _one_fails(rank: int, size: int, how: str) -> tuple[list[int], str]:
    """Rank 5 fails once, and lives on. The others must not wait for it until the timeout, which is that of the test."""
    model, _, _, job = begin(rank, timeout_s=2 * ranks.TIMEOUT_S)
    real = Rows.make

    def make(self: Rows) -> None:
        Rows.make = real  # type: ignore[method-assign]
        if how == "met":
            real(self)
        if how in ("meeting", "met"):
            raise commlayer.CommError("no way to a rank, says the test")
        raise MemoryError("no room, says the test")

    def open_engine(_config: Any) -> Engine:
        raise commlayer.ConfigError("no free UDP port, says the test")

    def wait(party: Party, store: Any, *given: Any) -> None:
        def look() -> bool:
            if store.check([f"answer {party.own}"]):
                raise commlayer.OperationTimeoutError("too late, says the test")
            return False

        while not all(given[-1](look)):
            time.sleep(0.005)

    if rank == 5 and how == "late":
        vars(newcomers)["_wait"] = wait
    elif rank == 5 and how == "engine":
        Engine.private = open_engine  # type: ignore[assignment, method-assign]
    elif rank == 5:
        Rows.make = make  # type: ignore[method-assign]
    error = ""
    ranks.meet("begun", size)
    try:
        with job:
            if rank == 5 and how == "loop":
                raise MemoryError("no room, says the test")
            if rank == 5 and how == "call":
                dist.all_reduce(torch.zeros(1), group=job._membership._row)
            samples: Any = object() if rank == 5 and how == "dataset" else range(64)
            sampler = job.sampler(samples, 16, by_speed=False)
            while sampler.epoch < 20:
                for share in sampler:
                    time.sleep(0.02)
                    loss_of(model, share).backward()
                    job.step()
    except (commlayer.CommError, MemoryError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    ranks.meet("end", size)
    return ([] if error else job.members), error


@pytest.mark.parametrize("how", [pytest.param("meeting", marks=pytest.mark.slow), "met"])
def test_a_row_of_which_one_rank_fails_to_meet_the_others_asks_again(how: str) -> None:
    """Before it has made the groups, or after that."""
    ended = ranks.outcomes(_one_fails, 6, how)
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended] == [([0, 1, 2, 3, 6, 7], "")] * 6


def test_a_row_that_gives_up_as_it_is_taken_in_stops_nobody() -> None:
    ended = ranks.outcomes(_one_fails, 6, "late", environ={"COMMLAYER_PEER_TIMEOUT_S": "100"})
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:FIRST]] == [([0, 1, 2, 3], "")] * FIRST
    assert [each.result[1] for each in ended[FIRST:]] == ["OperationTimeoutError: too late, says the test"] * 2


def test_a_row_with_a_rank_that_gets_no_engine_stops_nobody() -> None:
    ended = ranks.outcomes(_one_fails, 6, "engine")
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:FIRST]] == [([0, 1, 2, 3], "")] * FIRST
    assert [each.result[1] for each in ended[FIRST:]] == ["ConfigError: no free UDP port, says the test"] * 2


@pytest.mark.parametrize(
    ("how", "said", "said_to_its_row"),
    [
        ("dataset", "ConfigError: .*object has no samples with a number", "ConfigError: .*object has no samples"),
        ("loop", "MemoryError: no room", "PeerLostError: .* this row cannot join without one of its ranks"),
        ("call", "MismatchError", "MismatchError"),
    ],
)
def test_a_row_of_which_one_rank_does_not_ask_gets_an_error(how: str, said: str, said_to_its_row: str) -> None:
    """Though the process of that rank lives on."""
    ended = ranks.outcomes(_one_fails, 6, how)
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:FIRST]] == [([0, 1, 2, 3], "")] * FIRST
    assert re.match(said, ended[5].result[1]), ended[5].result
    assert re.match(said_to_its_row, ended[4].result[1]), ended[4].result


def test_a_row_with_a_rank_that_cannot_go_on_stops_nobody() -> None:
    ended = ranks.outcomes(_one_fails, 6, "memory")
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:FIRST]] == [([0, 1, 2, 3], "")] * FIRST
    assert ended[5].result[1] == "MemoryError: no room, says the test"
    assert "of its row, 4, 5, gave up (MemoryError: no room" in ended[4].result[1]


def _waits_in_vain(rank: int, size: int) -> str:
    """The row of ranks 4 and 5 asks as the loops end, or no job takes it."""
    store: Any = ranks.store()
    _, _, _, job = begin(rank)
    if rank < FIRST:
        with job:
            job.sampler(range(64), 16)
            store.set(f"open {rank}", "")
            store.wait(["asked 4", "asked 5"])
            time.sleep(0.3)  # the row waits by then; if it does not, the job has ended all the same
        return ""
    vars(membership)["JOIN_S"] = 20.0 if rank == 4 else 0.5
    store.wait([f"open {each}" for each in range(FIRST)])
    with job:
        store.set(f"asked {rank}", "")
        with pytest.raises(commlayer.CommError) as caught:
            job.sampler(range(64), 16)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_row_whose_job_ends_or_does_not_answer_gets_one_error() -> None:
    ended = ranks.outcomes(_waits_in_vain, 6)
    assert [each.error for each in ended] == [None] * 6
    assert ended[4].result == ended[5].result
    assert re.match("(ClosedError: the job has ended|OperationTimeoutError: the job did not take)", ended[4].result)
