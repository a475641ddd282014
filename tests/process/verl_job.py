"""verl's CheckpointEngineManager on CPUs: two ranks of an actor, and two workers of a rollout, as actors of Ray.

`python -m tests.process.verl_job FOLDER`: the engine is chosen by its name, and publishes at the address of the node.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

RANKS = 2


def weights(step: int) -> dict[str, Tensor]:
    """Those of a step: a tenth of the values changes with each."""
    model = torch.randn(300, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    model[step % 10 :: 10] += step
    return {"layer.weight": model, "norm.weight": torch.full((100,), float(step))}


class Actor(Worker):  # type: ignore[misc]
    """A rank of the actor, which trains nothing."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        settings = config.engine_kwargs[config.backend]
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0, bucket_size=1 << 20, **settings
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int, mode: str) -> Any:
        """Sends the weights of a step; step 13 fails."""
        assert mode == "commlayer"
        if global_steps == 13:
            raise ValueError("the actor has failed")
        return await self.checkpoint_engine.send_weights(iter(weights(global_steps).items()), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Server:
    """What a rollout worker hands weights to."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    async def update_weights(self, weights: Any, *, wire_format: str, **_: Any) -> None:
        assert wire_format == "named_tensors"
        self.weights = {name: tensor.clone() async for name, tensor in weights}


class RolloutWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker, with a server that keeps the weights."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__(SimpleNamespace(checkpoint_engine=config, name="vllm"), None, Server())

    def has(self, step: int) -> bool:
        """Whether the server has the weights of this step, and no others."""
        found, expected = self.server_adapter.weights, weights(step)
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    def was_difference(self) -> bool:
        """Whether the latest version came as a difference."""
        return not self.checkpoint_engine._follower._version.is_whole


class Replica:
    """A server of requests, of which there are none."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def _nothing(self, **_: Any) -> None: ...

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing


def group(cls: type, config: CheckpointEngineConfig) -> Any:
    """Ray's actors of a class."""
    pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def main(folder: str) -> None:
    secret = Path(folder) / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    config = CheckpointEngineConfig(
        backend="commlayer",
        custom_backend_module="commlayer.verl",
        engine_kwargs={"commlayer": {"secret_file": str(secret), "timeout_s": 5.0}},
    )
    ray.init(num_cpus=2 * RANKS, include_dashboard=False)
    actor, rollout = group(Actor, config), group(RolloutWorker, config)
    manager = CheckpointEngineManager(config, actor, [Replica([worker]) for worker in rollout.workers])
    for step in range(3):
        manager.update_weights(global_steps=step)
        assert all(ray.get([worker.has.remote(step) for worker in rollout.workers]))
    assert all(ray.get([worker.was_difference.remote() for worker in rollout.workers]))
    with pytest.raises(ray.exceptions.RayTaskError, match=r"the actor has failed|did not come within"):
        manager.update_weights(global_steps=13)
    manager.update_weights(global_steps=5)
    assert all(ray.get([worker.has.remote(5) for worker in rollout.workers]))
    ray.shutdown()
    print("VERL JOB PASSED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
