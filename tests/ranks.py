"""Runs a function as the N ranks of a job, each in a process of its own.

    def body(rank: int, size: int) -> float: ...         # at module level: it is sent by name
    results = ranks.run(body, 4)                         # raises RanksError, with every rank's traceback

    @ranks.on(4)                                         # a test that is the body, with its other parameters
    def test_body(rank: int, size: int, name: str) -> None: ...

The processes are forked from a server that has imported torch and commlayer, so that a test does not pay for N imports.
No module of commlayer reads the environment, or starts a thread, on import. A Store for the job lives in the parent;
`init(rank, size, backend)` joins it.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import ROOT

NETWORK = {"COMMLAYER_SHM": "0"}
"""The environment of ranks that share no memory: each is a host."""
UDP = {**NETWORK, "COMMLAYER_IFNAME": "lo"}
"""The same, on loopback alone."""


def _on_wires(test: Any) -> Any:
    import pytest  # not above: this file is in the bundle of `make gpu`, for machines without it

    return pytest.mark.parametrize("wire", [{}, UDP], ids=["shm", "udp"])(test)


WIRES = _on_wires
"""The wires of tests `on` ranks with environ="wire"."""

TIMEOUT_S = 150.0
_PORT = "RANKS_STORE_PORT"

_CLONE_NEWNET = 0x40000000

_inits = itertools.count()
_kept: dist.Store | None = None

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", "torch.nn.parallel", "torch._dynamo", "numpy", "commlayer", "pytest", "hypothesis"]
)


@dataclasses.dataclass
class Outcome:
    """How one rank's process ended."""

    result: Any = None
    error: str | None = None
    """The traceback of the function's error, or how the process died."""
    exit_code: int | None = None
    """None: still running at the timeout, and killed."""


class RanksError(AssertionError):
    """At least one rank raised, died or did not end."""


def run(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    """Calls `function(rank, size, *args)` on every rank; returns the results in rank order. Options: of `outcomes`."""
    return results(outcomes(function, size, *args, **options), ())


def run_job(
    function: Callable[..., Any], size: int, *args: Any, backend: str = "commlayer", **options: Any
) -> list[Any]:
    """The same as `run`, within a `job`."""
    return run(_in_job, size, backend, function, *args, **options)


run_gloo = functools.partial(run_job, backend="gloo")


def _in_job(rank: int, size: int, backend: str, function: Callable[..., Any], *args: Any) -> Any:
    with job(rank, size, backend):
        return function(rank, size, *args)


@dataclasses.dataclass
class _Body:
    """The function that `on` made a test of: sent by the test's name."""

    module: str
    test: str

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.test).body(rank, size, *args)


