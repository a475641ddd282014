from commlayer.telemetry.ballot import Ballot
from commlayer.telemetry.control import Change

CHANGE = Change(1, "codec", "int8")


def ballot(deadline_s: float = 10.0) -> Ballot:
    return Ballot(CHANGE, b"asker", frozenset(range(3)), deadline_s, lambda: 5.0)


def test_a_change_is_applied_once_all_ranks_report_a_step() -> None:
    found = ballot()
    for rank in range(3):
        found.answer(rank, "")
        assert found.result() is None
        found.steps[rank] = 9
    assert found.result() == {"applied": True, "steps": [9], "ranks": 3}


def test_one_refusal_is_enough() -> None:
    found = ballot()
    found.answer(0, "")
    found.answer(2, "it has no hook")
    assert found.result() == {"applied": False, "error": "rank 2: it has no hook"}
    found.answer(1, "nor has it")
    assert found.result() == {"applied": False, "error": "rank 1: nor has it (2 ranks refuse)"}


def test_the_missing_ranks_are_named_at_the_deadline() -> None:
    late = ballot(deadline_s=4.0)
    late.answer(1, "")
    result = late.result()
    assert result is not None
    assert result["error"] == "rank 0, 2 did not answer in time; the change is dropped"
    for rank in range(3):
        late.answer(rank, "")
    result = late.result()
    assert result is not None
    assert result["error"].startswith("no rank has made a step with it in time; the change is dropped, unless")
    late.steps[0] = 8
    result = late.result()
    assert result is not None
    assert result["error"] == "rank 1, 2 did not report it in time; the other ranks have applied it"
