"""`commlayer.verl` by verl's interface: on verl itself where it is installed (`make rollouts`), else on what the engine
uses of it. Read in verl 0.9.1: verl/checkpoint_engine/base.py and nccl_checkpoint_engine.py."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.errors import CommError, ConfigError, MismatchError, OperationTimeoutError
from examples.hosts import compare
from tests import ROOT
from tests.process.test_metrics import free_port

HAS_VERL = importlib.util.find_spec("verl") is not None


class CheckpointEngine:
    """The base class, without its abstract methods."""


class CheckpointEngineRegistry:
    """verl's registry."""

    engines: dict[str, type] = {}  # noqa: RUF012

    @staticmethod
    def register(backend: str) -> Any:
        return lambda engine: CheckpointEngineRegistry.engines.setdefault(backend, engine)

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls.engines[backend](*args, **kwargs)


async def ensure_async_iterator(items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def get_free_port(address: str) -> tuple[int, None]:
    with socket.socket() as found:
        found.bind((address, 0))
        return found.getsockname()[1], None


STAND_IN: dict[str, dict[str, Any]] = {
    "ray": {"util": ModuleType("ray.util")},
    "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
    "verl": {},
    "verl.checkpoint_engine": {},
    "verl.checkpoint_engine.base": {
        "CheckpointEngine": CheckpointEngine,
        "CheckpointEngineRegistry": CheckpointEngineRegistry,
    },
    "verl.utils": {},
    "verl.utils.net_utils": {"get_free_port": get_free_port},
    "verl.workers": {},
    "verl.workers.rollout": {},
    "verl.workers.rollout.utils": {"ensure_async_iterator": ensure_async_iterator},
}


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    """verl, or the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_VERL:
            for name, content in STAND_IN.items():
                module = ModuleType(name)
                vars(module).update(content)
                patch.setitem(sys.modules, name, module)
            sys.modules["ray"].util = sys.modules["ray.util"]  # type: ignore[attr-defined]
        yield
        sys.modules.pop("commlayer.verl", None)


class Job:
    """Two ranks of an actor and two workers of a rollout, in one process, called as by CheckpointEngineManager."""

    def __init__(self, **settings: Any) -> None:
        __import__("commlayer.verl")  # what custom_backend_module does
        registry = sys.modules["verl.checkpoint_engine.base"].CheckpointEngineRegistry
        settings = {"bucket_size": 1 << 20, "timeout_s": 20.0, **settings}
        self.actor = [registry.new("commlayer", is_master=rank == 0, **settings) for rank in range(2)]
        self.rollout = [registry.new("commlayer", **settings) for _ in range(2)]
        self.walked = 0

    def update(self, weights: dict[str, Tensor], step: int | None = None) -> list[dict[str, Tensor]]:
        """One update. What each worker has received."""
        engines = [*self.actor, *self.rollout]
        metadata = [engine.prepare() for engine in engines]
        told = type(engines[0]).build_topology(2, 2, metadata)
        for side, arguments in zip((self.actor, self.rollout), told, strict=True):
            for at, engine in enumerate(side):
                engine.init_process_group(**{name: values[at] for name, values in arguments.items()})
        found = asyncio.run(self._moved(weights, step))
        for engine in engines:
            engine.finalize()
        return found

    async def _moved(self, weights: dict[str, Tensor], step: int | None) -> list[dict[str, Tensor]]:
        def walk() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.items():
                yield name, tensor.clone()  # gathered: the memory is another one each time
            self.walked += 1

        async def loaded(engine: Any) -> dict[str, Tensor]:
            return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}

        sent = [engine.send_weights(walk(), global_steps=step) for engine in self.actor]
        _, _, *found = await asyncio.gather(*sent, *(loaded(engine) for engine in self.rollout))
        return found

    def close(self) -> None:
        for engine in self.rollout:
            if engine._follower is not None:
                engine._follower.close()
        if self.actor[0]._publisher is not None:
            self.actor[0]._publisher.close(0.0)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(address=f"127.0.0.1:{free_port()}")
    yield made
    made.close()


def weights(seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(37, 64, generator=chance).bfloat16(),
        "norm.weight": torch.randn(64, generator=chance),
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_every_worker_gets_each_update_and_every_rank_of_the_actor_walks_it(job: Job) -> None:
    for update, step in enumerate((None, 0, 0, 7)):  # verl's steps may stand still
        now = weights(update)
        assert all(same(found, now) for found in job.update(now, step))
        assert job.walked == 2 * (update + 1)


def test_the_second_update_is_a_difference(job: Job) -> None:
    now = weights(0)
    job.update(now)
    now["embed.weight"][0, 0] += 1
    job.update(now)
    version = job.rollout[0]._follower._version
    assert not version.is_whole
    assert version.received_bytes < 200


def test_a_changed_shape_is_an_error_of_the_actor_and_the_next_update_works(job: Job) -> None:
    now = weights(0)
    job.update(now)
    for engine in job.rollout:
        engine._follower._timeout_s = 0.5
    with pytest.raises(MismatchError, match=r"norm.weight: float32\[65\] now"):
        job.update({**now, "norm.weight": torch.zeros(65)})
    assert all(same(found, now) for found in job.update(now))


def test_a_version_that_never_comes_is_an_error(job: Job) -> None:
    job.update(weights(0))
    worker = job.rollout[0]
    worker._follower._timeout_s = 0.5
    worker.init_process_group(**job.actor[0].prepare())

    async def received() -> list[Any]:
        return [item async for item in worker.receive_weights()]

    with pytest.raises(OperationTimeoutError, match=r"version 2 .*holds version 1"):
        asyncio.run(received())


def test_an_actor_that_begins_anew_is_followed(job: Job) -> None:
    for update in range(3):
        job.update(weights(update))
    job.actor[0]._publisher.close(0.0)
    again = Job(address=job.actor[0]._address)
    again.rollout = job.rollout
    now = weights(9)
    assert all(same(found, now) for found in again.update(now))
    again.close()


def test_the_address_is_that_of_the_node_which_needs_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    job = Job(secret_file=str(secret))
    now = weights(0)
    assert all(same(found, now) for found in job.update(now))
    job.close()
    with pytest.raises(CommError, match="without a secret"):
        Job(address="192.0.2.1:29600").update(now)


def test_another_order_of_calls_is_an_error(job: Job) -> None:
    async def received() -> list[Any]:
        return [item async for item in job.rollout[0].receive_weights()]

    with pytest.raises(ConfigError, match="init_process_group"):
        asyncio.run(received())


@pytest.mark.timeout(400)
def test_verls_manager_updates_workers_of_ray(tmp_path: Path) -> None:
    if not HAS_VERL:
        pytest.skip("verl is not installed; make rollouts runs this")
    environ = {**os.environ, **compare.RAY, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.process.verl_job", str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=360, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    assert "VERL JOB PASSED" in ended.stdout
