from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from bench.fidelity import BATCH, CHUNK, CLIP, CONTEXT, LEARNING_RATE, MODELS, RANKS, SEEDS, STEPS
from bench.jobs.training import hold_out, learning_rate_share
from bench.local_loss import (
    CODECS,
    EVERY,
    EXACT,
    LENGTHS,
    STARTS,
    Log,
    Row,
    System,
    exact_steps_for,
    rows_of,
    systems_of,
    table,
    train,
    usual,
)
from examples.train_gpt import draw_batch, standard_library_text

GPT = "byte GPT"


def test_the_design_is_that_of_the_issue() -> None:
    assert (EVERY[0], EVERY[-1]) == (1, 64)
    assert len(SEEDS) >= 12
    assert STEPS >= 1500
    assert len(MODELS) == 2
    found = set(systems_of(EVERY, STARTS))
    for every in EVERY:
        for delay in (0, every // 2, every - 1):
            assert {System(every, 1, delay, codec, start) for codec in CODECS for start in STARTS} <= found
    assert usual(1) == (1, 0)
    assert usual(2) == (2, 1)
    assert usual(24) == (4, 6)


def test_exact_steps_are_interpolated() -> None:
    by_steps = {500: 2.0, 1000: 1.8, 1500: 1.7}
    assert exact_steps_for(1.9, by_steps) == pytest.approx(750)
    assert exact_steps_for(1.75, by_steps) == pytest.approx(1250)
    assert exact_steps_for(1.7, by_steps) == 1500
    assert exact_steps_for(1.6, by_steps) == 1500
    assert exact_steps_for(2.0, by_steps) == 500
    assert exact_steps_for(2.1, by_steps) is None


def log(system: System, seed: int, steps: int, loss: float) -> Log:
    return {
        "model": GPT, "optimizer": "AdamW", "seed": seed, "steps": steps, **system._asdict(), "loss": loss,
    }  # fmt: skip


LOCAL = System(8, 4, 2, "int4-int8", 100)


def runs_of(seeds: int, difference: float) -> list[Log]:
    exact = [log(EXACT, seed, steps, 2 - steps / 1e4) for seed in range(seeds) for steps in LENGTHS]
    return exact + [log(LOCAL, seed, STEPS, 2 - STEPS / 1e4 + difference + seed * 1e-5) for seed in range(seeds)]


@pytest.mark.parametrize(
    ("seeds", "difference", "verdict"),
    [(2, 0.0, "open"), (11, 0.0, "open"), (12, 0.0, "equivalent"), (12, 0.02, "differs"), (12, 0.00495, "not shown")],
)
def test_rows_say_open_before_all_seeds_are_there(seeds: int, difference: float, verdict: str) -> None:
    row = Row.of(LOCAL, runs_of(seeds, difference))
    assert row is not None
    assert row.cells[-1] == verdict
    assert row.differences == pytest.approx([difference + seed * 1e-5 for seed in range(seeds)])
    assert row.factor is not None
    assert row.factor == pytest.approx(1500 / (1500 - 1e4 * difference), rel=2e-3)


def test_a_loss_above_all_exact_ones_has_no_factor() -> None:
    row = Row.of(LOCAL, runs_of(2, 0.2))
    assert row is not None
    assert row.factor is None
    assert row.cells[7:9] == ["2", "above 3.00"]


def test_a_factor_has_its_range() -> None:
    row = Row.of(LOCAL, runs_of(2, 0.01))
    assert row is not None
    assert row.factor is not None
    low, high = sorted(factor for factor in row.factors if factor is not None)
    assert row.cells[8] == f"{row.factor:.2f} ({low:.2f} to {high:.2f})"


def test_table_leaves_out_what_was_not_measured() -> None:
    content = {"runs": runs_of(3, 0.01)}
    assert [row.system for row in rows_of(content, GPT, "AdamW")] == [LOCAL]
    text = table(content)
    assert "| 8 | 4 | 2 | int4-int8 | 100 | 0.7, 0.6 | 1 |" in text
    assert text.count("Not measured.") == 3
    assert "3 of 12 seeds" in text


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(every: int, steps: int) -> float:
    """The loss of an ordinary training of four modules, whose weights are averaged every H steps."""
    text, held_out = hold_out(standard_library_text())
    models, optimizers, schedules = [], [], []
    for _ in range(RANKS):
        torch.manual_seed(3)
        models.append(MODELS[GPT]())
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=LEARNING_RATE))
        schedules.append(
            torch.optim.lr_scheduler.LambdaLR(optimizers[-1], lambda step: learning_rate_share(step, steps))
        )
    for step in range(steps):
        for rank, (model, optimizer, schedule) in enumerate(zip(models, optimizers, schedules, strict=True)):
            inputs, targets = draw_batch(text, CONTEXT, BATCH, (3 * 100_000 + step) * RANKS + rank)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                for rows in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(rows)).mean(0)
                    for row in rows:
                        row.copy_(mean)
    inputs, targets = draw_batch(held_out, CONTEXT, CHUNK, 1_000_000)
    with torch.no_grad():
        return float(functional.cross_entropy(models[0](inputs).flatten(0, 1), targets.flatten()))


def test_training_is_that_of_modules_that_are_averaged() -> None:
    exact, local = train(GPT, "AdamW", 3, [EXACT, System(4)], 12)
    assert local["loss"] == pytest.approx(reference(4, 12), abs=2e-4)
    assert abs(local["loss"] - exact["loss"]) > 1e-3  # so that the test can fail


def test_exact_training_at_another_rate_is_a_row_of_its_own() -> None:
    faster = EXACT._replace(rate=2.0)
    assert faster in systems_of(EVERY, STARTS)
    assert EXACT not in systems_of(EVERY, STARTS)
    row = Row.of(faster, [*runs_of(1, 0.0), log(faster, 0, STEPS, 2 - STEPS / 1e4 + 0.01)])
    assert row is not None
    assert row.cells[0] == "exact"
    assert row.differences == pytest.approx([0.01])
    usual_ones = systems_of((8,), (100,), (2.0,), is_usual=True)
    assert usual_ones == [faster, *(System(8, 4, 2, codec, 100, 2.0) for codec in CODECS)]


def test_all_exact_steps_are_exact_training() -> None:
    """But for the clipping, which comes before the average."""
    exact, late, local = train(GPT, "AdamW", 3, [EXACT, System(4, exact_steps=12), System(4)], 12)
    assert late["loss"] == pytest.approx(exact["loss"], abs=0.02)
    assert late["loss"] != local["loss"]


@pytest.mark.parametrize("name", MODELS)
def test_muon_trains(name: str) -> None:
    few, more = (train(name, "Muon", 1, [EXACT, System(2, 2, 1, "int4-int8", 1)], steps) for steps in (1, 12))
    assert all(after["loss"] < before["loss"] for before, after in zip(few, more, strict=True))
