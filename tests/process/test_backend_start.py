"""Ranks that cannot start, or not with each other: all learn it at once, with the value, the rank and the remedy."""

import gc
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.config import Config
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.transport.native import Engine
from tests import ranks

AT_ONCE_S = 25.0
"""The time that a busy test machine may take; the timeout, 30 s, is longer."""

HOST = socket.gethostname()


class Refusal(NamedTuple):
    kind: str
    text: str
    seconds: float


def _start(rank: int, size: int, environs: Sequence[Mapping[str, str]]) -> Refusal:
    os.environ.update(environs[rank])
    start = time.monotonic()
    with pytest.raises(commlayer.CommError) as caught:
        ranks.init(rank, size)
    return Refusal(type(caught.value).__name__, str(caught.value), time.monotonic() - start)


def start(*environs: Mapping[str, str]) -> list[Refusal]:
    """The refusal that each rank gets at the start, in an environment of its own."""
    refusals: list[Refusal] = ranks.run(_start, len(environs), environs)
    assert all(refusal.seconds < AT_ONCE_S for refusal in refusals), refusals
    return refusals


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"COMMLAYER_IFNAME": "nosuch0"}, "COMMLAYER_IFNAME=nosuch0 matches no usable network interface; "),
        ({"COMMLAYER_PORTS": "77"}, "COMMLAYER_PORTS=77: use a whole number, 1 to 8 (sockets)"),
        (
            {"GLOO_SOCKET_IFNAME": "nosuch0"},
            "GLOO_SOCKET_IFNAME=nosuch0: gloo, which does the other operations, cannot use nosuch0 (",
        ),
        (
            {"COMMLAYER_PROTS": "7"},
            "COMMLAYER_PROTS=7: there is no such setting; did you mean COMMLAYER_PORTS? known: ",
        ),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_rank_that_cannot_start_tells_the_others_why(environ: dict[str, str], text: str) -> None:
    others = [{}, environ, {}]
    first, wrong, last = start(*others)
    assert wrong.kind == "ConfigError"
    assert wrong.text.startswith(f"rank 1 of group '0': {text}")
    for outcome in (first, last):
        assert outcome.kind == "CommError"
        reason = wrong.text.removeprefix("rank 1 of group '0': ")
        assert outcome.text == f"rank 1 of group '0' on {HOST} could not start: {reason}"


def _serves_the_store(rank: int, size: int) -> str:
    meeting = ranks.store()
    if rank == 0:
        os.environ["COMMLAYER_PORTS"] = "77"
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        meeting.wait([f"connected {other}" for other in range(1, size)])  # as torch's env:// does
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), size, False)
        meeting.set(f"connected {rank}", "1")
        time.sleep(0.2)
    try:
        ranks.init(rank, size, store=store)
    except commlayer.CommError as error:
        if rank == 0:
            os._exit(1)  # and the Store is gone
        return str(error)
    return ""


