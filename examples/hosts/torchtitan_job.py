"""torchtitan: its Trainer with a tiny Llama 3, by FSDP2 on four ranks, then by FSDP2 x TP on two by two."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

WORDS = 256


def batches(*, dp_rank: int, job_config: JobConfig, **_: Any) -> Iterator[Any]:
    """Sequences that count upwards, so that the next token can be learned."""
    generator = torch.Generator().manual_seed(dp_rank)
    while True:
        starts = torch.randint(0, WORDS, (job_config.training.local_batch_size, 1), generator=generator)
        tokens = (starts + torch.arange(job_config.training.seq_len + 1)) % WORDS
        yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def train(tensor_parallel: int) -> tuple[list[float], float]:
    """The losses, and the sum of the parameters."""
    config = JobConfig()
    config.model.name, config.model.flavor = "tiny", "llama3"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 64, 8
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps, config.metrics.log_freq, config.debug.seed = 1, 1, 0
    config.parallelism.tensor_parallel_degree = tensor_parallel
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as config.job.dump_folder:
        trainer = Trainer(config)
        trainer.metrics_processor.log = lambda _, loss, *__, **___: losses.append(loss)
        trainer.train()
    parameters: Any = trainer.model_parts[0].parameters()
    return losses, sum(parameter.full_tensor().double().sum().item() for parameter in parameters)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        dist.Backend.default_device_backend_map["cpu"] = sys.argv[1]  # the one line for commlayer
    spec = get_train_spec("llama3")
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, batches
    spec.model_args = {"llama3": TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=WORDS)}
    register_train_spec("tiny", spec)
    runs = [train(1), train(2)]
    result = {"losses": [loss for losses, _ in runs for loss in losses], "sum": [total for _, total in runs]}
    print(json.dumps({"backend": dist.get_backend(), **result}))
    dist.destroy_process_group()
