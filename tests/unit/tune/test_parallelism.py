"""`commlayer tune --parallelism FILE`, from the file to the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.tune.parallelism import Question
from tests import ROOT

FILE = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/tune.md").read_text(encoding="utf-8"), re.DOTALL)[0]


def tune(tmp_path: Path, text: str, *arguments: str) -> Any:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return CliRunner().invoke(cli.app, ["tune", "--parallelism", str(file), *arguments])


def test_the_file_of_the_page_describes_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(FILE)
    question = Question.read(tmp_path / "cluster.toml")
    assert [len(host) for host in question.hosts] == [2] * 4
    assert {(rank.speed_flops, rank.memory_bytes) for host in question.hosts for rank in host} == {(60e12, 24 << 30)}
    assert (question.links.within.rate_bps, question.links.between.rate_bps) == (200e9, 1e9)
    assert question.links.between.latency_s == pytest.approx(50e-6)
    assert (question.model.layers, question.model.width, question.model.experts) == (32, 4096, 1)


def test_the_table_has_the_frontier_and_a_sentence_for_each_parallelism(tmp_path: Path) -> None:
    ended = tune(tmp_path, FILE)
    assert ended.exit_code == 0, ended.output
    assert "- PP: the fastest, " in ended.output
    assert re.search(r"- 1-D TP: \d+x the winner's step: exchanges of activations", ended.output)
    assert "- EP: cannot run: the model has one expert" in ended.output
    assert re.search(r"^ *\d\S+ m?s +\d+\.\d\d GiB", ended.output, re.MULTILINE)


def test_json_has_all_figures(tmp_path: Path) -> None:
    ended = tune(tmp_path, FILE, "--json", "-")
    found = json.loads(ended.output)
    assert found["best"] == found["frontier"][0] == found["families"][0]["best"]
    assert sum(found["best"]["parts_s"].values()) == pytest.approx(found["best"]["step_s"])
    assert sum(found["best"]["layers"]) == 32
    assert {family["name"]: family["best"] for family in found["families"]}["2-D TP"] is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[model]", "[model] is absent; add it, with the fields of commlayer.planner.Transformer"),
        ("[between]", '[between] is absent; add it, with the link of each host: rate = "10G"'),
        ("[[host]]", "[[host]] is absent; add it, once for each kind of host: speed_tflops = 60, memory_gib = 24"),
    ],
)
def test_a_section_that_is_absent_is_named_as_the_file_writes_it(tmp_path: Path, section: str, message: str) -> None:
    text = re.sub(rf"{re.escape(section)}.*?(\n\n|\Z)", "", FILE, flags=re.DOTALL)
    ended = tune(tmp_path, text)
    assert ended.exit_code == 2
    assert ended.output == f"commlayer tune: {tmp_path / 'cluster.toml'}: {message}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 32", "layer = 32", "[model]: 'layer' is unknown; the keys are layers, width"),
        ("layers = 32\n", "", "[model]: layers is absent"),
        ('rate = "1G"', 'rate = "fast"', "rate 'fast': expected bits per second"),
        ('rate = "1G"', "rate = 0", "Link.rate_bps=0 is not above 0"),
        ('rate = "1G"', "rate = nan", "Link.rate_bps=nan is not above 0"),
        ("speed_tflops = 60", "speed_tflops = nan", "Rank.speed_flops=nan is not valid"),
        ("memory_gib = 24", 'memory_gib = "24"', "[[host]] 0: memory_gib='24' is no number"),
        ("ranks = 2", "ranks = 2.5", "[[host]] 0: ranks=2.5 is no whole number of at least 1"),
        ("[[host]]", "[host]", "[host] is one table; write [[host]]"),
        ("[within]", "[nowhere]", "the file: 'nowhere' is unknown"),
        ("memory_gib = 24", "memory_gib = 1", "is too small for any layout"),
        ("heads = 32", "heads = 33", "heads=33 do not divide width=4096"),
        ("[model]", "[model", "not TOML"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    ended = tune(tmp_path, FILE.replace(old, new, 1))
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())
    assert "cluster.toml" in ended.output or "too small" in message


def test_links_within_hosts_are_needed_where_there_are_any(tmp_path: Path) -> None:
    text = re.sub(r"\[within\].*?\n\n", "", FILE, flags=re.DOTALL)
    assert "[within] is absent, and a host has several ranks" in tune(tmp_path, text).output
    assert tune(tmp_path, text.replace("ranks = 2", "ranks = 1").replace("= 24", "= 80")).exit_code == 0


def test_a_job_beside_it_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    ended = tune(tmp_path, FILE, "--", "torchrun", "train.py")
    assert ended.exit_code == 2
    assert "runs no job: leave torchrun out" in " ".join(ended.output.split())
    ended = CliRunner().invoke(cli.app, ["tune", "--parallelism", str(tmp_path / "none.toml")])
    assert (ended.exit_code, "No such file" in ended.output) == (2, True)
