import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from commlayer.tools.probe import heat
from commlayer.tools.probe.command import Report
from commlayer.tools.probe.findings import find
from commlayer.tools.probe.report import show
from commlayer.tools.probe.sample import Sample
from tests.unit.probe.jobs import hosts
from tests.unit.probe.samples import lose, view


def fault(each: Sample) -> None:
    if each.way.target == 2:
        lose(each)
    if 3 in (each.way.source, each.way.target):
        each.rate_bps = 20e6


def report(count: int, nics: int = 1, *, is_faulty: bool = True) -> Report:
    found = view(count, nics, fault if is_faulty else lambda _each: None)
    notes = ["host0: " + "a long note " * 20]
    return Report(hosts(count, nics), list(found.samples), find(found), notes, 12.3, ("commlayer", "probe"))


def text(of: Report, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    sink = io.TextIOWrapper(raw, encoding=encoding)
    show(of, Console(file=sink, width=80, highlight=False, markup=False))
    sink.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize(("count", "nics"), [(2, 1), (4, 2), (8, 1), (20, 1), (65, 1)])
def test_every_line_fits_into_80_columns_with_a_prefix(count: int, nics: int) -> None:
    assert max(len(line) for line in text(report(count, nics))) <= 76


def test_findings_come_first() -> None:
    lines = text(report(4))
    assert lines[0] == "2 findings (4 hosts, 12 directions, 12 s)"
    assert lines[2].startswith("1. host3 sends and receives 20 Mbit/s")
    assert any(line.startswith("2. host2 loses") for line in lines)


def test_a_clean_network_says_so() -> None:
    assert text(report(4, is_faulty=False))[0].startswith("No findings")


def test_the_map_has_rates_from_row_to_column() -> None:
    lines = text(report(4))
    start = next(number for number, line in enumerate(lines) if line.startswith("Rate in Mbit/s"))
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["host0", "host1", "host2", "host3"],
        ["host0", ".", "100", "100", "20"],
    ]


def test_a_map_of_many_hosts_has_shades_also_in_ascii() -> None:
    assert any("████" in line for line in text(report(20)))
    lines = text(report(20), "ascii")
    assert any("####" in line for line in lines)
    assert not any("?" in line for line in lines)


def test_silent_paths_and_lower_bounds_are_marked() -> None:
    some = report(4, is_faulty=False)
    some.samples[0].is_reached = False
    some.samples[1].is_own_limit = True
    lines = text(some)
    assert any(line.split() == ["host0", ".", "-", "100+", "100"] for line in lines)
    assert any("no answer" in line for line in lines)


def test_json_has_findings_hosts_and_paths() -> None:
    table = json.loads(json.dumps(report(4).table))
    assert [finding["kind"] for finding in table["findings"]] == ["rate", "loss"]
    assert [host["name"] for host in table["hosts"]] == ["host0", "host1", "host2", "host3"]
    assert len(table["paths"]) == 12
    assert table["paths"][0]["rtt_us"] == [200.0, 400.0]


def test_a_report_survives_json() -> None:
    one = report(4, 2)
    again = Report.from_table(json.loads(json.dumps(one.table)))
    assert again.table == one.table
    assert text(again) == text(one)
    with pytest.raises(KeyError):
        Report.from_table({**one.table, "version": 0})


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    heat.draw(report(3, 2).hosts, report(3, 2).samples, path)
    assert path.read_bytes().startswith(b"\x89PNG")
