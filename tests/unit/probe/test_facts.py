from typing import Any

from commlayer.tools.probe.facts import host_facts, joined, notes
from tests.unit.probe.jobs import FACTS


def host(**changes: Any) -> dict[str, Any]:
    nic = {"driver": "mlx5_core", "speed_mbit_s": 10000, "mtu": 9000}
    nic |= {name: changes.pop(name) for name in ("mtu", "speed_mbit_s") if name in changes}
    return {**FACTS, "nics": {"eth0": nic}, **changes}


def test_facts_of_this_host() -> None:
    facts = host_facts(["lo", "absent0"])
    assert facts["cpus"] >= facts["cpus_allowed"] >= 1
    assert facts["receive_buffer_bytes"] > 1000
    assert facts["nics"]["lo"]["mtu"] >= 1500
    assert facts["nics"]["lo"]["receive_queues"] >= 1
    assert isinstance(facts["nics"]["lo"]["offloads"]["gro"], bool)
    assert facts["nics"]["absent0"] == {
        "driver": None,
        "speed_mbit_s": None,
        "mtu": None,
        "receive_queues": None,
        "send_queues": None,
        "offloads": {"tso": None, "gso": None, "gro": None},
    }


def test_equal_hosts_without_limits_have_no_notes() -> None:
    assert notes({"a": host(), "b": host()}, {"a": 9e9, "b": 9e9}) == []


def test_clipped_buffers_come_with_the_exact_sysctl_where_links_are_fast() -> None:
    facts = {name: host(receive_buffer_bytes=212992) for name in ("a", "b", "c")}
    assert notes(facts, {"a": 5e9, "b": 5e9, "c": 100e6}) == [
        "a and b: the kernel clips socket buffers, so that bursts lose packets: sysctl -w net.core.rmem_max=8388608"
    ]


def test_a_governor_that_saves_power() -> None:
    found = notes({"a": host(governor="powersave"), "b": host(governor="performance")}, {})
    assert found == [
        "a: the CPU governor powersave lets the engine thread wake up slowly: cpupower frequency-set -g performance"
    ]


def test_interfaces_that_differ_from_most() -> None:
    found = notes({"a": host(), "b": host(mtu=1500), "c": host(), "d": host(speed_mbit_s=1000)}, {})
    assert found == [
        "d: eth0 has 1000 Mbit/s, the others 10000",
        "b: eth0 has 1500 bytes MTU, the others 9000",
    ]


def test_names_in_a_sentence() -> None:
    assert joined([]) == ""
    assert joined(["a"]) == "a"
    assert joined(["a", "b", "c"]) == "a, b and c"
    assert joined(["a", "b", "c", "d"], 2) == "a, b and 2 more"
