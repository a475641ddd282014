"""torchrun restarts a job that lost a worker; the new job knows nothing of the old one but its files."""

from pathlib import Path

from tests import ranks

JOB = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import commlayer

dist.init_process_group("commlayer")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DistributedDataParallel(torch.nn.Linear(64, 64))
checkpoint = sys.argv[1]
start = torch.load(checkpoint) if os.path.exists(checkpoint) else 0
for step in range(start, 6):
    model(torch.ones(4, 64)).sum().backward()
    if step == 3 and attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if rank == 0:
        torch.save(step + 1, checkpoint)
    dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} attempt {attempt} from {start}", flush=True)
"""


def test_a_killed_worker_is_restarted(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB, encoding="utf-8")
    checkpoint = str(tmp_path / "checkpoint")
    output = ranks.torchrun(job, checkpoint, restarts=2, COMMLAYER_PEER_TIMEOUT_S="2")
    lines = [f"rank {rank} attempt 1 from 3" for rank in range(2)]
    assert [output.count(line) for line in lines] == [1, 1], output
