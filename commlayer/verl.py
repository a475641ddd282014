"""A checkpoint engine of verl (0.9) that publishes the actor's weights to the rollout workers: a name in its settings.

    actor_rollout_ref.rollout.checkpoint_engine.backend=commlayer
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=commlayer.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.commlayer.secret_file=FILE

verl's workers import this module, which registers the engine. After the first update the workers receive differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import get_free_port
from verl.workers.rollout.utils import ensure_async_iterator

from .errors import ConfigError
from .weights.follower import Follower
from .weights.publisher import Publisher, publish
from .weights.subscription import Version


@CheckpointEngineRegistry.register("commlayer")
class Engine(CheckpointEngine):  # type: ignore[misc]  # mypy does not see verl
    """One in each process of the actor and of the rollout. Rank 0 of the actor publishes; each rollout worker follows.

    The n-th update is version n, whatever verl's steps are. Every worker loads this version, or raises.
    """

    def __init__(
        self,
        bucket_size: int = 0,  # noqa: ARG002  # verl's; parts of an answer have a size of their own
        is_master: bool = False,
        address: str | None = None,
        secret_file: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`address`: host:port at which rank 0 of the actor publishes; None: that of its node, and a free port.
        `secret_file`: on all nodes; None: COMMLAYER_SECRET_FILE. `timeout_s`: the longest wait of a worker for a
        version, from the moment when the actor begins to gather it."""
        self._is_master = is_master
        self._address = address
        """Where the actor publishes; a worker is told."""
        self._secret_file = secret_file
        self._timeout_s = timeout_s
        self._version = 0
        """At the actor that of the update; at a worker the one that it is to load."""
        self._state: dict[str, Tensor] = {}
        """What is published: copies in CPU memory."""
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None
        self._thread = ThreadPoolExecutor(1, "commlayer")
        """A worker waits in this thread, so that its event loop goes on."""

    def prepare(self) -> dict[str, Any]:
        """At rank 0 of the actor: where it publishes, and the version of this update. Elsewhere nothing."""
        if not self._is_master:
            return {}
        if self._address is None:
            host = ray.util.get_node_ip_address().strip("[]")
            port, _ = get_free_port(host)
            self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._version += 1
        return {"address": self._address, "version": self._version}

    @classmethod
    def build_topology(
        cls, actor_size: int, rollout_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for actor and rollout: what `prepare` returned at the actor's rank 0."""
        told = metadata[0]
        actor, rollout = ({name: [told[name]] * size for name in told} for size in (actor_size, rollout_size))
        return actor, rollout

    def init_process_group(self, address: str, version: int) -> None:
        """Tells a process where the actor publishes, and the version of this update."""
        if self._follower is not None and (address != self._address or version <= self._version):
            self._thread.submit(self._follower.close)  # the actor began anew
            self._follower = None
        self._address, self._version = address, version

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:  # noqa: ARG002
        """Publishes the tensors that the generator yields, by name. All ranks of the actor walk it, because each tensor
        is gathered from all of them.

        Raises ConfigError as `commlayer.publish`, and MismatchError if names, types or shapes have changed.
        """
        found: dict[str, Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self._is_master:
                found[name] = _kept(self._state.get(name), tensor)
        if not self._is_master:
            return
        self._state.clear()
        self._state.update(found)
        if self._publisher is None:
            self._publisher = publish(self._state, str(self._address), secret_file=self._secret_file)
        self._publisher.commit(self._version)

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """The tensors of this update's version by name, on the worker's device. They may change with the next update.

        Raises ConfigError as `commlayer.subscribe`, and the errors of `Follower.take`.
        """
        version = await asyncio.get_running_loop().run_in_executor(self._thread, self._take)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device("cpu") if accelerator is None else accelerator
        for name, tensor in version.tensors().items():
            yield name, tensor.to(device)

    def _take(self) -> Version:
        if self._address is None or self._version == 0:
            raise ConfigError("receive_weights() before init_process_group(): call them in verl's order")
        if self._follower is None:
            self._follower = Follower(self._address, secret_file=self._secret_file, timeout_s=self._timeout_s)
        return self._follower.take(self._version)

    def finalize(self) -> None:
        """Nothing: connections and versions stay, so that the next update is a difference."""


def _kept(before: Tensor | None, tensor: Tensor) -> Tensor:
    """A copy of a tensor in CPU memory: in that of the copy before, if it fits."""
    tensor = tensor.detach()
    if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
        return tensor.to("cpu", copy=True)
    return before.copy_(tensor)
