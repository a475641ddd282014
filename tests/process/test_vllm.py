"""`commlayer.vllm`: on what the engine uses of vLLM, and on vLLM itself where it is installed (`make rollouts`).

Read and run in vLLM 0.32.0: vllm/distributed/weight_transfer/base.py and factory.py, vllm/v1/worker/gpu_worker.py and
vllm/model_executor/model_loader/reload/layerwise.py.
"""

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlayer
from commlayer.errors import CommError, ConfigError, MismatchError, OperationTimeoutError
from tests import ROOT, ranks
from tests.process.test_metrics import free_port

SIZE = 2


class WeightTransferEngine:
    """vLLM's base class: what the engine uses of it."""

    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.model_config, self.device, self.model = config, vllm_config.model_config, device, model

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)


@dataclasses.dataclass
class Info:
    """The base class of what the calls are given."""


class Collected:
    """What a layer has of the weights of an update: vLLM's `LayerReloadingInfo`."""

    def __init__(self) -> None:
        self.load_numel, self.is_open = 0, False
        self.loaded_weights: list[tuple[str, Tensor]] = []

    def can_load(self) -> bool:
        return self.is_open


class Model(nn.Module):
    """A layer of which this worker has half of the rows. As in vLLM, it takes weights once all of them are there."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.collected = rank, Collected()
        self.q, self.k = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            part = tensor.chunk(SIZE)[self.rank]
            if name not in own:
                raise ValueError(f"no parameter {name}")
            self.collected.loaded_weights.append((name, part))
            self.collected.load_numel += part.numel()
            if self.collected.load_numel == sum(tensor.numel() for tensor in own.values()):
                for loaded, values in self.collected.loaded_weights:
                    own[loaded].data.copy_(values)
                self.collected = Collected()


def open_layers(model: Model) -> None:
    model.collected.is_open = True


@contextmanager
def stand_in() -> Iterator[Any]:
    """`commlayer.vllm` beside the classes above, registered as vLLM's plugins are."""
    registered: dict[str, tuple[str, str]] = {}
    reload: Any = ModuleType("reload")
    reload.initialize_layerwise_reload = open_layers
    reload.finalize_layerwise_reload = lambda *_: None
    layerwise: Any = SimpleNamespace(get_layerwise_info=lambda layer: layer.collected)
    factory = SimpleNamespace(register_engine=lambda name, *place: registered.setdefault(name, place))
    base = {"WeightTransferEngine": WeightTransferEngine, "WeightTransferInitInfo": Info}
    parts: dict[str, Any] = {
        **{f"vllm{name}": ModuleType(name) for name in ("", ".distributed", ".model_executor")},
        "vllm.distributed.parallel_state": SimpleNamespace(
            get_world_group=lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
        ),
        "vllm.distributed.weight_transfer": SimpleNamespace(WeightTransferEngineFactory=factory),
        "vllm.distributed.weight_transfer.base": SimpleNamespace(**base, WeightTransferUpdateInfo=Info),
        "vllm.model_executor.model_loader": ModuleType("model_loader"),
        "vllm.model_executor.model_loader.reload": reload,
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, part in parts.items():
            patch.setitem(sys.modules, name, part)
        patch.delitem(sys.modules, "commlayer.vllm", raising=False)
        (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="commlayer")
        plugin.load()()
        module, name = registered["commlayer"]
        yield getattr(importlib.import_module(module), name)
        del sys.modules["commlayer.vllm"]


@contextmanager
def worker(rank: int) -> Iterator[Any]:
    """An engine of a worker of a replica."""
    with stand_in() as engine:
        made = engine(None, SimpleNamespace(model_config=None), torch.device("cpu"), Model(rank))
        yield made
        made.shutdown()


def state(version: int) -> dict[str, Tensor]:
    return {
        name: torch.randn(8, 8, generator=torch.Generator().manual_seed(version)) + at for at, name in enumerate("qk")
    }


def agreed_address(rank: int) -> str:
    """An address for the publisher, the same on all ranks."""
    port = [free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    return f"127.0.0.1:{port[0]}"


def update(engine: Any, version: int) -> None:
    """One update, as vLLM's worker makes it."""
    dist.barrier()
    engine.start_weight_update()
    engine.update_weights({"version": version})
    engine.finish_weight_update()


def has(engine: Any, rank: int, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(engine.model.get_parameter(name), expected[name].chunk(SIZE)[rank]) for name in expected)


@contextmanager
def published(rank: int, tensors: dict[str, Tensor], address: str) -> Iterator[Any]:
    """A publisher, at rank 0."""
    if rank != 0:
        yield None
        dist.barrier()
        return
    with commlayer.publish(tensors, address) as publisher:
        yield publisher
        dist.barrier()
        publisher.close(0.0)


def follow(engine: Any, address: str, timeout_s: float = 20.0) -> None:
    engine.init_transfer_engine(engine.parse_init_info({"address": address, "timeout_s": timeout_s}))


@ranks.on(SIZE, ranks.run_gloo)
def test_workers_load_their_parts_of_each_version(rank: int, size: int) -> None:
    with worker(rank) as engine:
        address, now = agreed_address(rank), state(0)
        with published(rank, now, address) as publisher:
            follow(engine, address)
            for version in range(4):
                for name, tensor in state(version).items():
                    now[name].copy_(tensor)
                if publisher:
                    publisher.commit(version)
                update(engine, version)
                assert has(engine, rank, now)


@ranks.on(SIZE, ranks.run_gloo)
def test_a_version_that_does_not_come_leaves_all_workers_as_they_were(rank: int, size: int) -> None:
    with worker(rank) as engine:
        address, now = agreed_address(rank), state(0)
        with published(rank, now, address) as publisher:
            follow(engine, address, timeout_s=2.0)
            if publisher:
                publisher.commit(0)
            update(engine, 0)
            with pytest.raises(OperationTimeoutError, match=r"version 1 .* within 2.0 s.*holds version 0"):
                update(engine, 1)
            assert has(engine, rank, now)
            if publisher:
                publisher.commit(1)
            update(engine, 1)


@ranks.on(SIZE, ranks.run_gloo)
def test_one_worker_that_fails_fails_the_update_of_all(rank: int, size: int) -> None:
    with worker(rank) as engine:
        address, now = agreed_address(rank), state(0)
        with published(rank, now, address) as publisher:
            follow(engine, address if rank == 0 else f"127.0.0.1:{free_port()}", timeout_s=1.0)
            if publisher:
                publisher.commit(0)
            text = r"worker 1 .*UnreachableError: no publisher" if rank == 0 else r"^no publisher at 127.0.0.1"
            with pytest.raises(CommError, match=text):
                update(engine, 0)
            assert has(engine, rank, {name: torch.zeros(8, 8) for name in now})
            follow(engine, address)
            update(engine, 0)
            assert has(engine, rank, now)


@ranks.on(SIZE, ranks.run_gloo)
def test_a_load_that_failed_half_way_leaves_nothing_to_the_next_one(rank: int, size: int) -> None:
    with worker(rank) as engine:
        address, wrong = agreed_address(rank), state(1)
        with published(rank, {"q": wrong["q"], "other": wrong["k"]}, address) as publisher:
            follow(engine, address)
            if publisher:
                publisher.commit(3)
            with pytest.raises(MismatchError, match=r"Model cannot load version 3.*ValueError: no parameter other"):
                update(engine, 3)
        address, now = agreed_address(rank), state(2)
        with published(rank, now, address) as publisher:
            follow(engine, address)
            if publisher:
                publisher.commit(1)
            update(engine, 1)
            assert has(engine, rank, now)


@ranks.on(SIZE, ranks.run_gloo)
def test_the_model_keeps_no_memory_of_the_follower(rank: int, size: int) -> None:
    with worker(rank) as engine:
        address = agreed_address(rank)
        given: list[Tensor] = []
        engine.model.load_weights = lambda weights: given.extend(tensor for _, tensor in weights)
        with published(rank, state(0), address) as publisher:
            follow(engine, address)
            if publisher:
                publisher.commit(0)
            update(engine, 0)
            held = engine._follower.take(0).tensors().values()
            assert {tensor.data_ptr() for tensor in held}.isdisjoint(tensor.data_ptr() for tensor in given)


@ranks.on(SIZE, ranks.run_gloo)
def test_an_update_before_an_address_is_an_error(rank: int, size: int) -> None:
    with worker(rank) as engine, pytest.raises(ConfigError, match="call init_weight_transfer_engine"):
        update(engine, 0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_itself_generates_with_the_published_weights(workers: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; make rollouts runs this")
    environ = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.process.vllm_job", str(tmp_path), f"127.0.0.1:{free_port()}", str(workers)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=360, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    assert "VLLM JOB PASSED" in ended.stdout
