"""A publisher and a reader of releases whose messages differ: an error in seconds on both sides, which names both."""

import json
import threading
import time

import pytest
import zmq

import commlayer
from commlayer.errors import MismatchError
from commlayer.telemetry import curve
from commlayer.weights import intake, message
from commlayer.weights.outlet import Outlet
from commlayer.weights.publisher import Publisher
from tests.process import test_publish
from tests.process.test_publish import PATIENCE_S

address, publisher = test_publish.address, test_publish.publisher


def stranger(address: str, stop: threading.Event, answers: list[list[bytes]]) -> None:
    """A publisher of another release: it hears questions, and gives these answers."""
    context = zmq.Context()
    outlet = Outlet(context, *message.key_and_endpoint(address, None, bind=True))
    while not stop.is_set():
        outlet.look({socket: 1 for socket in outlet.sockets if socket.poll(0)})
        if (heard := outlet.hear()) is not None:
            for answer in answers:
                outlet.say(heard[0], answer)
        stop.wait(0.01)
    outlet.close()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[message.HEARD, b'{"protocol": 9, "release": "7.5.1"}', b""]], r"it has commlayer 7\.5\.1 \(.* version 9\)"),
        ([[message.WHOLE, b'{"protocol": 3, "life": ""}', b""]], r"an earlier release \(messages of version 3\)"),
        ([], r"has not said within 0\.5 s .* \(version 4 or below\)"),
    ],
    ids=["later", "earlier", "earlier, without a version"],
)
def test_a_publisher_of_another_release_is_an_error(
    address: str, monkeypatch: pytest.MonkeyPatch, answers: list[list[bytes]], said: str
) -> None:
    monkeypatch.setattr(intake, "HEARD_S", 0.5)
    stop = threading.Event()
    thread = threading.Thread(target=stranger, args=(address, stop, answers))
    thread.start()
    try:
        with commlayer.subscribe(address, timeout_s=PATIENCE_S) as reader:
            for _ in range(2):
                with pytest.raises(MismatchError, match=said) as found:
                    next(reader)
                assert f"commlayer {message.RELEASE}" in str(found.value)
                assert f"version {message.PROTOCOL})" in str(found.value)
                assert "nstall one release of commlayer" in str(found.value)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("protocol", [3, 9])
def test_a_reader_of_another_release_is_told(
    publisher: Publisher, address: str, caplog: pytest.LogCaptureFixture, protocol: int
) -> None:
    context = zmq.Context()
    reader = curve.client(context, message.key_and_endpoint(address, None)[0])
    reader.connect(f"tcp://{address}")
    reader.send_multipart([message.ASK, json.dumps({"protocol": protocol, "release": "7.5.1"}).encode()])
    assert reader.poll(1e3 * PATIENCE_S)
    _, text, _ = reader.recv_multipart()  # three frames, of which the second says which: of all releases from 3 on
    assert json.loads(text)["protocol"] == message.PROTOCOL
    until_s = time.monotonic() + PATIENCE_S
    while not any("7.5.1" in text for text in caplog.messages) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert (
        f"it has commlayer 7.5.1 (messages of version {protocol}), this process commlayer {message.RELEASE}"
        in caplog.text
    )
    context.destroy(linger=0)


def test_a_publisher_that_commits_rarely_is_none_of_another_release(
    publisher: Publisher, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "HEARD_S", 0.3)
    with commlayer.subscribe(address, timeout_s=PATIENCE_S) as reader:
        assert reader.latest(1.0) is None
        publisher.commit(1)
        assert next(reader).number == 1
