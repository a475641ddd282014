"""`commlayer top` and a live job."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import commlayer
from commlayer.tools import cli
from commlayer.tools.top.client import NoAnswerError
from commlayer.tools.top.options import connect, first
from tests import event_files, ranks
from tests.process.test_metrics import free_port

SLOW = 2
"""The rank that computes slowly."""


PATIENCE_S = 60.0
"""The longest wait of a test for a state of the job."""
TIMEOUT_S = 250.0


def store() -> str:
    return f"127.0.0.1:{os.environ[ranks._PORT]}"


def train(rank: int, is_over: Callable[[], bool]) -> None:
    """Steps with a hook, each of which waits for the slow rank, until it is over on one rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 10)))
    state = commlayer.HookState(commlayer.Policy(codec="int8", loss_bound=0.01))
    model.register_comm_hook(state, commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    go_on = torch.ones(1)
    while go_on.item() > 0:
        time.sleep(0.08 if rank == SLOW else 0.01)
        model(torch.randn(4, 200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        go_on.fill_(float(not is_over()))
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)


def watched(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        found: list[Any] = []
        watch = threading.Thread(target=lambda: found.append(look(size)))
        if rank == 0:
            watch.start()
        train(rank, lambda: rank == 0 and not watch.is_alive())
        if rank == 0:
            watch.join()
            assert found == ["looked"]


def tells_the_slow_rank(view: dict[str, Any], size: int) -> bool:
    """Whether all ranks have made steps, the slow one is named, and waits least."""
    if view["job"]["live"] < size or not all(rank["steps"] for rank in view["ranks"]) or not view["job"]["slowest"]:
        return False
    exposed, late = ([rank[name] or 0.0 for rank in view["ranks"]] for name in ("exposed_step_s", "late_step_s"))
    waits_least = all(waits_s[SLOW] < min(waits_s[:SLOW]) for waits_s in (exposed, late))
    return bool(view["job"]["slowest"]["rank"] == SLOW and waits_least)


def patient(ask: Callable[[], Any], is_enough: Callable[[Any], bool]) -> Any:
    """The first answer that is enough."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_enough(found := ask()):
        assert time.monotonic() < end_s, found
        time.sleep(0.2)
    return found


def look(size: int) -> str:
    """Looks in a thread of rank 0, while the job trains."""
    client = connect(store(), None, None, None)
    view = patient(lambda: first(client), lambda view: tells_the_slow_rank(view, size))  # a busy machine slows others
    client.close()
    job = view["job"]
    assert (job["live"], job["world"], job["unheard"]) == (size, size, [])
    assert job["step_s"] >= 0.05  # the slow rank sleeps 0.08 s, in which another may begin its own step late
    assert 0.01 < job["exposed_step_s"] < job["step_s"]
    assert 0 < job["late_step_s"] <= job["exposed_step_s"]
    assert job["policies"] == ["int8, loss bound 0.01"]
    for rank, sample in enumerate(view["ranks"]):
        assert sample["rank"] == rank
        assert sample["sent_bytes_s"] > 1000
        assert {path["peer"] for path in sample["paths"]} == set(range(size)) - {rank}
        assert sum(path["sent"] for path in sample["paths"]) > 10
        assert [interface["interface"] for interface in sample["interfaces"]] == ["lo"]

    printed = patient(
        lambda: CliRunner().invoke(cli.app, ["top", "--store", store(), "--once", "--paths"]),
        lambda printed: "slowest peer: rank " in printed.stdout,
    )
    assert printed.exit_code == 0
    assert max(map(len, printed.stdout.splitlines())) <= 80
    printed = CliRunner().invoke(cli.app, ["top", "--store", store(), "--once", "--json", "-"])
    assert len(json.loads(printed.stdout)["ranks"]) == size

    check_scalars(size)

    host, port = os.environ["COMMLAYER_TOP"].split(":")
    stranger = connect(None, f"{host}:{port}", "00" * 16, None)
    with pytest.raises(NoAnswerError):
        stranger.view(timeout_s=0.5)
    stranger.close()
    return "looked"


def check_scalars(size: int) -> None:
    """The scalars that TensorBoard reads, of the job and of each rank."""
    event_files.provide()
    with tempfile.TemporaryDirectory() as folder:
        printed = CliRunner().invoke(cli.app, ["top", "--store", store(), "--once", "--tensorboard", folder])
        assert printed.exit_code == 0, printed.output
        found = event_files.read(Path(folder))
    assert {f"sent_bytes_s/rank {rank:02}" for rank in range(size)} <= set(found)
    (step,) = found["job/step_s"]
    assert step.step > 0
    assert step.value > 0.01
    assert all(scalar.step == step.step for scalars in found.values() for scalar in scalars)


def test_a_live_job_is_watched() -> None:
    environ = {"COMMLAYER_TOP": f"127.0.0.1:{free_port()}", "COMMLAYER_SHM": "0"}
    ranks.run(watched, 3, timeout_s=TIMEOUT_S, environ=environ)


def unwatched(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        train(rank, lambda: True)
        assert "zmq" not in sys.modules
        assert not [thread.name for thread in threading.enumerate() if "top" in thread.name]
        with pytest.raises(ValueError, match="gives no samples; start it with COMMLAYER_TOP"):
            connect(store(), None, None, None)


def test_a_job_without_the_variable_has_no_part_of_it() -> None:
    ranks.run(unwatched, 3, environ=ranks.NETWORK)


def with_secret(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        if rank == 0:
            client = connect(store(), None, None, None)  # the variable names the file
            assert first(client)["job"]["live"] >= 1
            client.close()
            path = os.environ.pop("COMMLAYER_SECRET_FILE")
            stranger = connect(store(), None, None, None)
            with pytest.raises(NoAnswerError):
                stranger.view(timeout_s=0.5)
            stranger.close()
            os.environ["COMMLAYER_SECRET_FILE"] = path
        dist.barrier()


def test_the_store_alone_does_not_open_a_job_with_a_secret(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    environ = {"COMMLAYER_TOP": f"127.0.0.1:{free_port()}", "COMMLAYER_SECRET_FILE": str(secret)}
    ranks.run(with_secret, 2, environ=environ)


def again(rank: int, size: int) -> None:
    """A second WORLD of the same processes has another key. A command that has watched the first one follows."""
    clients = []
    for _ in range(2):
        with ranks.job(rank, size):
            dist.barrier()
            if rank == 0:
                clients.append(connect(store(), None, None, None))
                for client in clients:
                    assert first(client)["job"]["live"] >= 1
            dist.barrier()
    for client in clients:
        client.close()


def test_a_new_world_is_watched_with_its_own_key() -> None:
    ranks.run(again, 2, environ={"COMMLAYER_TOP": f"127.0.0.1:{free_port()}"})


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["ctl", *arguments, "--store", store(), "--json", "-", "--timeout", "60"])


def has_all_changes(sample: dict[str, Any]) -> bool:
    hook = sample["hooks"][0]
    return (hook["loss_bound"], hook["codec"], hook["priority"]) == (0.05, "int4", 2)


def changes() -> list[int]:
    """Changes the job's settings in a thread of rank 0, while it trains; returns the steps of the changes."""
    client = connect(store(), None, None, None)
    patient(lambda: first(client), lambda view: view["job"]["live"] == 3 and view["job"]["policies"])
    steps = []
    for name, value in (("loss-bound", "0.05"), ("codec", "int4"), ("priority", "2")):
        result = asked(name, value)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["applied"], found["ranks"], len(found["steps"])) == (True, 3, 1)
        steps += found["steps"]
    for name, value, error in (
        ("codec", "sign", "give HookState(optimizer=...)"),
        ("loss-bound", "0.9", "loss_bound"),
        ("pause", "eth9", "its interfaces are lo"),
        ("pause", "lo", "no other interface would be left"),
    ):
        result = asked(name, value)
        assert result.exit_code == 1
        assert error in json.loads(result.stdout)["error"]
    patient(lambda: first(client), lambda view: all(map(has_all_changes, view["ranks"])))
    result = asked("resume", "lo")  # nothing is paused, and the change comes about
    assert result.exit_code == 0
    client.close()
    return steps


def changed(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        found: list[list[int]] = []
        watch = threading.Thread(target=lambda: found.append(changes()))
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(500, 100))
        state = commlayer.HookState()
        model.register_comm_hook(state, commlayer.allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if rank == 0:
            watch.start()
        go_on, history = torch.ones(1), []
        while go_on.item() > 0:
            torch.manual_seed(1000 * rank + state.steps)
            model(torch.randn(4, 500)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((state.steps, state.policy))
            go_on.fill_(float(rank != 0 or watch.is_alive()))
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
            time.sleep(0.005 * rank)
        histories: list[Any] = [None] * size
        dist.all_gather_object(histories, history)
        assert histories[1:] == [history] * (size - 1)  # every step had the same policy on all ranks
        for parameter in model.parameters():
            least, most = parameter.detach().clone(), parameter.detach().clone()
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            assert torch.equal(least, most)
        if rank == 0:
            watch.join()
            assert found, "see the traceback of the thread"
            policies = [policy for _, policy in history]
            starts = [history[i][0] - 1 for i in range(1, len(history)) if policies[i] != policies[i - 1]]
            assert found[0][:3] == starts


def test_a_live_job_is_changed_on_all_ranks_at_one_step() -> None:
    environ = {"COMMLAYER_TOP": f"127.0.0.1:{free_port()}", "COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}
    ranks.run(changed, 3, timeout_s=TIMEOUT_S, environ=environ)
