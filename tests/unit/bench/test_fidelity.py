import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from bench import fidelity
from bench.fidelity import (
    BASELINE,
    BATCH,
    CLIP,
    CONTEXT,
    CONTROL,
    LEARNING_RATE,
    LOSS,
    MODELS,
    PAGE,
    RANKS,
    REVERSED,
    SEEDS,
    STEPS,
    SYSTEMS,
    TESTED,
    VALIDATE_AT,
    WITHOUT,
    average,
    sizes,
    table,
    train,
    whole_seeds,
)
from bench.jobs.training import hold_out, learning_rate_share
from commlayer.tools.bench import machine
from examples.train_gpt import draw_batch, standard_library_text


def test_the_design_is_that_of_the_claim() -> None:
    assert len(SEEDS) >= 12
    assert STEPS >= 1500
    assert {(system.codec, system.loss) for system in TESTED} == {
        (codec, loss) for codec in ("int8", "int4-int8", "int4") for loss in (0.0, 0.01)
    }
    assert len(MODELS) == 2


@pytest.mark.parametrize("name", MODELS)
def test_most_parameters_take_the_codec(name: str) -> None:
    size = sizes(name)
    assert size["coarse"] > 0.6 * size["parameters"]


def reference(name: str, seed: int, steps: int) -> float:
    """The loss of an ordinary training: one module, the mean loss of all ranks, PyTorch's clipping."""
    text, held_out = hold_out(standard_library_text())
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))

    def loss(windows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(windows[0]).flatten(0, 1), windows[1].flatten())

    clipped = 0
    for step in range(steps):
        for rank in range(RANKS):
            draw = draw_batch(text, CONTEXT, BATCH, (seed * 100_000 + step) * RANKS + rank)
            (loss(draw) / RANKS).backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert clipped
    with torch.no_grad():
        return float(loss(draw_batch(held_out, CONTEXT, fidelity.CHUNK, 1_000_000)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The measurement has one thread, too: more threads are slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_systems_train_as_one_ordinary_model_does(name: str) -> None:
    systems = (BASELINE, REVERSED, TESTED[0], TESTED[-1])
    logs = {log["system"]: log for log in train(name, 3, 5, systems)}
    losses = {system: log["losses"]["5"] for system, log in logs.items()}
    assert losses[BASELINE.name] == pytest.approx(reference(name, 3, 5), abs=1e-4)
    assert losses[REVERSED.name] == pytest.approx(losses[BASELINE.name], abs=1e-4)
    assert losses[TESTED[0].name] == pytest.approx(losses[BASELINE.name], abs=0.02)
    assert losses[TESTED[-1].name] == pytest.approx(losses[BASELINE.name], abs=0.1)
    assert len({losses[system.name] for system in (BASELINE, *systems[2:])}) == 3
    assert logs[TESTED[-1].name]["uncounted_share"] > 0
    assert logs[TESTED[0].name]["uncounted_share"] == 0


def test_the_other_order_differs_by_rounding_only() -> None:
    gradients = torch.randn(RANKS, 10_000, generator=torch.Generator().manual_seed(1))
    one, other = (average(gradients.clone(), system, None, 0) for system in (BASELINE, REVERSED))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, gradients.mean(0))
    torch.testing.assert_close(other, gradients.mean(0))


SPREAD = 0.002
SHIFTS = {"int4, 1% loss": 0.004, CONTROL.name: 0.05}
"""Mean differences at the last step; 0 for the other systems."""


def content(seeds: int = 12) -> dict[str, Any]:
    runs = []
    for seed in range(1, seeds + 1):
        for name in MODELS:
            for i, system in enumerate(SYSTEMS):
                wobble = 0.0 if system is BASELINE else SPREAD * (-1) ** (seed + i)
                last = 2.0 + seed / 10 + wobble + SHIFTS.get(system.name, 0.0)
                losses = {str(at): last + (STEPS - at) / 1000 for at in VALIDATE_AT}
                share = system.loss * 1.02
                runs.append(
                    {"model": name, "seed": seed, "system": system.name, "losses": losses, "uncounted_share": share}
                )
    about = machine.facts()
    models = {name: {"parameters": 1000, "coarse": 750} for name in MODELS}
    return {"runs": runs, "machine": about, "models": models, "measured": "x"}


def verdicts(text: str) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {row[0]: row[-1] for row in rows}


def test_table_has_a_verdict_for_each_system() -> None:
    found = verdicts(table(content()))
    assert {name: found[name] for name in (system.name for system in SYSTEMS[1:])} == {
        REVERSED.name: "equivalent",
        **{system.name: "equivalent" for system in (*TESTED, WITHOUT)},
        "int4, 1% loss": "not shown",
        CONTROL.name: "differs",
    }
    text = table(content())
    assert text.count("12 seeds. 1,000 parameters, of which 75% take the codec") == len(MODELS)
    assert "so far" not in text
    assert f"| {LOSS * 1.02:.2%} |" in text


def test_a_control_that_passes_is_told() -> None:
    lame = content()
    for log in lame["runs"]:
        if log["system"] == CONTROL.name:
            log["losses"] = {at: loss - SHIFTS[CONTROL.name] for at, loss in log["losses"].items()}
    assert verdicts(table(lame))[CONTROL.name] == "**equivalent: the test has no force**"


def test_a_part_of_the_seeds_is_told() -> None:
    part = content(5)
    assert part["runs"].pop()["model"] == list(MODELS)[1]  # the last seed lacks a system
    first, second = MODELS
    assert set(whole_seeds(part["runs"], first)) == {1, 2, 3, 4, 5}
    assert set(whole_seeds(part["runs"], second)) == {1, 2, 3, 4}
    text = table(part)
    assert "5 seeds of 12, **so far**" in text
    assert "4 seeds of 12, **so far**" in text
    assert {verdicts(text)[system.name] for system in SYSTEMS[1:]} == {"open"}
    assert "1 of 12 seeds so far." in table(content(1))
    assert table({"runs": []}) == "Not measured yet."


def test_finished_seeds_are_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def stand_in(name: str, seed: int) -> list[dict[str, Any]]:
        trained.append((seed, name))
        return [log for log in content(4)["runs"] if (log["seed"], log["model"]) == (seed, name)]

    monkeypatch.setattr(fidelity, "train", stand_in)
    kept: dict[str, Any] = {"runs": [log for log in content(1)["runs"] if log["model"] == next(iter(MODELS))]}
    for case in itertools.product((1, 2), MODELS):
        fidelity.measure(kept, case)
    first, second = MODELS
    assert trained == [(1, second), (2, first), (2, second)]
    assert len(kept["runs"]) == 4 * len(SYSTEMS)
    assert {"machine", "measured", "models"} <= kept.keys()


def test_the_page_has_the_place_for_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "<!-- results:begin -->" in page
    assert "<!-- results:end -->" in page
