"""Reinforcement learning with rollout workers: they follow the trainer's weights, and send samples back.

    pip install transformers pyzmq
    python examples/rl_rollout.py          # a trainer and two rollout workers on this host, CPUs only

The model is a GPT-2 with random weights, and its reward made up: the share of even tokens among those that it
generates. The trainer takes a step of REINFORCE with the samples of both workers, and publishes the bfloat16 weights.
For each version it prints how many bytes a worker got beside those of a whole copy, and compares the workers' bits with
its own.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import commlayer

VOCABULARY, PROMPT, NEW_TOKENS, SAMPLES = 64, 4, 16, 32
WORKERS = 2
PATIENCE_S = 120.0


def make() -> GPT2LMHeadModel:
    """The model of trainer and workers; dropout off, so that all compute the same policy."""
    size = {"n_positions": PROMPT + NEW_TOKENS, "n_embd": 128, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **size, **dropout)
    return GPT2LMHeadModel(config)


def bits_of(model: torch.nn.Module) -> str:
    """A hash of all parameters and buffers, bit by bit."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def rollout(address: str, worker: int, samples: Any) -> None:
    """A worker: generates with each version that it gets, until the trainer closes."""
    torch.manual_seed(worker + 1)
    torch.set_num_threads(1)
    model = make().bfloat16().eval()
    for version in commlayer.subscribe(address):
        version.apply(model)
        prompts = torch.randint(VOCABULARY, (SAMPLES, PROMPT))
        tokens = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        samples.put((version.number, version.received_bytes, version.is_whole, bits_of(model), tokens.tolist()))


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """The share of even tokens among the generated ones, of each sample."""
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(1)


def train(address: str, steps: int, rate: float, samples: Any) -> list[float]:
    """The trainer: float32 weights, of which it publishes a bfloat16 copy. Returns the mean reward of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    master, published, rewards = make(), make().bfloat16(), []
    optimizer = torch.optim.AdamW(master.parameters(), lr=rate)
    with commlayer.publish(published, address) as publisher:
        whole_bytes = sum(tensor.nbytes for tensor in published.parameters())
        for step in range(steps):
            published.load_state_dict(master.state_dict())  # rounds to bfloat16
            publisher.commit(step)
            got = [samples.get(timeout=PATIENCE_S) for _ in range(WORKERS)]
            ours = bits_of(published)
            if any((number, bits) != (step, ours) for number, _, _, bits, _ in got):
                raise RuntimeError(f"version {step}: a worker has other weights than the trainer")
            tokens = torch.tensor([row for *_, rows in got for row in rows])
            reward = reward_of(tokens)
            rewards.append(reward.mean().item())
            received, how = got[0][1], "whole" if got[0][2] else "difference"
            print(
                f"version {step}: {received:,} bytes ({how}), a whole copy has {whole_bytes:,}; bits equal; "
                f"reward {rewards[-1]:.3f}",
                flush=True,
            )
            logits = master(tokens[:, :-1]).logits[:, PROMPT - 1 :]
            chances = logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None]).sum((1, 2))
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            optimizer.zero_grad()
            (-(advantage * chances).mean()).backward()
            optimizer.step()
    return rewards


def main() -> None:
    """The trainer, with its workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--address", default="127.0.0.1:29600", help="where the trainer publishes (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-4, help="AdamW's learning rate (default %(default)s)")
    options = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    samples = spawned.Queue()
    workers = [
        spawned.Process(target=rollout, args=(options.address, worker, samples), daemon=True)
        for worker in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    rewards = train(options.address, options.steps, options.rate, samples)
    for worker in workers:
        worker.join()
    print(f"mean reward: {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last")


if __name__ == "__main__":
    main()
