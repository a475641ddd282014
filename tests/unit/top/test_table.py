from typing import Any

from commlayer.tools.top import table
from commlayer.tools.top.summary import summarize


def sample(rank: int, **changes: Any) -> dict[str, Any]:
    flow = {"bytes_s": 1e6, "sent": 1000, "lost": 0, "received": 900, "queue_us": 0, "round_trip_us": 310, "dead": 0}
    return {
        "rank": rank,
        "world": 4,
        "host": f"host-{rank}.cluster",
        "pid": 1,
        "number": 7,
        "time": 1e9,
        "step": 12345678,
        "interval_s": 1.0,
        "steps": 10,
        "step_s": 0.1,
        "exposed_s": 0.2,
        "late_s": 0.15,
        "exposed_step_s": 0.02,
        "late_step_s": 0.015,
        "lags_s": 1.0,
        "sent_bytes_s": 117_000_000,
        "received_bytes_s": 117_000_000,
        "shared_bytes_s": 0,
        "packets": 1000,
        "lost": 0,
        "retransmitted": 0,
        "forgiven_bytes": 0,
        "queue_us": 120,
        "failed": 0,
        "oldest_s": 0.0,
        "lags": [],
        "paused": [],
        "hooks": [{"steps": 10, "loss_bound": 0.01, "codec": "int8", "priority": 4, "uncounted_bytes": 0}],
        "interfaces": [{"interface": name, **flow} for name in ("eth0", "eth1")],
        "paths": [{"peer": 9, "path": 0, "interface": "eth0", "remote": "10.0.0.1:5", **flow}],
        **changes,
    }


NO_STEPS = {"step": None, "steps": 0, "step_s": None, "exposed_step_s": None, "late_step_s": None}


def job(*samples: dict[str, Any], ages: dict[str, float] | None = None, ended: tuple[int, ...] = ()) -> dict[str, Any]:
    return summarize({"samples": list(samples), "ages": ages or {}, "ended": list(ended)})


def test_the_summary_names_the_slowest_peer_and_ranks_that_are_missing() -> None:
    found = job(
        sample(0, lags=[[2, 300_000], [1, 10]]),
        sample(1, lags=[[2, 100_000]], lost=10),
        sample(2, sent_bytes_s=0),
        ages={"0": 9.0, "1": 0.5, "2": 0.5},
        ended=(),
    )
    assert found["job"]["slowest"] == {"rank": 2, "host": "host-2.cluster", "waiting": 1, "share": 0.1}
    assert (found["job"]["silent"], found["job"]["unheard"], found["job"]["live"]) == ([0], [3], 2)
    assert found["job"]["loss"] == 10 / 2000
    assert found["job"]["exposed_step_s"] == 0.02
    assert job(sample(0), ended=(0,))["job"]["ended"] == [0]


def test_a_table_fits_80_columns_and_has_the_figures() -> None:
    dead = {**sample(1)["paths"][0], "dead": 1}
    worst = sample(
        1, lost=3, forgiven_bytes=123_456, retransmitted=99999, paths=[dead], lags=[[0, 250_000]], oldest_s=7
    )
    lines = table.lines(job(sample(0), worst, sample(2, **NO_STEPS, paused=["eth1"])), paths=True)
    assert max(map(len, lines)) <= table.WIDTH
    text = "\n".join(lines)
    for words in (
        "3 of 4 ranks, step 12,345,678, 100ms per step",
        "exposed communication 20ms per step (20%); 15ms of it waiting for late ranks",
        "  100ms    20ms   15ms  936M",
        "      -     20%    15%  936M",
        "slowest peer: rank 0 on host-0.cluster; 1 rank waited for it, 25% of their time",
        "no sample yet from rank 3",
        "dead path: rank 1 to rank 9, eth0 -> 10.0.0.1:5",
        "gradients: int8, loss bound 0.01",
        "a collective has been in flight for 7 s",
        "936M",
        "paused: eth1 (commlayer ctl resume)",
        "121KiB",
        "eth1, all peers",
    ):
        assert words in text


def test_shares_are_of_whole_steps_and_never_contradict_the_times() -> None:
    """Steps of 1 s, of which 0.43 s are exposed: samples of 1 s have none, one or two of them."""
    steps = {"step_s": 1.0, "exposed_step_s": 0.43, "late_step_s": 0.4}
    found = job(*(sample(rank, steps=rank, exposed_s=0.43 * rank, **steps) for rank in range(3)))["job"]
    assert (found["exposed_share"], found["late_share"]) == (0.43, 0.4)
    none = job(sample(0, **NO_STEPS), sample(1, **NO_STEPS))
    assert "exposed communication 20% of the time; 15% waiting for late ranks" in table.lines(none)


def test_of_many_ranks_those_in_trouble_are_shown() -> None:
    ranks = [sample(rank, world=300) for rank in range(300)]
    ranks[123] = sample(123, world=300, lost=50)
    lines = table.lines(job(*ranks, ages={"211": 60.0}), limit=20)
    assert len(lines) <= 20
    rows = [line.split()[0] for line in lines[lines.index(table.HEAD) + 1 : -1]]
    assert {"123", "211"} <= set(rows)
    assert rows == sorted(rows, key=int)
    assert lines[-1] == f"and {300 - len(rows)} more ranks: --rows 0 shows all, --json has all"


def test_numbers_for_people() -> None:
    assert [table.bits(rate) for rate in (0, 100, 1.25e5, 117e6)] == ["0", "800", "1M", "936M"]
    assert [table.micros(time_us) for time_us in (0, 12.3, 4100, 41_000, 2.5e6)] == [
        "0us",
        "12.3us",
        "4.1ms",
        "41ms",
        "2.5s",
    ]
    assert [table.share(value) for value in (0, 5e-6, 0.0012, 0.25)] == ["0", "<.001%", "0.120%", "25.0%"]