def on(
    size: int, runner: Callable[..., Any] = run, *, environ: Mapping[str, str] | str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a body: `runner` calls it on every rank. `environ` may name the parameter that holds it."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())[2:]
        names = [parameter.name for parameter in parameters]
        if isinstance(environ, str):
            parameters.append(inspect.Parameter(environ, inspect.Parameter.KEYWORD_ONLY))

        def test(**given: Any) -> None:
            environment = given[environ] if isinstance(environ, str) else environ
            runner(_Body(body.__module__, body.__name__), size, *(given[name] for name in names), environ=environment)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        vars(test).update(body=body, __signature__=inspect.Signature(parameters))
        return test

    return decorate


def outcomes(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    places: Sequence[str] | None = None,
) -> list[Outcome]:
    """The same as `run`, but a failure is a result: for tests of failures.

    `places` names a network namespace for each rank: ranks in different ones are on different hosts.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = {**(environ or {}), _PORT: str(store.port)}
    ended = [Outcome() for _ in range(size)]
    processes = []
    running: dict[multiprocessing.connection.Connection, int] = {}
    for rank in range(size):
        here, there = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main, args=(there, environment, places[rank] if places else None, function, rank, size, args)
        )
        process.start()
        there.close()
        processes.append(process)
        running[here] = rank
    deadline = time.monotonic() + timeout_s
    while running and (left := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait(list(running), left):
            assert isinstance(ready, multiprocessing.connection.Connection)
            rank = running.pop(ready)
            with contextlib.suppress(EOFError):  # it died before it could say anything
                ended[rank].result, ended[rank].error = ready.recv()
    for rank in running.values():
        ended[rank].error = f"did not end within {timeout_s:g} s; its stacks are on stderr"
        _signal(processes[rank].pid, signal.SIGUSR1)
    if running:
        time.sleep(1.0)  # for the stacks
    for rank, process in enumerate(processes):
        if rank in running.values():
            process.kill()
        process.join(10.0)
        if process.is_alive():
            ended[rank].error = ended[rank].error or "returned, but its process did not end within 10 s"
            process.kill()
            process.join()
        elif rank not in running.values():
            ended[rank].exit_code = process.exitcode
            if process.exitcode != 0:
                ended[rank].error = ended[rank].error or f"died with exit code {process.exitcode}"
    return ended


def results(ended: Sequence[Outcome], killed: Collection[int]) -> list[Any]:
    """In rank order; None of those in `killed` that a SIGKILL has ended. Raises RanksError for any other end."""
    errors = [
        f"rank {rank}: {outcome.error}"
        for rank, outcome in enumerate(ended)
        if outcome.error and not (rank in killed and outcome.exit_code == -signal.SIGKILL)
    ]
    if errors:
        raise RanksError("\n".join(errors))
    return [outcome.result for outcome in ended]


def init(rank: int, size: int, backend: str = "commlayer", **options: Any) -> None:
    """`init_process_group` with the Store of this `run`, a fresh part of it at each call."""
    import commlayer  # noqa: F401  # registers the backend

    options.setdefault("timeout", timedelta(seconds=30))
    options.setdefault("store", dist.PrefixStore(f"init {next(_inits)}", store()))
    dist.init_process_group(backend, rank=rank, world_size=size, **options)


def store() -> dist.Store:
    """A connection to the Store of this `run`: a new one, but in a namespace, from where there is no way to it."""
    if _kept is not None:
        return _kept
    return dist.TCPStore("127.0.0.1", int(os.environ[_PORT]), None, False, timedelta(seconds=100))


def meet(name: str, size: int) -> None:
    """Waits until `size` ranks have come to `name`, without an operation of a group, which an abort could fail."""
    here = store()
    if here.add(name, 1) == size:
        here.set(f"{name}: all", "")
    here.wait([f"{name}: all"])


def payload_sent(run: Callable[[], object], times: int = 5) -> int:
    """Bytes of data that `run` sends on this rank: the least of several runs, as one may include retransmissions."""
    import commlayer

    sent = []
    for _ in range(times):
        dist.barrier()
        before = commlayer.stats()["payload_bytes_sent"]
        run()
        dist.barrier()
        sent.append(commlayer.stats()["payload_bytes_sent"] - before)
    return min(sent)


def logged() -> list[str]:
    """The messages that commlayer logs in this process from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commlayer").addHandler(handler)
    return texts


def script_environ(**more: str) -> dict[str, str]:
    """The environment of a script that imports this checkout, wherever it is."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def torchrun(script: Path, *arguments: str, restarts: int = 0, **environ: str) -> str:
    """Runs a script as two ranks of torchrun; returns their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", str(script), *arguments]
    environment = script_environ(**environ)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextlib.contextmanager
def job(rank: int, size: int, backend: str = "commlayer", **options: Any) -> Iterator[None]:
    """A job within `with`: init, and destroy when it ended well."""
    init(rank, size, backend, **options)
    yield
    dist.destroy_process_group()


def _main(
    pipe: multiprocessing.connection.Connection,
    environ: Mapping[str, str],
    place: str | None,
    function: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.freeze()  # a collection would write to, and so copy, all that the server has imported
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    if place is not None:
        _move(place)
    with contextlib.suppress(BrokenPipeError):  # the parent was killed, or interrupted: nobody reads it
        try:
            pipe.send((function(rank, size, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _move(place: str) -> None:
    """Moves into a network namespace. A socket stays in the one it was made in: so the Store's is made before."""
    global _kept
    _kept = store()
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with open(f"/var/run/netns/{place}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {place}")


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
