import json
from pathlib import Path

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.emulate.event import Event
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario, Unlike, shipped
from commlayer.tools.emulate.traffic import Cross, Incast

MATRIX = [
    "clean200",
    "loss1",
    "burst1",
    "uneven3",
    "incast_cross",
    "two_nics_100_100",
    "two_nics_150_50",
    "four_nics_50",
    "wan",
]

WHOLE = """
hosts = 3
ranks_per_host = 2
tcp_congestion_control = ["cubic"]
[[nic]]
rate_bps = 150e6
loss = 0.01
loss_burst_packets = 8
[[nic]]
rate_bps = 50_000_000
[[link]]
host = 2
nic = 1
loss = 0.03
[[cross]]
to = 1
share = 0.5
protocol = "tcp"
congestion_control = "bbr"
[[incast]]
to = 0
nic = 1
[[event]]
at_s = 5
action = "link_down"
host = 2
nic = 1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_whole_file(tmp_path: Path) -> None:
    scenario = Scenario.read(write(tmp_path, WHOLE))
    assert scenario == Scenario(
        hosts=3,
        ranks_per_host=2,
        tcp_congestion_control=("cubic",),
        nics=(Link(rate_bps=150e6, loss=0.01, loss_burst_packets=8), Link(rate_bps=50e6)),
        links=(Unlike(host=2, nic=1, loss=0.03),),
        cross=(Cross(to=1, share=0.5, protocol="tcp", congestion_control="bbr"),),
        incast=(Incast(to=0, nic=1),),
        events=(Event(at_s=5, action="link_down", host=2, nic=1),),
    )
    assert scenario.link(2, 1) == Link(rate_bps=50e6, loss=0.03)
    assert scenario.link(1, 1) == scenario.nics[1]
    assert Scenario.from_table(json.loads(json.dumps(scenario.table))) == scenario


def test_one_link_may_bleach(tmp_path: Path) -> None:
    scenario = Scenario.read(write(tmp_path, "[[nic]]\n[[nic]]\n[[link]]\nhost = 1\nnic = 1\nbleach_dscp = true"))
    assert [[link.bleach_dscp for link in scenario.host_links(host)] for host in range(2)] == [
        [False, False],
        [False, True],
    ]
    assert [link.is_filtered for link in scenario.host_links(1)] == [False, True]


def test_an_empty_file_is_two_hosts_without_stress(tmp_path: Path) -> None:
    assert Scenario.read(write(tmp_path, "")) == Scenario(hosts=2, nics=(Link(),))


def test_payload_adds_up_over_nics_and_is_that_of_the_slowest_host() -> None:
    single = Scenario(nics=(Link(rate_bps=1e9),)).payload_gb_s
    assert single is not None
    assert Scenario(nics=(Link(rate_bps=1e9),) * 2).payload_gb_s == pytest.approx(2 * single)
    slow = Scenario(nics=(Link(rate_bps=1e9),), links=(Unlike(host=1, rate_bps=1e8),))
    assert slow.payload_gb_s == pytest.approx(single / 10)
    assert Scenario().payload_gb_s is None


@pytest.mark.parametrize("name", shipped())
def test_shipped_scenario_is_valid(name: str) -> None:
    scenario = Scenario.read(name)
    assert scenario.hosts * scenario.ranks_per_host == 4
    assert str(scenario)


def test_every_row_of_the_matrix_is_shipped() -> None:
    assert set(MATRIX) <= set(shipped())


def test_a_file_goes_before_a_shipped_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Scenario.read("loss1").hosts == 4
    Path("loss1").write_text("hosts = 3")
    assert Scenario.read("loss1").hosts == 3


def test_a_scenario_that_is_not_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file here; shipped scenarios: burst1, .*loss1, "):
        Scenario.read("loss2")


def test_rates_may_be_text(tmp_path: Path) -> None:
    text = """
        [[nic]]
        rate_bps = "200M"
        [[link]]
        host = 1
        rate_bps = "100mbit"
        [[event]]
        at_s = 1
        action = "rate"
        host = 0
        rate_bps = "1G"
    """
    scenario = Scenario.read(write(tmp_path, text))
    assert (scenario.nics[0].rate_bps, scenario.links[0].rate_bps, scenario.events[0].rate_bps) == (200e6, 100e6, 1e9)
    with pytest.raises(ConfigError, match=r"nic\[0\].rate_bps: rate 'fast': expected bits per second such as 200M"):
        Scenario.read(write(tmp_path, "[[nic]]\nrate_bps = 'fast'"))
    with pytest.raises(ConfigError, match=r"nic\[0\].delay_ms = '5': expected a number"):
        Scenario.read(write(tmp_path, "[[nic]]\ndelay_ms = '5'"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = ", "not TOML"),
        ("hosts = 0", "hosts = 0: use 1 to"),
        ("host = 3", "host = 3: there is no such key"),
        ("nic = []", "nic = 0: describe 1 to"),
        ("[[nic]]\nrate = 3", r"nic\[0\].rate = 3: there is no such key; known here: rate_bps"),
        ("[[nic]]\nrate_bps = -1", r"nic\[0\].rate_bps = -1.0: use 8000 to 1e\+12 bits per second"),
        ("[[nic]]\nrate_bps = inf", r"nic\[0\].rate_bps = inf: use 8000 to 1e\+12 bits per second"),
        ("[[nic]]\nbuffer_packets = 100000000000", r"nic\[0\].buffer_packets = 100000000000: use 1 to 100000 packets"),
        ("tcp_congestion_control = ['cubic bbr']", r"tcp_congestion_control = 'cubic bbr': use names"),
        ("[[nic]]\nrate_bps = 1e6\n[[link]]\nhost = 1\nrate_bps = 1", r"link\[0\].rate_bps = 1.0: use 8000"),
        ("[[event]]\nat_s = inf\naction = 'link_down'\nhost = 0", r"event\[0\].at_s = inf: use 0 to 604800 seconds"),
        ("[[nic]]\nrate_bps = 1e4\n[[cross]]\nto = 0", r"cross\[0\]: the links of its senders would have rate_bps"),
        ("[[link]]\nhost = 2", r"link\[0\].host = 2: there are 2 hosts with 1 NIC"),
        ("[[link]]\nhost = 1\nnic = 1", r"link\[0\].nic = 1"),
        (
            "[[link]]\nhost = 1",
            r"link\[0\].host = 1: the link is like all others: say how it differs, by rate_bps, loss",
        ),
        ("[[link]]\nhost = 1\nloss = 2", r"link\[0\].loss = 2.0: use a share from 0 to 1"),
        ("[[cross]]\nto = 0", r"cross\[0\].to = 0: the link has no rate_bps"),
        ("[[nic]]\nrate_bps = 1e6\n[[incast]]\nto = 7", r"incast\[0\].to = 7"),
        ("[[nic]]\nrate_bps = 1e6\n[[cross]]\nto = 0\nprotocol = 'sctp'", r"protocol = 'sctp': expected one of udp"),
        (
            "[[nic]]\nrate_bps = 1e6\n[[cross]]\nto = 0\nprotocol = 'tcp'\ncongestion_control = 'CUBIC'",
            r"congestion_control = 'CUBIC': use a name as cubic or bbr",
        ),
        (
            "[[nic]]\nrate_bps = 1e6\n[[cross]]\nto = 0\ncongestion_control = 'bbr'",
            r"congestion_control = 'bbr': leave it out, or use protocol = 'tcp'",
        ),
        ("[[event]]\nat_s = 1\naction = 'explode'\nhost = 0", r"event\[0\].action = 'explode': expected one of link_d"),
        ("[[event]]\nat_s = 1\naction = 'loss'\nhost = 0", r"event\[0\].action = 'loss': needs loss"),
        ("[[event]]\nat_s = 1\naction = 'link_up'\nhost = 0\nloss = 0.1", r"event\[0\].loss = 0.1: action link_up has"),
        ("[[event]]\nat_s = 1\naction = 'rate'\nhost = 0\nrate_bps = 1e6", r"event\[0\].action = 'rate': the link has"),
    ],
)
def test_errors_name_file_key_value_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Scenario.read(write(tmp_path, text))
    assert "some.toml: " in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: No such file"):
        Scenario.read(tmp_path / "absent.toml")
