import json
import threading

from commlayer.tools.probe.packets import DATA, END, RESULT, Port
from commlayer.tools.probe.responder import Responder
from tests.unit.probe.loopback import COOKIE


def test_late_packets_count_for_the_next_answer() -> None:
    near, far = Port("127.0.0.1", COOKIE), Port("127.0.0.1", COOKIE)
    to = far.address, far.number
    responder = Responder([far])
    try:
        near.send(DATA, to, run=9, number=0)
        near.send(DATA, to, run=9, number=2)
        responder.serve(lambda: True, 10.0)
        near.send(END, to, run=9, number=3)  # to the next round of the same responder
        near.send(DATA, to, run=9, number=1)
        near.send(END, to, run=9, number=3)
        responder.serve(lambda: True, 10.0)
        answers = []
        while near.wait(0.2):
            arrival = near.receive()
            assert arrival is not None
            assert (arrival.kind, arrival.run) == (RESULT, 9)
            summary = json.loads(arrival.body)
            answers.append((summary["received"], summary["lost"], summary["bursts"]))
    finally:
        near.close()
        far.close()
    assert answers == [(2, 1, 1), (3, 0, 0)]


def test_old_trains_are_forgotten() -> None:
    near, far = Port("127.0.0.1", COOKIE), Port("127.0.0.1", COOKIE)
    responder = Responder([far])
    try:
        for run in range(100):
            near.send(DATA, (far.address, far.number), run=run)
        responder.serve(lambda: True, 10.0)
        assert len(responder._trains) == 64
    finally:
        near.close()
        far.close()


def test_a_driver_that_never_ends_is_not_served_for_ever() -> None:
    near, far = Port("127.0.0.1", COOKIE), Port("127.0.0.1", COOKIE)
    ended = threading.Event()

    def send_on() -> None:
        while not ended.wait(0.005):
            near.send(DATA, (far.address, far.number), run=1)

    sender = threading.Thread(target=send_on)
    sender.start()
    try:
        assert not Responder([far]).serve(lambda: False, 0.1)
        ended.set()
        assert Responder([far]).serve(lambda: True, 10.0)
    finally:
        ended.set()
        sender.join()
        near.close()
        far.close()
