"""The Megatron example's shim, in a process of its own: it replaces names of torch for good."""

import subprocess
import sys

import pytest

from tests import ROOT

BEFORE = """
import sys, types
for name in ("megatron", "megatron.core", "megatron.core.tensor_parallel", "megatron.core.tensor_parallel.random"):
    sys.modules[name] = types.ModuleType(name)
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], sys.modules[name])
import torch
from examples.megatron.shim import cuda_means_cpu
cuda_means_cpu()
"""

USES = {
    "factories": """
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device=torch.device("cuda", 0)).is_cpu
assert torch.empty(1, device=torch.cuda.current_device()).is_cpu
assert torch.ones(1, device=0).is_cpu
assert torch.ones(1).cuda().is_cpu
""",
    "generators": """
import megatron.core.tensor_parallel.random as random
state = torch.cuda.get_rng_state()
first = torch.rand(3)
random._set_cuda_rng_state(state)
assert torch.equal(torch.rand(3), first)
torch.cuda.manual_seed(7)
seeded = torch.rand(3)
torch.manual_seed(7)
assert torch.equal(torch.rand(3), seeded)
""",
    "streams": """
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    event = stream.record_event()
torch.cuda.current_stream().wait_stream(stream)
stream.wait_event(event)
assert event.query()
torch.ones(1).record_stream(stream)
""",
    "types": """
assert torch.ones(1).type() == "torch.cuda.FloatTensor"
assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
assert torch.ones(1).type(torch.float64).dtype == torch.float64
""",
}


@pytest.mark.parametrize("use", USES)
def test_cuda_means_cpu(use: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE + USES[use]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
