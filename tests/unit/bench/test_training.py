"""The pure parts of jobs under measurement."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench.jobs import training
from bench.jobs.training import HELD_OUT_EVERY, STRETCH_BYTES, Job, hold_out, hook_of, learning_rate_share
from commlayer.tools.emulate.scenario import Scenario


def test_held_out_text_is_not_trained_on() -> None:
    stretches = 2 * HELD_OUT_EVERY + 1
    text = torch.arange(stretches).repeat_interleave(STRETCH_BYTES)[: -STRETCH_BYTES // 2]
    trained, held = hold_out(text)
    assert held.unique().tolist() == [HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1]
    assert len(trained) + len(held) == len(text)
    assert not set(trained.unique().tolist()) & set(held.unique().tolist())


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    shares = [learning_rate_share(step, 100) for step in range(101)]
    assert shares[0] == pytest.approx(0.2)
    assert max(shares) == shares[5] == pytest.approx(1)
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert shares[100] == pytest.approx(0)


@pytest.mark.parametrize("backend", ["gloo", "commlayer"])
@pytest.mark.parametrize("bits", ["f32", "f16", "bf16"])
def test_every_form_has_its_hook(backend: str, bits: str) -> None:
    model = nn.Linear(2, 2)
    job = Job("one", backend=backend, bits=bits, policy={"loss_bound": 0.1})
    state, hook = hook_of(job, model, torch.optim.SGD(model.parameters()))
    assert (state is not None) == (backend == "commlayer")
    assert (hook is None) == ((backend, bits) == ("gloo", "f32"))
    if state is not None:
        assert state.policy.loss_bound == 0.1
    if hook is not None:
        assert not hook.__name__.startswith("bf16")  # DDP would refuse it


def test_powersgd_is_gloos() -> None:
    model = nn.Linear(2, 2)
    state, hook = hook_of(Job("one", backend="gloo", bits="powersgd:4:3"), model, torch.optim.SGD(model.parameters()))
    assert state.matrix_approximation_rank == 4
    assert state.start_powerSGD_iter == 3
    assert hook is not None


@pytest.mark.parametrize(("attempts", "finished"), [([1, 2], 3), ([3], 3), ([1, 0], 1), ([0, 0], 0), ([0, 1, 1, 1], 3)])
def test_a_failed_run_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: list[int], finished: int
) -> None:
    """Each attempt ends as many jobs as the list says, then a rank fails."""
    left = list(attempts)

    def run(_network: Any, command: list[str], trouble: Callable[[], str | None]) -> int:
        assert trouble() is None
        todo = json.loads(Path(command[-2]).read_text())
        count = left.pop(0)
        Path(command[-1]).write_text("".join(json.dumps({"job": job}) + "\n" for job in todo[:count]))
        return 1

    monkeypatch.setattr(training, "run", run)
    monkeypatch.setattr(training, "Network", nullcontext)
    monkeypatch.setattr(training, "Stress", lambda _network: nullcontext(SimpleNamespace(error=None)))
    monkeypatch.chdir(training.ROOT)
    logs = training.measure(Scenario(), [Job(name) for name in "abc"], tmp_path, name="x")
    assert [log["job"]["system"] for log in logs] == list("abc")[:finished]
    assert not left
