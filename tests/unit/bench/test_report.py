import functools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from commlayer.tools.bench import report
from commlayer.tools.bench.backends import Backend
from commlayer.tools.bench.collectives import AllReduce, Barrier
from commlayer.tools.bench.measure import Measurement
from commlayer.tools.bench.spec import BackendSpec, Spec
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

NETWORK = Scenario(hosts=4, nics=(Link(rate_bps=1e6),))
FACTS = {"cores": 2, "cpu": "a cpu", "kernel": "Linux 6", "torch": "2.13", "commlayer": "0.1"}
SPEC = Spec(backends=(BackendSpec("gloo"), BackendSpec("fast")), sizes=(8_000_000,))


@functools.cache
def all_reduce(world: int) -> AllReduce:
    """It is never run, and takes a while to fill."""
    return AllReduce(8_000_000, torch.float32, "sum", 0, world)


def measurement(name: str, time_us: float, world: int = 4, wrong: int = 0) -> Measurement:
    backend = Backend(BackendSpec(name), cast("Any", None), ("cubic",))
    return Measurement(
        backend, all_reduce(world), [[time_us] * 2] * 3, wrong, process_cpu_s=4.8, machine_cpu_s=9.6, softirq_cpu_s=0.48
    )


def test_bandwidths_of_an_all_reduce() -> None:
    result = report.row(SPEC, measurement("gloo", 1000.0), measurement("gloo", 1000.0))
    assert result["algbw_gb_s"] == pytest.approx(8.0)  # 8 MB in 1 ms
    assert result["busbw_gb_s"] == pytest.approx(12.0)
    assert result["link_share"] is None


def test_cpu_is_per_gb_of_all_timed_iterations() -> None:
    result = report.row(SPEC, measurement("gloo", 1000.0), measurement("gloo", 1000.0))
    # 6 iterations of 8 MB are 0.048 GB
    assert result["cpu_process_s_per_gb"] == pytest.approx(100)
    assert result["cpu_machine_s_per_gb"] == pytest.approx(200)
    assert result["cpu_softirq_s_per_gb"] == pytest.approx(10)


def test_speedup_is_over_the_baseline() -> None:
    result = report.row(SPEC, measurement("fast", 500.0), measurement("gloo", 1000.0))
    assert result["speedup"] == pytest.approx(2.0)


def test_link_share_is_busbw_over_the_payload_rate() -> None:
    spec = Spec(backends=SPEC.backends, sizes=SPEC.sizes, scenario=Scenario(hosts=4, nics=(Link(rate_bps=200e6),)))
    result = report.row(spec, measurement("gloo", 600_000.0), measurement("gloo", 600_000.0))
    assert result["link_share"] == pytest.approx((8e-3 / 0.6 * 1.5) / (0.025 * 1472 / 1514))


def test_link_share_needs_one_rank_per_host() -> None:
    spec = Spec(backends=SPEC.backends, sizes=SPEC.sizes, scenario=Scenario(hosts=2, nics=(Link(rate_bps=200e6),)))
    assert report.row(spec, measurement("gloo", 1.0), measurement("gloo", 1.0))["link_share"] is None


def test_table_can_be_read_by_its_columns() -> None:
    lines = report.header(SPEC, 4, FACTS)
    assert all(line.startswith("#") for line in lines)
    titles = lines[-2].lstrip("#").split()
    cells = report.format_row(
        SPEC, report.row(SPEC, measurement("fast", 500.0, wrong=3), measurement("gloo", 1000.0))
    ).split()
    row = dict(zip(titles, cells, strict=True))
    assert row == {
        "size": "8000000",
        "count": "2000000",
        "type": "float32",
        "redop": "sum",
        "time": "500.0",
        "algbw": "16.000",
        "busbw": "24.000",
        "#wrong": "3",
        "p50": "500.0",
        "p99": "500.0",
        "cpu": "100.00",
        "machine": "200.00",
        "link": "-",
        "speedup": "2.00",
        "backend": "fast",
    }


def test_lost_contributions_have_a_column_where_losses_are_allowed() -> None:
    lossy = BackendSpec.parse("commlayer:loss_bound=0.01")
    spec = Spec(backends=(BackendSpec("gloo"), lossy), sizes=(8_000_000,), collective="gradients")
    titles = report.header(spec, 4, FACTS)[-2].lstrip("#").split()
    cells = []
    for share in (None, 0.0123):
        measured = measurement("gloo", 1000.0)
        measured.not_counted = share
        row = report.format_row(spec, report.row(spec, measured, measured)).split()
        cells.append(dict(zip(titles, row, strict=True))["not-counted"])
    assert cells == ["-", "1.230"]
    assert "not-counted" not in report.header(SPEC, 4, FACTS)[-2]


def test_columns_keep_their_place() -> None:
    header = report.header(SPEC, 4, FACTS)
    row = report.format_row(SPEC, report.row(SPEC, measurement("fast", 500.0), measurement("gloo", 1000.0)))
    assert header[-2].index("backend") == row.index("fast")


def test_number_longer_than_its_column_stays_a_word_of_its_own() -> None:
    slow = measurement("fast", 1e12)
    slow.process_cpu_s = slow.machine_cpu_s = 1e9
    result = report.row(SPEC, slow, slow)
    columns = report.header(SPEC, 4, FACTS)[-2].lstrip("#").split()
    assert len(report.format_row(SPEC, result).split()) == len(columns)


def test_barrier_has_times_only() -> None:
    spec = Spec(backends=SPEC.backends, sizes=(1,), collective="barrier", scenario=NETWORK)
    backend = Backend(BackendSpec("gloo"), cast("Any", None), ())
    barrier = Measurement(backend, Barrier(1, torch.float32, "sum", 0, 4), [[10.0]], process_cpu_s=1.0)
    result = report.row(spec, barrier, barrier)
    assert (result["time_us"], result["busbw_gb_s"], result["op"]) == (10.0, 0.0, None)
    assert result["cpu_process_s_per_gb"] is None
    assert result["link_share"] is None


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "0 OK"), (7, "7 FAILED")])
def test_footer_gives_the_verdict_and_the_average_of_each_backend(wrong: int, verdict: str) -> None:
    baseline = measurement("gloo", 1000.0)
    fast = measurement("fast", 500.0, wrong=wrong)
    lines = report.footer([report.row(SPEC, measured, baseline) for measured in (baseline, fast)])
    assert lines[0].endswith(verdict)
    assert [line.split()[-2:] for line in lines[1:]] == [["12.0000", "gloo"], ["24.0000", "fast"]]


def test_document_says_under_which_conditions() -> None:
    spec = Spec(
        backends=SPEC.backends,
        sizes=(1,),
        scenario=Scenario(hosts=4, nics=(Link(rate_bps=1e6, buffer_packets=99),)),
        command=("commlayer",),
    )
    document = report.document(spec, 4, FACTS, [])
    assert document["link"]["buffer_packets"] == 99
    assert document["link"]["hosts"] == 4
    assert document["command"] == ["commlayer"]
    assert document["machine"] == FACTS
    assert document["baseline"] == "gloo"


def test_the_network_s_events_and_shortfall_are_added(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text('{"schema": 1}')
    report.add_network(path, [], "too slow")
    assert json.loads(path.read_text()) == {"schema": 1, "shortfall": "too slow"}
    report.add_network(path, [(2.5, "link_down")], None)
    assert json.loads(path.read_text())["events"] == [{"at_s": 2.5, "event": "link_down"}]
