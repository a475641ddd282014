import json
import socket

from commlayer.tools.bench import machine


def test_facts_are_complete_and_say_nothing_private() -> None:
    facts = machine.facts()
    for name in ("cpu", "cores", "kernel", "python", "torch", "commlayer"):
        assert facts[name]
    assert {"tcp_congestion_control", "git_commit"} <= facts.keys()
    assert facts["load_average"] >= 0
    text = json.dumps(facts)
    assert socket.gethostname() not in text.split('"')
