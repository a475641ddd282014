"""Trains a small GPT of megatron-core: its tensor and pipeline parallelism, its DDP, its distributed optimizer.

    torchrun --nproc-per-node 4 -m examples.megatron.job --tp 2 --backend commlayer
    torchrun --nproc-per-node 4 -m examples.megatron.job --pp 2 --backend commlayer --segments classes
    torchrun --nproc-per-node 4 -m examples.megatron.job --ep 4 --backend commlayer --by_host

The shim lets it run on the CPU; a job on GPUs leaves it out. `make megatron` installs megatron-core, and compares the
losses of several runs. See docs/megatron.md.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

import commlayer  # registers the backend "commlayer"
from commlayer.megatron import dispatch_by_host

from .segments import ByNextUse, Deferred
from .shim import cuda_means_cpu

VOCABULARY, LENGTH, BATCH, MICROBATCHES = 128, 32, 2, 4
EXPERTS = 8
SIZES = {"num_microbatches": MICROBATCHES, "seq_length": LENGTH, "micro_batch_size": BATCH}
OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True}
SEGMENTS = {"classes": ByNextUse, "deferred": Deferred}


def model_of(options: argparse.Namespace) -> list[DistributedDataParallel]:
    """This rank's part of the model in Megatron's DDP. Pipelines have two chunks per rank (virtual stages)."""
    split: dict[str, Any] = {"tensor_model_parallel_size": options.tp, "pipeline_model_parallel_size": options.pp}
    split["expert_model_parallel_size"] = options.ep
    split["virtual_pipeline_model_parallel_size"] = 2 if options.pp > 1 else None
    parallel_state.initialize_model_parallel(**split)
    model_parallel_cuda_manual_seed(1)
    layers = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.1}
    layers |= {"use_cpu_initialization": True, "persist_layer_norm": False}  # without CUDA kernels
    messages = {"overlap_p2p_comm": options.pp > 1, "batch_p2p_comm": False, "pipeline_dtype": torch.float32}
    vars(moe_utils).setdefault("te_general_gemm", None)  # the router asks for it, without Transformer Engine, too
    experts: dict[str, Any] = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
    experts |= {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    config = TransformerConfig(**layers, **split, **messages, **(experts if options.ep > 1 else {}))
    config.finalize_model_grads_func = finalize_model_grads
    align = options.segments in SEGMENTS
    ddp = DistributedDataParallelConfig(
        **OVERLAP, overlap_grad_reduce=True, align_param_gather=align, bucket_size=20_000
    )
    chunks = []
    for stage in (0, 1) if options.pp > 1 else (None,):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS if options.ep > 1 else None)
        net = GPTModel(config, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last, vp_stage=stage)
        chunks.append(DistributedDataParallel(config, ddp, net))
        chunks[-1].broadcast_params()
        if options.by_host:
            dispatch_by_host(chunks[-1])
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if options.pp > 1 else chunks[0].no_sync
    return chunks


def batches(generator: torch.Generator) -> list[torch.Tensor]:
    """One step of sequences that count upwards, so that the next token can be learned."""
    starts = torch.randint(0, VOCABULARY, (MICROBATCHES, BATCH, 1), generator=generator)
    return list((starts + torch.arange(LENGTH + 1)) % VOCABULARY)


def forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """One microbatch through one chunk, and the function of its loss."""
    tokens, mask = next(batches), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], torch.arange(LENGTH).expand(BATCH, LENGTH), mask, labels=tokens[:, 1:])
    return output, lambda output: (output.mean(), {"loss": output.mean().detach()})


def train(options: argparse.Namespace) -> None:
    """Prints the mean loss of each step."""
    chunks = model_of(options)
    optimizer = get_megatron_optimizer(OptimizerConfig(**OVERLAP, lr=1e-2, clip_grad=options.clip), chunks)
    stepper = SEGMENTS[options.segments](chunks, optimizer) if options.segments in SEGMENTS else optimizer
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    replicas = parallel_state.get_data_parallel_group()
    for _ in range(options.steps):
        data = batches(generator)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with commlayer.priority(0):  # tensor parallelism, and messages between stages
            run = functools.partial(get_forward_backward_func(), forward_step_func=forward, forward_only=False)
            done = run(model=chunks, data_iterator=[iter(data) for _ in chunks], **SIZES)
        stepper.step()
        if done:  # ranks of the last stage are
            loss = torch.stack([microbatch["loss"] for microbatch in done]).mean()
            dist.all_reduce(loss, group=replicas)
            if dist.get_rank() == dist.get_world_size() - 1:
                print("loss", (loss / replicas.size()).item(), flush=True)
    if stepper is not optimizer:
        stepper.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="commlayer", choices=("gloo", "commlayer"))
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts; 1: no experts")
    parser.add_argument("--by_host", action="store_true", help="tokens travel once to each host")
    parser.add_argument("--segments", default="none", choices=("none", *SEGMENTS), help="see segments.py")
    parser.add_argument("--clip", type=float, default=1.0, help="maximum norm of the gradient; 0: any")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda_means_cpu()
    dist.init_process_group(options.backend)
    train(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
