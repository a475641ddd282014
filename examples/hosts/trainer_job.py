"""Hugging Face Trainer, with a small GPT-2. `ddp_backend` takes known names only, but a group that is there counts."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 40, (128, 1), generator=generator)
    tokens = (starts + torch.arange(24)) % 64
    return [{"input_ids": token, "labels": token} for token in tokens]


def main(backend: str | None) -> None:
    if backend:  # the one line for commlayer
        dist.init_process_group(backend)
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=8,
            max_steps=12,
            logging_steps=3,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        data: Any = dataset()
        trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data[:32])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
        total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
        print(json.dumps({"backend": dist.get_backend(), "losses": losses, "sum": total}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
