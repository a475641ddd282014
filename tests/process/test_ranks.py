"""tests/ranks.py: ranks whose starter was killed end without a traceback."""

import subprocess
import sys
import time

from tests import ROOT, ranks

STARTER = """
from tests import ranks
from tests.process.test_ranks import report_late

ranks.run(report_late, 1)
"""


def report_late(rank: int, size: int) -> None:
    """Tells that it has begun, and ends after its starter."""
    print("begun", flush=True)
    time.sleep(2)


def test_ranks_whose_starter_was_killed_end_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=ROOT,
        env=ranks.script_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "begun\n"
        starter.kill()
        assert starter.stdout.read() == ""  # it ends with the rank
