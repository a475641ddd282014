"""A job goes on with another number of ranks: what the old ranks owed reaches the average of the new ones."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks
from tests.drift import SHAPES, directions, hooked, mean, step_of
from tests.residual import total

STEPS = 3


def begin(rank: int, size: int, codec: str) -> bytes:
    """The state after some steps and the sum of the averages, as a file."""
    model, state = hooked(commlayer.Policy(codec=codec))
    averages = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(STEPS):
        for average, gradient in zip(averages, step_of(model, directions(rank, step)), strict=True):
            average += gradient
    return _file(state.state_dict(), averages)


def go_on(rank: int, size: int, states: list[bytes]) -> bytes:
    """The sum of the averages of one step, and what the ranks owe then, over their number."""
    model, state = hooked(commlayer.Policy())
    state.load_state_dict(_read(states[rank])[0])
    averages = [gradient.double() for gradient in step_of(model, directions(rank, STEPS))]
    powersgd = state.low_rank.state_dict()["powersgd"]
    errors = {} if powersgd is None else powersgd["errors"]
    for i, (average, parameter) in enumerate(zip(averages, model.parameters(), strict=True)):
        left = total(state.feedback, parameter).double() + errors.get(len(SHAPES) - 1 - i, 0)
        dist.all_reduce(left)
        average += left / size
    return _file(averages)


def _file(*content: Any) -> bytes:
    """Plain bytes: tensors that processes pass on are gone when these end."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.parametrize(
    ("codec", "before", "after", "exact"),
    [
        ("int4", 3, 2, (1,)),  # vectors travel in 16 bits, which keeps no errors
        ("int4", 2, 3, (1,)),
        ("int4", 2, 1, (1,)),
        ("powersgd:2", 3, 2, (1, 3)),  # factors of a matrix of two columns save nothing
        ("powersgd:2", 2, 3, (1, 3)),
        ("topk:0.05", 3, 2, (1,)),
    ],
)
def test_residuals_of_all_ranks_reach_the_new_ones(codec: str, before: int, after: int, exact: tuple[int, ...]) -> None:
    began = [_read(path) for path in ranks.run_job(begin, before, codec, environ=ranks.NETWORK)]
    states = [_file(state) for state in commlayer.reshard([state for state, _ in began], after)]
    assert len(states) == after
    (averages,) = _read(ranks.run_job(go_on, after, states, environ=ranks.NETWORK)[0])
    for number, average in enumerate(averages):
        wanted = sum(mean(before, step)[number] for step in range(STEPS)) + mean(after, STEPS)[number]
        if number not in exact:
            torch.testing.assert_close(began[0][1][number] + average, wanted, rtol=0, atol=1e-5)


def of(*sizes: int, **others: Any) -> dict[str, Any]:
    """The state of a model whose parameters have these sizes."""
    state = commlayer.HookState().state_dict()
    return {**state, "feedback": {**state["feedback"], "sizes": [*sizes], **others}}


def test_states_of_other_ranks_and_steps_are_refused() -> None:
    empty = commlayer.HookState().state_dict()
    with pytest.raises(commlayer.ConfigError, match=r"reshard\(world_size=0\)"):
        commlayer.reshard([empty], 0)
    with pytest.raises(commlayer.ConfigError, match=r"states=\[\]"):
        commlayer.reshard([], 2)
    with pytest.raises(commlayer.ConfigError, match="state 1 is of rank None after 7 steps"):
        commlayer.reshard([empty, {**empty, "steps": 7}], 2)
    for states, message in (
        (empty, r"reshard\(states=dict\): give a list of the states"),
        ([commlayer.HookState()], r"state 0, of type HookState, .* HookState\.state_dict"),
        ([empty, None], "state 1, of type NoneType, is not"),
        ([{}], "state 0, of type dict, is not"),
        ([empty, {**empty, "policy": empty["policy"] | {"codec": "int4"}}], "state 1 has another policy .* state 0"),
        ([{**empty, "world_size": 3}] * 2, "2 states of a job with 3 ranks"),
        ([of(4, orders=[[0, 1]]), of(4, orders=[[1, 0]])], "states 0 and 1 lie in memory in different orders"),
        ([of(5, 7), empty, of(5, 8)], "state 2 is of a model of 2 .* 13 elements, state 0 of one of 2 with 12;"),
    ):
        with pytest.raises(commlayer.ConfigError, match=message):
            commlayer.reshard(states, 2)  # type: ignore[arg-type]
    turned = {**empty, "feedback": {**empty["feedback"], "rank": 1}}
    with pytest.raises(commlayer.ConfigError, match="state 0 is of rank 1"):
        commlayer.reshard([turned, empty], 2)
