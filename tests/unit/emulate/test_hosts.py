from commlayer.tools.emulate import hosts


def test_every_nic_of_every_host_has_a_name() -> None:
    text = hosts.table(2, 2, lambda host, nic: f"10.87.{nic}.{host + 1}")
    assert text.splitlines() == [
        *("127.0.0.1 localhost", "::1 localhost"),
        *("10.87.0.1 host0", "10.87.1.1 host0-eth1", "10.87.0.2 host1", "10.87.1.2 host1-eth1"),
    ]
    assert text.endswith("\n")
