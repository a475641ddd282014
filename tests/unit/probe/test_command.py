import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.probe import command
from commlayer.tools.probe.command import _announce, _notes, _Progress
from commlayer.tools.probe.meeting import _distinct
from commlayer.tools.probe.path import Effort
from commlayer.tools.probe.plan import Plan
from commlayer.tools.probe.sample import Crossed, Sample
from tests.unit.probe.jobs import hosts
from tests.unit.probe.samples import view


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("lonely")
def test_one_host_alone_is_an_error_with_its_remedy() -> None:
    result = CliRunner().invoke(cli.app, ["probe"])
    assert result.exit_code == 2
    assert "1 rank(s) are on one host" in result.output
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("lonely")
def test_files_that_cannot_be_written_are_refused_before_the_measurement(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["probe", "--png", str(tmp_path / "absent" / "map.png")])
    assert result.exit_code == 2
    assert "--png" in result.output
    assert "there is no folder" in result.output


@pytest.mark.usefixtures("lonely")
def test_a_file_that_cannot_be_written_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They may be on hosts that lack the folder in any case, so they cannot look for it themselves."""
    meeting = Mock(is_leader=True)
    monkeypatch.setattr(command, "Meeting", lambda: meeting)
    with pytest.raises(ValueError, match="there is no folder"):
        command.run(command.Spec(json_path=tmp_path / "absent" / "x.json"), print, print)
    meeting.end.assert_called_once_with()


@pytest.mark.parametrize(("is_torchrun", "expected"), [(False, 3), (True, 0)])
def test_findings_are_no_crash_for_torchrun(monkeypatch: pytest.MonkeyPatch, is_torchrun: bool, expected: int) -> None:
    monkeypatch.setattr(command, "run", lambda *_: command.EXIT_FINDINGS)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert CliRunner().invoke(cli.app, ["probe"]).exit_code == expected


def test_traffic_is_announced() -> None:
    lines: list[str] = []
    plan = Plan(hosts(4), Effort(), 8)
    _announce(plan, plan.first_pass(), lines.append)
    most = Effort().bytes
    assert lines[0].startswith(
        f"4 hosts; 12 directions of paths; sends at most {12 * most / 1e6:.0f} MB of UDP in all and "
        f"{3 * most / 1e6:.0f} MB per host, for about"
    )
    sparse = Plan(hosts(20), Effort(), 8)
    _announce(sparse, sparse.first_pass(), lines.append)
    assert "20 hosts, each with 8 others at most" in lines[1]


def test_progress_is_told_only_now_and_then() -> None:
    lines: list[str] = []
    progress = _Progress(lines.append, 10.0)
    progress.advance(4.0)
    assert lines == []
    progress._told -= 5
    progress.advance(1.0)
    assert lines == ["50 % measured, about 5 s left"]


def test_slower_networks_and_lower_bounds_are_noted() -> None:
    def fault(each: Sample) -> None:
        if each.way.source_nic == "eth1":
            each.rate_bps, each.is_own_limit = 40e6, True

    notes = _notes(hosts(3, 2), view(3, 2, fault).samples)
    assert notes == [
        "network 10.87.1.0/24 (eth1) carries 40 Mbit/s, the fastest 100 Mbit/s: commlayer gives each path its share",
        "rates with + are lower bounds: the probe was the bottleneck (on loopback it reaches 2 Gbit/s)",
    ]


def test_hosts_of_one_name_are_told_apart_by_their_ranks() -> None:
    assert _distinct(["a", "b", "a"], [0, 4, 8]) == ["a (rank 0)", "b", "a (rank 8)"]


def test_rates_while_all_send_at_once_are_noted_unless_they_are_a_finding() -> None:
    def fault(each: Sample) -> None:
        each.crossed = Crossed(share * each.rate_bps, False, [900.0, 4000.0], 1000, 0)

    share = 0.97
    said = "while all hosts send at once, paths keep 97% of their rates; round trips take 4 ms"
    assert _notes(hosts(3), view(3, 1, fault).samples) == [said]
    share = 0.5
    assert _notes(hosts(3), view(3, 1, fault).samples) == []


@pytest.mark.parametrize("ports", ["0", "33"])
def test_a_wrong_number_of_ports_is_refused(ports: str) -> None:
    result = CliRunner().invoke(cli.app, ["probe", "--ports", ports])
    assert result.exit_code == 2
    assert f"--ports {ports}: use at " in result.output
