import json

from commlayer.telemetry.collector import Samples


def test_a_view_has_the_latest_sample_of_each_rank_and_its_age() -> None:
    now_s = 100.0
    samples = Samples(2, lambda: now_s)
    assert json.loads(samples.view()) == {"ages": {}, "ended": [], "samples": []}
    samples.put(1, b'{"rank": 1}')
    samples.put(0, b'{"rank": 0, "old": true}')
    now_s = 102.0
    samples.put(0, b'{"rank": 0}')
    samples.end(1)
    assert json.loads(samples.view()) == {
        "ages": {"1": 2.0, "0": 0.0},
        "ended": [1],
        "samples": [{"rank": 1}, {"rank": 0}],
    }
    samples.put(1, b'{"rank": 1}')
    assert json.loads(samples.view())["ended"] == []


def test_ranks_without_a_sample_of_late_are_missing() -> None:
    now_s = 100.0
    samples = Samples(4, lambda: now_s)
    assert samples.missing(5.0) == [0, 1, 2, 3]
    for rank in range(3):
        samples.put(rank, b"{}")
    samples.end(1)
    assert samples.missing(5.0) == [1, 3]
    now_s = 106.0
    samples.put(2, b"{}")
    assert samples.missing(5.0) == [0, 1, 3]
