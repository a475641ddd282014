"""Workers of vLLM (0.32, 0.33) that load published weights: an engine of its weight transfer, found by its name.

    vllm serve MODEL --weight-transfer-config '{"backend": "commlayer"}'

vLLM finds it by the entry point `vllm.general_plugins` of this package. The trainer publishes, and tells vLLM by vLLM's
own calls which version to load:

    publisher = commlayer.publish(model, "trainer:29600")
    client = HTTPVLLMWeightSyncClient("http://rollout:8000")
    client.init_weight_transfer_engine({"address": "trainer:29600"})

    publisher.commit(step)
    client.start_weight_update()
    client.update_weights({"version": step})
    client.finish_weight_update(weight_version=str(step))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from .errors import CommError, ConfigError, MismatchError
from .weights.follower import Follower
from .weights.subscription import Version

_T = TypeVar("_T")


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not see vllm
    """What `init_weight_transfer_engine` is given: the arguments of `commlayer.subscribe`."""

    address: str
    secret_file: str | None = None
    """A path on the workers' hosts; None: COMMLAYER_SECRET_FILE."""
    timeout_s: float = 30.0
    """For the publisher, and for a version."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `update_weights` is given."""

    version: int
    """That of `commit`."""


class Engine(WeightTransferEngine):  # type: ignore[misc]
    """One for each worker: it follows the publisher, and gives whole tensors by name to the model's `load_weights`.

    Workers that divide a model load the same version, or none: if one of them does not get it, all raise the error,
    and all keep the weights that they have.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # a draft model has other weights than those that are published

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._follower: Follower | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begins to follow the publisher; called again, another one. Raises ConfigError as `commlayer.subscribe`."""
        self.shutdown()
        self._follower = Follower(init_info.address, secret_file=init_info.secret_file, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Has the layers collect what they load, as vLLM's own engines do."""
        for layer in self.model.modules():
            collected = get_layerwise_info(layer)
            if collected.can_load():  # an update that failed has left a part of its weights
                collected.loaded_weights.clear()
                collected.load_numel = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the version that `update_info` names. Returns when it is in the model's memory."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Waits for the version, and loads it.

        Raises the errors of `Follower.take`, and MismatchError if the model cannot load the version. Where only another
        worker has failed, it raises CommError with that one's text. vLLM's own version then stays what it was.
        """
        version = _together(lambda: self._take(update_info.version))
        _together(lambda: self._load(version))

    def _take(self, number: int) -> Version:
        if self._follower is None:
            raise ConfigError(
                'vLLM follows no publisher yet: call init_weight_transfer_engine({"address": "HOST:PORT"}) first'
            )
        return self._follower.take(number)

    def _load(self, version: Version) -> None:
        try:
            self.model.load_weights(self._copies(version))
        except Exception as error:
            raise MismatchError(
                f"vLLM's {type(self.model).__name__} cannot load version {version.number}, and may have old and new "
                f"weights now: generate nothing before an update succeeds. Publish tensors with the names and shapes "
                f"of a checkpoint of this model. vLLM says: {type(error).__name__}: {error}"
            ) from error

    def _copies(self, version: Version) -> Iterator[tuple[str, Tensor]]:
        """The tensors, on the model's device. On a CPU, too: the model must not keep the follower's memory."""
        for name, tensor in version.tensors().items():
            yield name, tensor.to(self.device, copy=True)

    def finish_weight_update(self) -> None:
        """Completes the layers; vLLM tells the version after this."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Ends the connection."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def _together(act: Callable[[], _T]) -> _T:
    """The result of what all workers of a model do. If it fails on one of them, all raise an error."""
    error: Exception | None = None
    try:
        result = act()
    except Exception as caught:
        error = caught
    group = get_world_group().cpu_group
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, error and f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for worker, failure in enumerate(failures):
        if failure is not None:
            raise CommError(f"worker {worker} of this model has failed, and so has the update. It says: {failure}")
    return result
