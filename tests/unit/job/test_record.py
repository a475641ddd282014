"""The measured steps of a rank, as lines of JSON."""

from pathlib import Path

from commlayer.tools.job import record
from commlayer.tools.job.record import Record, Step, union_s

STEPS = (Step("real", 0.5, 3, 1024, 0.25, 0.125), Step("none", 0.25))


def test_a_file_has_the_whole_record(tmp_path: Path) -> None:
    told = Record(
        10,
        STEPS,
        world=12,
        host="hostb",
        backend="gloo",
        uses_engine=True,
        counters={"packets_lost": 7},
        lags_s={3: 0.5},
        paths=({"rank": 0, "interface": "eth0"},),
        tcp={"sent": 100, "resent": 1},
        is_complete=True,
    )
    text = "\n".join([*map(record.line, STEPS), told.end_line()])
    record.path(tmp_path, 10).write_text(text)
    record.path(tmp_path, 2).write_text(record.line(STEPS[0]) + "\n" + record.line(STEPS[1])[:20])
    assert record.read(tmp_path) == (Record(2, STEPS[:1]), told)
    assert told.step_s == (0.5, 0.25)
    assert not record.read(tmp_path)[0].is_complete


def test_intervals_that_overlap_count_once() -> None:
    assert union_s([]) == 0
    assert union_s([(4, 6), (0, 2), (1, 3), (1, 1.5)]) == 5