def test_a_rank_that_serves_the_store_stays_until_the_others_know() -> None:
    _, *others = ranks.outcomes(_serves_the_store, 4)
    for other in others:
        assert other.error is None
        reason = "COMMLAYER_PORTS=77: use a whole number, 1 to 8 (sockets)"
        assert other.result == f"rank 0 of group '0' on {HOST} could not start: {reason}"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"COMMLAYER_AUTH": "header"}, "full on rank(s) 0, 2; header on rank(s) 1"),
        ({"COMMLAYER_AUTH": "off"}, "full on rank(s) 0, 2; off on rank(s) 1"),
        ({"COMMLAYER_CREDIT_BYTES": "65536"}, "0 on rank(s) 0, 2; 65536 on rank(s) 1"),
        ({"COMMLAYER_DISABLE": "1"}, "False on rank(s) 0, 2; True on rank(s) 1"),
        ({"COMMLAYER_WIRE": "ofi", "COMMLAYER_OFI_PROVIDER": "udp"}, "udp on rank(s) 0, 2; ofi on rank(s) 1"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_ranks_with_other_settings_are_refused(
    request: pytest.FixtureRequest, environ: dict[str, str], told: str
) -> None:
    variable = next(iter(environ))
    if variable == "COMMLAYER_WIRE":
        request.getfixturevalue("libfabric")
    for environs in ({}, ranks.UDP):
        for outcome in start(environs, environs | environ, environs):
            assert outcome.kind == "ConfigError"
            assert outcome.text == f"{variable} differs within group '0': {told}; set the same on every rank"


def test_ranks_with_another_secret_are_refused(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append({**ranks.UDP, "COMMLAYER_SECRET_FILE": str(tmp_path / f"secret {number}")})
        (tmp_path / f"secret {number}").write_bytes(bytes([number // 2]) * 32)
    first, second, third = start(*files)
    assert (first.kind, second.kind, third.kind) == ("ConfigError",) * 3
    assert "SECRET_FILE is another one on rank(s) 2, or" in first.text
    assert "SECRET_FILE is another one on rank(s) 2, or" in second.text
    assert "SECRET_FILE is another one on rank(s) 0, 1, or" in third.text
    assert ["on rank(s) 1, or" in outcome.text for outcome in start({}, files[0])] == [True, False]
    ranks.run(_of_different_mtu, 3, [""] * 3, environ=files[0])
    (tmp_path / "secret 0").write_text("short\n")
    assert "it has 5 bytes; use at least 16" in start(files[0], files[0])[0].text
    (tmp_path / "secret 0").unlink()
    assert "No such file" in start(files[0], files[0])[0].text


def _of_different_mtu(rank: int, size: int, mtus: Sequence[str]) -> int:
    os.environ["COMMLAYER_MTU"] = mtus[rank]
    with ranks.job(rank, size):
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        for group in (None, *pairs):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                for numel in (10, 1000, 100_000):
                    tensor = torch.ones(numel)
                    dist.all_reduce(tensor, group=group)
                    assert torch.equal(tensor, torch.full((numel,), float(dist.get_world_size(group))))
        dist.barrier()
        world: Any = dist.group.WORLD
        return int(world.packet_bytes)


def test_ranks_may_have_different_mtus() -> None:
    assert ranks.run(_of_different_mtu, 3, ["1500", "1000", "0"], environ=ranks.UDP) == [928] * 3


def _policies(rank: int, size: int, policies: Sequence[dict[str, Any]]) -> Refusal:
    ranks.init(rank, size)
    start = time.monotonic()
    with pytest.raises(commlayer.MismatchError) as caught:
        dist.new_group(pg_options=commlayer.Options(commlayer.Policy(**policies[rank])))
    refusal = Refusal(type(caught.value).__name__, str(caught.value), time.monotonic() - start)
    group = dist.new_group()  # after a refusal all goes on
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group()
    return refusal


@pytest.mark.parametrize("environ", [{}, ranks.UDP], ids=["one host", "network"])
@pytest.mark.parametrize(
    ("policies", "told"),
    [
        (({"loss_bound": 0.1}, {"loss_bound": 0.2}), "loss_bound differs within group '1': 0.1 on rank(s) 0; 0.2 on"),
        (({}, {"treatment": "zero"}), "treatment differs within group '1': feedback on rank(s) 0; zero on"),
        (({"algorithm": "ring"}, {}), "algorithm differs within group '1': ring on rank(s) 0; auto on"),
    ],
)
def test_ranks_with_other_policies_are_refused(
    environ: dict[str, str], policies: Sequence[dict[str, Any]], told: str
) -> None:
    for outcome in ranks.run(_policies, 2, policies, environ=environ):
        assert outcome.text == f"Policy.{told} rank(s) 1; set the same on every rank"
        assert outcome.seconds < AT_ONCE_S


def _pair(rank: int, size: int) -> list[str]:
    """The refusals of two groups of ranks 1 and 2: rank 2 does not come to the first, and has another policy in the
    second."""
    texts = []
    for name, patience_s in (("late", 1), ("other", 30)):
        if rank == 1 or (rank == 2 and name == "other"):
            store, timeout = dist.PrefixStore(name, ranks.store()), timedelta(seconds=patience_s)
            policy = commlayer.Policy(loss_bound=rank / 10)
            with pytest.raises(commlayer.CommError) as caught:
                CommProcessGroup(store, rank - 1, 2, timeout, name, [1, 2], policy)
            texts.append(str(caught.value))
        ranks.meet(name, size)
    return texts


def test_refusals_of_a_subgroup_name_ranks_of_the_job() -> None:
    none, first, second = ranks.run(_pair, 3)
    assert none == []
    late, differ = first
    assert late.startswith("rank 1 of group 'late': rank(s) 2 did not reach step 'describe' of the start within 1 s")
    told = "0.1 on rank(s) 1; 0.2 on rank(s) 2; set the same on every rank"
    assert second == [differ] == [f"Policy.loss_bound differs within group 'other': {told}"]


@pytest.mark.parametrize("backend", ["commlayer", "cpu:commlayer,cuda:commlayer", "cpu:commlayer,cuda:nccl"])
@ranks.on(2)
def test_a_group_may_be_bound_to_a_gpu(rank: int, size: int, backend: str) -> None:
    """torch asks for the backend of `device_id` while it makes the group, before it knows its configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        ranks.init(rank, size, backend, device_id=torch.device("cuda", 0))
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 4
        dist.destroy_process_group()


@ranks.on(2, ranks.run_job)
def test_a_destroyed_group_is_freed_at_once(rank: int, size: int) -> None:
    """Nothing in the transport keeps it, nor the memory of its operations, without the garbage collector."""
    gc.collect()
    gc.disable()
    group: Any = dist.new_group()
    dist.all_reduce(torch.ones(10), group=group)
    dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
    found = weakref.ref(group), weakref.ref(group._submitter)
    dist.destroy_process_group(group)
    del group
    assert [reference() for reference in found] == [None, None]
    gc.enable()


@ranks.on(3)
def test_another_world_in_the_same_store_leaves_this_one_alone(rank: int, size: int) -> None:
    """Rank 2 has one of its own, made while the other two have theirs."""
    store = ranks.store()
    own = dist.PrefixStore("another job", store)
    if rank < 2:
        ranks.init(rank, 2, store=store)
        store.set(f"made {rank}", "")
        store.wait(["another"])
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
    else:
        store.wait(["made 0", "made 1"])
        ranks.init(0, 1, store=own)
        store.set("another", "")
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@ranks.on(3)
def test_a_process_with_a_world_is_in_a_group_of_another_one(rank: int, size: int) -> None:
    """On a further engine, which it keeps when it makes the next group."""
    store = ranks.store()
    if rank < 2:
        ranks.init(rank, 2, store=store)
        store.set(f"made {rank}", "")
    else:
        store.wait(["made 0", "made 1"])
        ranks.init(0, 1, store=dist.PrefixStore("another job", store))
    further = Engine.private(Config()) if rank == 2 else None
    for name in ("first", "second"):
        part = dist.PrefixStore(name, store)
        group = CommProcessGroup(part, rank, size, timedelta(seconds=20), name, range(size), engine=further)
        values = torch.full((1000,), float(rank))
        group.allreduce([values]).wait()
        assert values.eq(3).all()
        group.shutdown()
    if further is not None:
        further.release()
    own = torch.ones(1)
    dist.all_reduce(own)
    assert own.item() == (1 if rank == 2 else 2)
    dist.destroy_process_group()
