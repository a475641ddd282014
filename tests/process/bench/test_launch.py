"""The bench from end to end, as a user starts it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.bench import launch, worker
from commlayer.tools.bench.spec import BackendSpec, Spec
from tests import ROOT, ranks

needs_root = pytest.mark.needs_root
SHORT = ["--rounds", "2", "--iters", "6", "--warmup", "2"]


def bench(*arguments: str, before: tuple[str, ...] = ("-m", "commlayer")) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *before, "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


def test_standard_output_has_the_figures_alone() -> None:
    done = bench("all_reduce", "--backends", "gloo", "--sizes", "4K", "--json", "-", *SHORT)
    assert done.returncode == 0, done.stderr
    assert [result["size_bytes"] for result in json.loads(done.stdout)["results"]] == [4096]
    assert "0 OK" in done.stderr


def test_two_ranks_of_gloo(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench("all_reduce", "--backends", "gloo", "--sizes", "4K,1000", "--json", str(out), *SHORT)
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in rows(done.stdout)] == ["4096", "1000"]
    assert "0 OK" in done.stdout

    document: dict[str, Any] = json.loads(out.read_text())
    assert document["ranks"] == 2
    assert document["link"] is None
    assert document["wrong"] == 0
    assert document["command"][:3] == ["commlayer", "bench", "all_reduce"]
    assert [result["size_bytes"] for result in document["results"]] == [4096, 1000]
    for result in document["results"]:
        assert result["samples"] == 12
        assert len(result["rounds_us"]) == 2
        assert 0 < result["min_us"] <= result["p50_us"] <= result["p99_us"] <= result["max_us"]
        assert result["busbw_gb_s"] == result["algbw_gb_s"] > 0
        assert result["cpu_process_s_per_gb"] > 0
        assert result["speedup"] == 1.0
        assert result["tcp_congestion_control"]  # gloo's connections were found and asked


def _measured(rank: int, size: int, spec: str, port: int) -> tuple[int, str, str]:
    """The exit status and the output of a rank that the bench has started."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(io.StringIO()) as said:
        status = worker.run(Spec.from_json(spec))
    return status, shown.getvalue(), said.getvalue()


def measured(backends: str, size_bytes: int, **given: Any) -> list[tuple[int, str, str]]:
    """The same as `bench`, in two processes that need not import torch."""
    named = tuple(map(BackendSpec.parse, backends.split(",")))
    spec = Spec(named, (size_bytes,), rounds=2, iters=6, warmup=2, **given)
    environ = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return ranks.run(_measured, 2, spec.to_json(), launch.free_port(), environ=environ)


def test_one_wrong_element_in_one_run_fails(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = measured("gloo,corrupting", 4096, imports=("tests.process.bench.corrupting",), json_path=str(out))
    assert [status for status, *_ in found] == [1, 1]
    assert "FAILED" in found[0][1]
    wrong = {result["backend"]: result["wrong"] for result in json.loads(out.read_text())["results"]}
    assert wrong["gloo"] == 0
    # rank 1's element, which the later runs of the stretch spread to both ranks
    assert wrong["corrupting"] == 2


def test_unknown_backend_is_a_clear_error() -> None:
    done = bench("--backends", "gloo,nonesuch", "--sizes", "4K", *SHORT)
    assert done.returncode == 2
    assert "cannot create backend 'nonesuch'" in done.stderr
    remedy = "; use commlayer or gloo, or name with --import the module that registers 'nonesuch'\n"
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--timeout", "0.0001"), "(--timeout 0.0001: give more seconds)"),
        (("--import", "nosuchmod"), "--import 'nosuchmod': ModuleNotFoundError: No module named 'nosuchmod'"),
    ],
)
def test_an_impossible_run_ends_with_one_line(given: tuple[str, ...], says: str) -> None:
    done = bench("--backends", "gloo", "--sizes", "16M", *SHORT, *given)  # a rank may wait in gloo for one that failed
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert any(line.startswith("commlayer bench: rank ") and line.endswith(says) for line in said), done.stderr
    assert "Traceback" not in done.stderr


def test_under_torchrun_the_ranks_that_are_there_are_used() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "commlayer")
    done = bench("--backends", "gloo", "--sizes", "4K", *SHORT, before=torchrun)
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 1
    assert "2 ranks" in done.stdout


LOSSY = """
hosts = 2
[[nic]]
rate_bps = 200e6
loss = 0.02
"""


def emulated(tmp_path: Path, scenario: str, *arguments: str) -> Any:
    """The results of `bench gradients` on an emulated network."""
    (tmp_path / "scenario.toml").write_text(scenario)
    out = tmp_path / "out.json"
    done = bench("gradients", "--scenario", str(tmp_path / "scenario.toml"), "--json", str(out), *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(out.read_text())


@pytest.mark.slow
@needs_root
def test_the_losses_of_the_network_are_found_in_the_results(tmp_path: Path) -> None:
    bound = "commlayer:loss_bound=0.05"
    variants = ["commlayer", bound, *(f"{bound}:treatment={how}" for how in ("rescale", "zero:partial_results=True"))]
    content = emulated(tmp_path, LOSSY, "--backends", ",".join(variants), "--sizes", "4M", *SHORT)
    for result in content["results"]:
        assert result["wrong"] == 0
        assert result["packets"]["packets_lost"] > 0
        lossy = result["backend"] != "commlayer"
        assert (result["packets"]["packets_given_up"] > 0) is lossy
        assert (0 < result["not_counted"] < 0.05) is lossy


DYING = """
hosts = 2
[[nic]]
rate_bps = 200e6
[[nic]]
rate_bps = 200e6
[[event]]
at_s = 0.5
action = "link_down"
host = 1
nic = 1
"""
"""The bench talks to its ranks through NIC 0."""


@pytest.mark.slow
@needs_root
def test_the_timetable_begins_with_the_measurement(tmp_path: Path) -> None:
    arguments = "--backends commlayer --sizes 1M --rounds 1 --iters 60"
    content = emulated(tmp_path, DYING, *arguments.split())
    [event], [result] = content["events"], content["results"]
    assert "link_down at host 1, NIC 1" in event["event"]
    [began_s] = result["began_s"]
    assert began_s[0] < event["at_s"] < began_s[-1] + 60
    assert len(result["iterations_us"][0]) == 60
