"""The steps of a trial, as the starter writes them for the ranks."""

from pathlib import Path

import pytest

from commlayer.tools.job.spec import Spec


def test_phases_follow_the_warm_up(tmp_path: Path) -> None:
    Spec(2, ("real", "none", "short"), 60.0).write(tmp_path)
    spec = Spec.read(tmp_path)
    assert spec == Spec(2, ("real", "none", "short"), 60.0)
    assert spec.steps == 5
    assert not spec.is_real
    assert [spec.phase(done) for done in range(6)] == ["real", "real", "real", "none", "short", "short"]


@pytest.mark.parametrize(("warmup", "phases", "said"), [(0, ("real",), "warmup 0"), (1, (), "steps 0")])
def test_a_trial_needs_steps(warmup: int, phases: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Spec(warmup, phases, 60.0)  # type: ignore[arg-type]
