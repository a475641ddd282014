"""The tutorials: the Python blocks of a page are one script, which trains and prints what the page shows."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

from tests import ROOT, ranks

FOLDER = ROOT / "docs/tutorials"
RANKS = {"ddp": 2, "fsdp2": 2, "hsdp": 4, "pipelines": 4, "slow_link": 2, "compress": 2}


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of a page in this language; "": those without one, which are output."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def shape(output: str) -> list[str]:
    """The lines of an output without their numbers and units."""
    plain = re.sub(r"\b(?:[KMG]iB|B|us|ms|s)\b", "unit", re.sub(r"[-+]?\d[\d.,]*", "0", output))
    return [" ".join(line.split()) for line in plain.splitlines() if line.strip()]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


def body(rank: int, size: int, page: str) -> str:
    """Runs the script of a page as torchrun starts it, with the Store of the test as torchrun's."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["RANKS_STORE_PORT"])
    sys.argv = ["train.py"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec("\n".join(blocks(page, "python")), {"__name__": "__main__"})  # noqa: S102  # our own pages
    return output.getvalue()


def run(page: str) -> str:
    return "".join(ranks.run(body, RANKS[page], page, environ=ranks.NETWORK))


def test_every_tutorial_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(RANKS)


def check_training(page: str, output: str) -> None:
    """The loss falls, and the lines are those of the page, but for ranks that were waited for."""
    first, *_, last = losses(output)
    assert last < 0.9 * first
    assert [line for line in shape(output) if not line.startswith("rank 0")] == [
        line for line in shape("".join(blocks(page, ""))) if not line.startswith("rank 0")
    ]


@pytest.mark.parametrize("page", ["fsdp2", "hsdp", "pipelines"])
def test_trains_and_prints_the_output_of_the_page(page: str) -> None:
    check_training(page, run(page))


def test_codecs_are_compared_with_exact_training() -> None:
    output = run("compress")
    assert shape(output) == shape("".join(blocks("compress", "")))
    differences = [float(number) for number in re.findall(r"^[\w-]+: ([-+][\d.]+), from", output, re.MULTILINE)]
    assert len(differences) == 4
    assert any(differences)  # something was encoded
    assert max(map(abs, differences)) < 0.1


def test_a_slow_link_is_measured() -> None:
    output = run("slow_link")
    assert re.search(r"^auto: \d+ ms per step, \d+ ms without communication$", output, re.MULTILINE)
    assert "all buckets as" in output


def test_the_first_tutorial_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks("ddp", "python")), encoding="utf-8")
    check_training("ddp", ranks.torchrun(script, OMP_NUM_THREADS="1"))
