import random

import pytest

from commlayer.tools.probe.train import Train, gilbert, lost_runs, percentile, summarize


def train(
    numbers: list[int], *, size: int = 1000, spacing_ns: int = 1000, dropped: dict[int, int] | None = None
) -> Train:
    """Packets that arrive in this order, evenly spaced; `dropped` has the rises of the socket's counter."""
    made, counter = Train(), 0
    for place, number in enumerate(numbers):
        counter += (dropped or {}).get(number, 0)
        made.add(number, number * spacing_ns, place * spacing_ns + 5000, counter, size)
    made.dropped_after = counter
    return made


def test_runs_of_lost_packets() -> None:
    assert lost_runs(train([0, 1, 4, 5, 9]), 12) == ([2, 3, 2], 0)


def test_the_first_packets_may_be_lost() -> None:
    assert lost_runs(train([3, 4]), 5) == ([3], 0)


def test_a_train_that_is_lost_as_a_whole_is_one_run() -> None:
    assert lost_runs(Train(), 7) == ([7], 0)


def test_reordered_and_doubled_packets_are_not_lost() -> None:
    assert lost_runs(train([0, 2, 1, 1, 3, 5, 4]), 6) == ([], 2)


def test_packets_that_found_the_socket_full_are_not_lost_by_the_network() -> None:
    assert lost_runs(train([0, 1, 5, 9], dropped={5: 3, 9: 1}), 10) == ([2], 0)


def test_packets_that_the_socket_dropped_at_the_end_are_not_lost_by_the_network() -> None:
    cut = train([0, 1, 2])
    cut.dropped_after = 3
    summary = summarize(cut, 7)
    assert (summary.lost, summary.bursts, summary.overflowed) == (1, 1, 3)


def test_the_counter_of_the_socket_may_wrap_and_come_out_of_order() -> None:
    late = Train(dropped_before=(1 << 32) - 2)
    for number, counter in ((0, (1 << 32) - 2), (3, 0), (2, (1 << 32) - 2), (5, 0)):
        late.add(number, 0, number, counter, 100)
    late.dropped_after = 0
    assert lost_runs(late, 6)[0] == [1, 1]  # an old counter beside a gap is no rise


def test_rate_counts_what_arrives_once_the_burst_is_under_way() -> None:
    # the first 30 packets come at once, from a token bucket; the others every 100 us
    burst = Train()
    for number in range(100):
        burst.add(number, 0, max(0, number - 29) * 100_000, 0, 1250)
    assert summarize(burst, 100).rate_bps == pytest.approx(100e6)


def test_packets_that_the_socket_dropped_count_for_the_rate() -> None:
    full = Train()
    for number in range(0, 200, 2):  # every other one is dropped by the socket
        full.add(number, 0, number * 50_000, number // 2, 1250)
    full.dropped_after = 99
    assert summarize(full, 199).rate_bps == pytest.approx(200e6, rel=0.01)


def test_queueing_delay_is_that_beyond_the_fastest_packet() -> None:
    queued = Train()
    for number in range(100):
        queued.add(number, number * 1000, number * 1000 + 7_000_000 + number * 10_000, 0, 100)
    summary = summarize(queued, 100)
    assert summary.queue_p50_us == pytest.approx(490)
    assert summary.queue_p99_us == pytest.approx(980)


def test_gilbert_finds_the_states_that_made_the_losses() -> None:
    chance = random.Random(3)
    enters, leaves = 0.01, 0.25
    numbers, is_bad = [], False
    for number in range(200_000):
        is_bad = chance.random() >= leaves if is_bad else chance.random() < enters
        if not is_bad:
            numbers.append(number)
    summary = summarize(train(numbers), 200_000)
    good_ends, bad_ends = gilbert(200_000, summary.lost, summary.bursts)
    assert good_ends == pytest.approx(enters, rel=0.1)
    assert bad_ends == pytest.approx(leaves, rel=0.1)


def test_gilbert_without_losses() -> None:
    assert gilbert(100, 0, 0) == (0.0, 1.0)


def test_percentiles_are_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50, 99, 100)
    assert percentile([], 50) == 0
