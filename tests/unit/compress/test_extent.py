"""`extents`, and residuals of a part of a buffer."""

import torch

from commlayer.compress.extent import extents
from commlayer.compress.feedback import Feedback
from commlayer.compress.fine import Fine, cut


def test_parameters_are_cut_at_the_ends_of_the_buffer() -> None:
    parameters = [torch.ones(5), torch.ones(3), torch.ones(10)]
    assert extents(parameters, [-2, 3, 6], 9) == [(0, 3), (3, 6), (6, 9)]
    assert cut([torch.ones(5, 1), torch.ones(3), torch.ones(10, 1)], [-2, 3, 6], 9, Fine()).fine == [(3, 6)]


def test_a_residual_is_added_where_it_lies_once() -> None:
    """A buffer in two shards, of which this rank had (0, 6) before, and has (4, 8) now."""
    first, second = torch.ones(5), torch.ones(3)
    parameters, feedback = [first, second], Feedback()
    feedback.meet(parameters)
    values = torch.arange(1.0, 7.0)
    feedback.keep(values.clone(), parameters, [0, 5], [(0, 4 * 4), (4 * 4, 4), (5 * 4, 4)])
    whole = torch.full((8,), 10.0)
    strays = feedback.add_to(whole, parameters, [0, 5], outside=(4, 8))
    assert whole.tolist() == [11, 12, 13, 14, 10, 10, 10, 10]
    shard = torch.full((4,), 10.0)
    own = feedback.add_to(shard, parameters, [-4, 1])
    assert shard.tolist() == [15, 16, 10, 10]
    assert own.late == [(0, 1), (1, 2)]
    feedback.spend(strays)
    assert feedback
    feedback.spend(own)
    assert not feedback
