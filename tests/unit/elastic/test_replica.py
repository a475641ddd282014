"""What a rank tells and compares in a new WORLD."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from commlayer.frontend.elastic.averages import Averages
from commlayer.frontend.elastic.replica import Replica
from commlayer.frontend.group.state import State


@pytest.mark.parametrize("has_made", [True, False])
def test_a_rank_compares_its_state_with_that_of_one_that_has_joined(has_made: bool) -> None:
    """A rank dies in the very step in which the joiner is ready. Those that have made the step listen to it no more."""
    model = nn.Linear(2, 1)
    state = State(model, torch.optim.SGD(model.parameters()), None)
    replica = Replica(state, Averages(list(model.parameters())), "none")
    replica.made, replica.listening, replica._compares = 5, set() if has_made else {2}, has_made
    replica._transfers = mock.Mock()
    replica._transfers.match.return_value = False
    replica._transfers.report.return_value = {}
    world: Any = mock.Mock(own=0, members=[0, 2], ARE_DIVIDED=False)
    world.whole, world.likes = set, lambda: [[0, 2]]
    replica.meet(world, [replica.report()] * 2)
    assert replica.listening == set()
    assert replica._compares
