"""Ctrl-C while the command imports torch."""

import os
import subprocess
import sys
from pathlib import Path

import commlayer_command

SLOW_TORCH = """
import os, signal, time
# Python's own handler: Python leaves it out where SIGINT is ignored, as under `nohup ... &`.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_ctrl_c_during_the_import_of_torch_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    path = os.pathsep.join([str(tmp_path), str(Path(commlayer_command.__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", "import commlayer_command; commlayer_command.main()", "--version"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (commlayer_command.INTERRUPTED, "", "")
