"""More of torch's own users of collectives: each case gives the same numbers on gloo and on commlayer, on both ranks.

The cases run one after the other in one job per backend, so that a case costs little more than itself.
"""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tests import ranks
from tests.pipelines import HAS_V
from tests.process.compat import data_paths, tensor_paths
from tests.process.compat.gloo import assert_same, plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # of the first test, which runs all cases; on a busy machine

CASES: tuple[Callable[[int], Any], ...] = (
    data_paths.post_local_sgd,
    data_paths.average_parameters,
    data_paths.zero_in_bucket_views,
    data_paths.join_of_ddp_and_zero,
    data_paths.synchronized_batch_norm,
    data_paths.ddp_of_a_mesh,
    data_paths.composable_replicate,
    data_paths.fsdp2_accumulates,
    data_paths.fsdp2_clips_and_prefetches,
    data_paths.fsdp2_of_tensor_parallel_layers,
    data_paths.fsdp1_states,
    data_paths.whole_states_from_rank_0,
    tensor_paths.sequence_parallelism,
    tensor_paths.compiled_sequence_parallelism,
    tensor_paths.prepared_inputs,
    tensor_paths.distributed_module,
    tensor_paths.arithmetic_of_shards,
    tensor_paths.partial_sums_of_all_kinds,
    tensor_paths.slices_of_a_mesh,
    tensor_paths.differentiable_collectives,
    tensor_paths.functional_collectives_with_gradients,
    tensor_paths.coalesced_collectives,
    tensor_paths.looped_pipeline,
    *((tensor_paths.zero_bubble_pipeline_in_a_v, tensor_paths.dual_pipeline_in_a_v) if HAS_V else ()),
)


def run_all(rank: int, size: int, backend: str) -> dict[str, Any]:
    """The result of each case, or its traceback."""
    found: dict[str, Any] = {}
    for case in CASES:
        torch.manual_seed(7)
        try:
            with ranks.job(rank, size, backend):
                found[case.__name__] = tree_map(plain, case(rank))
                dist.barrier()
        except Exception:
            found[case.__name__] = traceback.format_exc()
            break  # the other rank may be anywhere
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """The results, by backend and rank."""
    return {backend: ranks.run(run_all, data_paths.SIZE, backend, timeout_s=140) for backend in ("gloo", "commlayer")}


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_case(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    ours, expected = ([rank.get(name) for rank in found[backend]] for backend in ("commlayer", "gloo"))
    for value in (*ours, *expected):
        assert value is not None, "an earlier case failed"
        assert not isinstance(value, str) or not value.startswith("Traceback"), value
    assert_same(ours, expected)
