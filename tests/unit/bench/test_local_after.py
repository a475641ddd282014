import pytest
import torch

from bench.fidelity import MODELS, STEPS, Replicas
from bench.local_after import MODEL, SYSTEMS, cells_of, exact_after, header_text, measure_seed, table, train_on
from bench.local_loss import EXACT, Log, System


def log(system: System, seed: int, steps: int, before: float, after: float) -> Log:
    return {"seed": seed, "steps": steps, **system._asdict(), "loss": before, "after": after}


EXACT_RUNS = [log(EXACT, 1, 500, 2.0, 1.6), log(EXACT, 1, 1000, 1.8, 1.5), log(EXACT, 1, STEPS, 1.7, 1.3)]


def test_losses_of_exact_models_are_interpolated() -> None:
    assert exact_after(1.9, EXACT_RUNS) == pytest.approx(1.55)
    assert exact_after(1.75, EXACT_RUNS) == pytest.approx(1.4)
    assert exact_after(1.7, EXACT_RUNS) == pytest.approx(1.3)
    assert exact_after(2.01, EXACT_RUNS) is None
    assert exact_after(1.69, EXACT_RUNS) is None


def test_a_row_has_the_gap_at_the_same_loss() -> None:
    runs = [*EXACT_RUNS, log(SYSTEMS[0], 1, STEPS, 1.75, 1.42)]
    assert cells_of(SYSTEMS[0], runs)[2:] == ["1.7500", "1.4200", "+0.1200", "+0.0200"]
    assert cells_of(EXACT, runs)[-2:] == ["+0.0000", "+0.0000"]
    assert table({"runs": []}) == "Not measured."


def test_the_second_training_is_on_other_text() -> None:
    text = header_text()
    assert b"#include" in bytes(text[:100_000].numpy())


def test_equal_models_stay_equal_and_learn() -> None:
    torch.manual_seed(3)
    weights = Replicas(MODELS[MODEL](), 2).weights.detach()
    found = train_on(weights, header_text(), 1, 2).weights.detach()
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found, weights)


def test_a_seed_has_all_losses() -> None:
    found = measure_seed(1, (System(2, 1, 0, "none", 1),), (2, 3), 2)
    assert [(run["steps"], run["every"]) for run in found] == [(2, 0), (3, 0), (3, 2)]
    assert all(run["loss"] > 0 and run["after"] > 0 for run in found)
