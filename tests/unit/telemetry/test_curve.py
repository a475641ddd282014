import contextlib
import socket
from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.telemetry import curve
from commlayer.telemetry.collector import VIEW, Collector
from commlayer.tools.top.client import Client, NoAnswerError
from tests.process.test_metrics import free_port
from tests.world import open_descriptors, until

KEY = bytes(range(16))
OTHER = bytes(range(1, 17))
WORLD = 4
STRANGERS = 200


def test_keys_come_from_the_jobs_key_and_the_role() -> None:
    pairs = [curve.pair(KEY, "server"), curve.pair(KEY, "client"), curve.pair(OTHER, "server")]
    assert pairs[0] == curve.pair(KEY, "server")
    assert len({text for pair in pairs for text in pair}) == 6
    assert {len(text) for pair in pairs for text in pair} == {40}


@pytest.fixture
def collector() -> Any:
    made = Collector(f"127.0.0.1:{free_port()}", KEY, WORLD)
    made.start()
    yield made
    made.stop()


def test_the_key_opens_the_collector(collector: Collector) -> None:
    collector.samples.put(3, b'{"rank": 3}')
    client = Client((collector._address, KEY))
    view = client.view(timeout_s=60)
    assert view["samples"] == [{"rank": 3}]
    assert 0 <= view["ages"]["3"] < 60
    for malformed in (
        [b"nonsense"],
        [b"applied", b"0", b"x", b"1"],
        [b"answer", b"0", b"1", b"\xff"],
        [b"sample", b"0", b'{"world": 1e999}'],
        [b"sample", b"0", b'{"world": 100000000}'],
        [b"sample", b"0", b"[" * 60_000],
        [b"sample", b"4", b"{}"],
        [b"end", b"65535"],
    ):
        assert client.ask(malformed, timeout_s=60)[0] == b"refused"
    for refused in (b'{"timeout_s": 1e999}', b"[" * 60_000, b'{"name": "priority", "value": 1' + b"0" * 400 + b"}"):
        assert client.ask([b"change", refused], timeout_s=60)[0] == b"result"
    assert client.view(timeout_s=60)["samples"] == [{"rank": 3}]
    client.close()


def test_a_client_follows_a_job_that_has_another_key(collector: Collector) -> None:
    later = Collector(f"127.0.0.1:{free_port()}", OTHER, WORLD)
    doors = [(collector._address, KEY)]
    client = Client(doors[0], lambda: doors[-1])
    assert client.view(timeout_s=60)["samples"] == []
    assert not client.follow()
    collector.stop()
    with pytest.raises(NoAnswerError):
        client.view(timeout_s=0.2)
    later.start()
    later.samples.put(1, b'{"rank": 1}')
    doors.append((later._address, OTHER))
    assert client.view(timeout_s=60)["samples"] == [{"rank": 1}]
    client.close()
    later.stop()


def test_a_stranger_gets_nothing_and_changes_nothing(collector: Collector) -> None:
    """Another key; no CURVE at all; the server's public key, but not the client's; bytes that are no zmq."""
    zmq = curve.load()
    stranger = Client((collector._address, OTHER))
    stranger._socket.send_multipart([b"sample", b"0", b'{"rank": 0}'])
    with pytest.raises(NoAnswerError, match="another key"):
        stranger.view(timeout_s=0.3)
    stranger.close()

    context = zmq.Context()
    for has_server_key in (False, True):
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        if has_server_key:
            plain.curve_serverkey = curve.pair(KEY, "server")[0]
            plain.curve_publickey, plain.curve_secretkey = zmq.curve_keypair()
        plain.connect(f"tcp://{collector._address}")
        with contextlib.suppress(zmq.Again):  # the handshake failed before, and libzmq gave the connection up
            plain.send_multipart([b"sample", b"0", b'{"rank": 0}'], zmq.DONTWAIT)
            plain.send_multipart([VIEW], zmq.DONTWAIT)
        assert plain.poll(300) == 0
        plain.close()
    context.term()

    host, port = curve.split(collector._address)
    with socket.create_connection((host, port)) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(1000))

    friend = Client((collector._address, KEY))
    assert friend.view(timeout_s=60)["samples"] == []
    friend.close()


def test_silent_connections_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who say nothing hold no more descriptors than there is room for, and not for long."""
    monkeypatch.setattr(curve, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr("commlayer.telemetry.collector.VISITORS", 20)
    room = 2 * WORLD + 20
    made = Collector(f"127.0.0.1:{free_port()}", KEY, WORLD)
    made.start()
    alone = open_descriptors()
    friend = Client((made._address, KEY))
    friend.view(timeout_s=60)
    before = open_descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(curve.split(made._address))
        assert friend.view(timeout_s=60)["samples"] == []  # who was there stays
        late = Client((made._address, KEY))
        assert late.view(timeout_s=60)["samples"] == []  # once the silent ones have been shown out
        assert open_descriptors() - before <= STRANGERS + room + before - alone  # and as many as the friend for `late`
        late.close()
    friend.close()
    until(lambda: open_descriptors() <= before)
    made.stop()


@pytest.mark.parametrize("address", ["nowhere", ":1", "a:b", "a:70000", "a:0"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        curve.split(address)


def test_a_port_has_a_range() -> None:
    with pytest.raises(ConfigError, match=r"'127.0.0.1:99999': use HOST:PORT with a port from 1 to 65535"):
        curve.split("127.0.0.1:99999")


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert curve.endpoint("127.0.0.1:5000", bind=True) == "tcp://127.0.0.1:5000"
    assert curve.endpoint("[::1]:5000") == "tcp://[::1]:5000"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert curve.endpoint("thishost:5000", bind=True) == "tcp://*:5000"
    assert curve.endpoint("thishost:5000", bind=True, is_one_host=True) == "tcp://127.0.1.1:5000"
    assert curve.endpoint("thishost:5000") == "tcp://127.0.1.1:5000"


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install pyzmq$"):
        curve.load()
