"""A state arrives whole, also if the WORLD that carries it ends on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.frontend.group import transfer
from commlayer.frontend.group.packing import Packing, unpack
from commlayer.frontend.group.transfer import Receiving, Sending


class Work:
    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.is_completed = is_done

    def wait(self) -> None:
        """Only called for one that is completed."""


class Mail:
    """The messages of one group, some of which are late."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.sent: dict[int, Tensor] = {}

    def send(self, tensors: list[Tensor], _to: int, tag: int) -> Work:
        self.sent[tag] = tensors[0]
        return Work(lambda: self.draw.random() < 0.5 or tag not in self.sent)

    def recv(self, tensors: list[Tensor], _source: int, tag: int) -> Work:
        def is_done() -> bool:
            if tag in self.sent and self.draw.random() < 0.5:
                tensors[0].copy_(self.sent.pop(tag))
                done.append(tag)
            return bool(done)

        done: list[int] = []
        return Work(is_done)


@pytest.mark.parametrize("seed", range(20))
def test_a_state_arrives_through_several_worlds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 100)
    monkeypatch.setattr(transfer, "IN_FLIGHT", draw.choice([1, 3, 32]))
    state = torch.randint(0, 256, (draw.randrange(1, 1000),), dtype=torch.uint8)
    packing = Packing({"tensor": state})
    packing.packed()
    sending, receiving = Sending(7), Receiving(7)
    sending.state = packing
    found: Any = None
    received = []
    for life in range(100):
        mail = Mail(draw)
        sending.resume(mail, 1, receiving.received)
        receiving.resume(mail, 0)
        for _ in range(draw.randrange(20) if life < 99 else 500):
            sending.pump()
            found = receiving.pump() if found is None else found
        received.append(receiving.received)
        if found is not None:
            break
    assert torch.equal(unpack(found)["tensor"], state)
    assert received == sorted(received)
