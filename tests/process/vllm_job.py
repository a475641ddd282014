"""vLLM on a CPU, beside a trainer in the same process: `python -m tests.process.vllm_job FOLDER ADDRESS WORKERS`.

The weights of each version are other ones, so that a worker with those of another version is noticed: the log
probabilities of a prompt must be those of transformers' model.
"""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

import commlayer

PROMPT = [1, 2, 3, 4, 5]
TOLERANCE = 0.1
"""Of log probabilities, about -3 to -8, in bfloat16."""


class Job:
    """A trainer's model, and vLLM."""

    def __init__(self, folder: str, address: str, workers: int) -> None:
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            architectures=["LlamaForCausalLM"],
        )
        config.save_pretrained(folder)
        self.model = LlamaForCausalLM(config).bfloat16()
        self.address = address
        self.vllm = LLM(
            folder,
            load_format="dummy",  # random weights, others than the trainer's
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=32,
            max_num_seqs=2,
            dtype="bfloat16",
            tensor_parallel_size=workers,
            weight_transfer_config=WeightTransferConfig(backend="commlayer"),
        )

    def change(self, seed: int) -> None:
        """Other weights at the trainer."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)

    def follow(self, timeout_s: float = 20.0) -> None:
        self.vllm.init_weight_transfer_engine({"init_info": {"address": self.address, "timeout_s": timeout_s}})

    def update(self, version: int) -> None:
        self.vllm.start_weight_update()
        self.vllm.update_weights({"update_info": {"version": version}})
        self.vllm.finish_weight_update(weight_version=str(version))

    def distance(self) -> float:
        """The largest difference of vLLM's log probabilities of the prompt from those of the trainer's model."""
        self.vllm.reset_prefix_cache()
        asked = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
        (found,) = self.vllm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
        ours = [next(iter(row.values())).logprob for row in found.prompt_logprobs[1:]]
        with torch.no_grad():
            rows = self.model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
        theirs = [rows[at, token].item() for at, token in enumerate(PROMPT[1:])]
        return float(max(abs(our - their) for our, their in zip(ours, theirs, strict=True)))


def main(folder: str, address: str, workers: int) -> None:
    job = Job(folder, address, workers)
    job.follow(timeout_s=5.0)
    with commlayer.publish(job.model, address) as publisher:
        for version in range(3):
            job.change(version)
            assert job.distance() > TOLERANCE, "the check is blind"
            publisher.commit(version)
            job.update(version)
            assert job.distance() < TOLERANCE
            assert job.vllm.get_weight_version() == str(version)
        job.vllm.start_weight_update()
        with pytest.raises(Exception, match=r"version 7 of .* did not come within 5.0 s; this reader holds version 2"):
            job.vllm.update_weights({"update_info": {"version": 7}})
        publisher.close(0.0)
    if workers == 1:  # with more, vLLM takes late replies to this call for those to the next ones
        after_an_error(job)
    print("VLLM JOB PASSED", flush=True)


def after_an_error(job: Job) -> None:
    """A state that vLLM cannot load, then one that it can."""
    renamed = {name.replace("layers.1.", "layers.9."): tensor for name, tensor in job.model.state_dict().items()}
    with commlayer.publish(renamed, job.address) as publisher:
        publisher.commit(3)
        job.follow()
        with pytest.raises(Exception, match=r"LlamaForCausalLM cannot load version 3.*layers\.9"):
            job.update(3)
        assert job.vllm.get_weight_version() == "2"
        publisher.close(0.0)
    job.change(4)
    with commlayer.publish(job.model, job.address) as publisher:
        publisher.commit(4)
        job.follow()
        job.update(4)
        assert job.distance() < TOLERANCE
        assert job.vllm.get_weight_version() == "4"
        publisher.close(0.0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
