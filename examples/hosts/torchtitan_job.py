"""torchtitan's Trainer: a tiny Llama 3 by FSDP2 and by FSDP2 x TP, a tiny DeepSeek V3 with experts on four ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from examples.hosts.titan_batches import Batches


def train(model: Any, overrides: list[str], **degrees: int) -> tuple[list[float], float]:
    """The losses, and the sum of the parameters."""
    losses: list[float] = []
    model.model.layers = model.model.layers[:2]
    with tempfile.TemporaryDirectory() as folder:
        config = Trainer.Config(
            model_spec=model,
            loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model)),
            dataloader=Batches.Config(),
            optimizer=default_adamw(lr=1e-3),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
            training=TrainingConfig(seq_len=64, steps=4, mixed_precision_param="float32", disable_cuda_graphs=True),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
            metrics=MetricsProcessor.Config(log_freq=1),
            debug=DebugConfig(seed=0),
            override=OverrideConfig(imports=overrides),
            dump_folder=folder,
        )
        config.tokenizer = SimpleNamespace(build=lambda **_: None)
        trainer = Trainer(config)
        trainer.metrics_processor.log = lambda _, loss, *__, **___: losses.append(float(loss))
        trainer.train()
    return losses, sum(each.full_tensor().double().sum().item() for each in trainer.model_parts[0].parameters())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        dist.Backend.default_device_backend_map["cpu"] = sys.argv[1]  # the one line for commlayer
    ours = dist.Backend.default_device_backend_map["cpu"] == "commlayer"
    by_host = ["commlayer.torchtitan.dispatch_by_host"] if ours else []
    runs = [
        train(llama3.model_registry("debugmodel"), []),
        train(llama3.model_registry("debugmodel"), [], tensor_parallel_degree=2),
        train(deepseek_v3.model_registry("debugmodel"), by_host, expert_parallel_degree=4),
    ]
    result = {"losses": [loss for losses, _ in runs for loss in losses], "sum": [total for _, total in runs]}
    print(json.dumps({"backend": dist.get_backend(), **result}))
    dist.destroy_process_group()
