"""The report, for people and as JSON."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from commlayer.tools.headroom import command, report
from commlayer.tools.headroom.command import EXIT_LITTLE, EXIT_MUCH, Options, run
from commlayer.tools.job.trial import JobFailedError, Trial, TrialError
from tests.unit.headroom.trials import job, on_engine


def ran(
    monkeypatch: pytest.MonkeyPatch, trials: list[Trial | TrialError], options: Options
) -> tuple[int, str, list[dict[str, str]]]:
    """Status, output and the environment of each trial of a run whose trials have these results."""
    environments: list[dict[str, str]] = []

    def run_trial(words: tuple[str, ...], *, environment: dict[str, str], **_: object) -> Trial:
        assert words == options.command
        environments.append(environment)
        found = trials[len(environments) - 1]
        if isinstance(found, TrialError):
            raise found
        return found

    monkeypatch.setattr(command, "run_trial", run_trial)
    monkeypatch.delenv("RANK", raising=False)
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    status = run(options, lambda found: report.show(found, console), lambda text: console.print(text))
    return status, out.getvalue(), environments


def test_a_job_on_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    status, text, environments = ran(monkeypatch, [job(), on_engine()], Options(("train",), json_path=path))
    assert status == EXIT_MUCH
    assert environments == [{}, {"COMMLAYER_INSTEAD_OF": "gloo"}]
    assert "2 ranks on 2 hosts, backend gloo" in text
    for line in ("any communication 600 ms 60%", "- bytes: compression 500 ms 50%", "on commlayer, nothing else"):
        assert line in " ".join(text.split())
    found = json.loads(path.read_text())
    assert found["share"] == pytest.approx(0.6)
    assert found["most_s"]["latency"] == pytest.approx(0.1)
    assert found["steps"]["left_out"]["median_s"] == 0.4
    assert found["engine"]["transfer_s"] == pytest.approx(0.5)
    assert found["verdict"].startswith("A step takes 1 s")
    assert max(map(len, text.splitlines()[4:])) <= 80


def test_little_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    little = job(real=0.41, short=0.405, none=(0.4, 0.4))
    status, text, environments = ran(monkeypatch, [little], Options(("train",)))
    assert status == EXIT_LITTLE
    assert environments == [{}]
    assert "not this job's problem" in text
    assert "not measured" in text


def test_a_job_on_commlayer_is_left_out_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text, environments = ran(monkeypatch, [on_engine(), job()], Options(("train",)))
    assert environments == [{}, {"COMMLAYER_DISABLE": "1"}]
    assert "any communication 400 ms 50%" in " ".join(text.split())


def test_a_job_that_fails_on_commlayer_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text, _ = ran(monkeypatch, [job(), JobFailedError("it ended with status 7")], Options(("train",)))
    assert status == EXIT_MUCH
    assert "it ended with status 7" in text
    assert "- overlap: hide it behind computation not measured" in " ".join(text.split())


def test_one_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrialError, match="one rank"):
        ran(monkeypatch, [job(none=(0.3,))], Options(("train",)))


def test_phases_take_turns() -> None:
    phases = Options(("train",), steps=2, rounds=2).phases
    assert phases == (*("real",) * 3, *("short",) * 3, *("none",) * 3) * 2
