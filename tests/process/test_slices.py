"""Slices of sequences in pipelines: losses and gradients are those of whole sequences; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import commlayer
from tests import ranks
from tests.drawn import alike
from tests.slices import Job, Stage, mean_loss, nested_of, pair_of, sum_loss

Make = Callable[[Job, int, int, Any], tuple[Any, list[Stage]]]
"""Makes a schedule of a rank of some, on a group, and its stages' modules."""


def stages_of(job: Job, numbers: list[int], group: Any) -> tuple[list[Any], list[Stage]]:
    from torch.distributed.pipelining import PipelineStage

    modules = [job.stage(number) for number in numbers]
    return [
        PipelineStage(module, number, job.stages, torch.device("cpu"), group=group)
        for number, module in zip(numbers, modules, strict=True)
    ], modules


def single(name: str) -> Make:
    def make(job: Job, rank: int, size: int, group: Any) -> tuple[Any, list[Stage]]:
        from torch.distributed import pipelining

        stages, modules = stages_of(job, [rank], group)
        kind = getattr(pipelining, name)
        return kind(stages[0], job.microbatches, loss_fn=job.loss, scale_grads=job.scale), modules

    return make


def several(name: str) -> Make:
    def make(job: Job, rank: int, size: int, group: Any) -> tuple[Any, list[Stage]]:
        from torch.distributed import pipelining

        stages, modules = stages_of(job, list(range(rank, job.stages, size)), group)
        kind = commlayer.pipeline.schedule if name == "own" else getattr(pipelining, name)
        return kind(stages, job.microbatches, loss_fn=job.loss, scale_grads=job.scale), modules

    return make


ONE = {name: single(name) for name in ("ScheduleGPipe", "Schedule1F1B")}
SEVERAL = {name: several(name) for name in ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "own")}


@st.composite
def jobs(draw: st.DrawFn, size: int) -> tuple[str, Job]:
    name = draw(st.sampled_from([*ONE, *SEVERAL]))
    chunks = 1 if name in ONE else draw(st.integers(1, 2))
    least = 1 if name in ("ScheduleGPipe", "ScheduleLoopedBFS") else size
    rounds = size if name in ("ScheduleInterleaved1F1B", "own") else 1
    job = Job(
        stages=chunks * size,
        width=draw(st.integers(1, 9)),
        lengths=draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        microbatches=draw(st.integers(least, max(least, 4))) // rounds * rounds,
        sequences=draw(st.integers(1, 2)),
        loss=draw(st.sampled_from([mean_loss, sum_loss])),
        form=draw(st.sampled_from([pair_of, nested_of])),
        scale=draw(st.booleans()),
    )
    return name, job


def step(job: Job, schedule: Any, rank: int, size: int, seed: int, method: str = "step") -> tuple[Any, list[Tensor]]:
    """Output and losses of one step on a rank."""
    tokens, targets = job.data(seed)
    is_last = (job.stages - 1) % size == rank
    losses: list[Tensor] = []
    kwargs: Any = {"target": targets, "losses": losses} if is_last else {}
    return getattr(schedule, method)(*([tokens] if rank == 0 else []), **kwargs), losses


def compare(job: Job, schedule: Any, modules: list[Stage], rank: int, size: int, seed: int) -> None:
    """One step against whole sequences on one process."""
    for module in modules:
        module.zero_grad()
    output, losses = step(job, schedule, rank, size, seed)
    exact_losses, exact_gradients, exact_output = job.expected(seed)
    if (job.stages - 1) % size == rank:
        torch.testing.assert_close(output, exact_output, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(losses, exact_losses, rtol=1e-11, atol=1e-12)
        assert not output.requires_grad
    else:
        assert output is None
        assert losses == []
    for number, module in zip(range(rank, job.stages, size), modules, strict=True):
        for name, parameter in module.named_parameters():
            exact = exact_gradients[number][name]
            assert (parameter.grad is None) == (exact is None), (number, name)
            if exact is not None:
                torch.testing.assert_close(parameter.grad, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@ranks.WIRES
def test_losses_and_gradients_are_those_of_whole_sequences(size: int, wire: dict[str, str]) -> None:
    ranks.run_job(_random_programs, size, environ=wire)


def _random_programs(rank: int, size: int) -> None:
    @alike(8)
    @given(jobs(size), st.integers(0, 1 << 20))
    def trial(drawn: tuple[str, Job], seed: int) -> None:
        name, job = drawn
        schedule, modules = (ONE | SEVERAL)[name](job, rank, size, dist.group.WORLD)
        commlayer.pipeline.slices(schedule, job.lengths)
        for number in range(2):
            compare(job, schedule, modules, rank, size, seed + number)

    trial()


JOB = Job(stages=2, width=5, lengths=[3, 1, 4], microbatches=2, sequences=2)


@ranks.on(2, ranks.run_job)
def test_eval_and_whole_sequences_again(rank: int, size: int) -> None:
    schedule, modules = ONE["ScheduleGPipe"](JOB, rank, size, None)
    handle = commlayer.pipeline.slices(schedule, JOB.lengths)
    _, _, exact = JOB.expected(3)
    output, losses = step(JOB, schedule, rank, size, 3, "eval")
    if rank == 1:
        torch.testing.assert_close(output, exact)
        torch.testing.assert_close(losses, JOB.expected(3)[0])
        assert not any(loss.requires_grad for loss in losses)
    assert all(parameter.grad is None for parameter in modules[0].parameters())
    compare(JOB, schedule, modules, rank, size, 4)
    handle.remove()
    compare_whole = step(JOB, schedule, rank, size, 3)[1]
    if rank == 1:
        torch.testing.assert_close(compare_whole, JOB.expected(3)[0])


@ranks.on(4, ranks.run_job)
def test_with_attach(rank: int, size: int) -> None:
    """Gradients are averaged over replicas once all slices of all micro-batches have had their backward passes."""
    place, replica = rank % 2, rank // 2
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS"):
        job = Job(stages=4 if name in SEVERAL else 2, width=6, lengths=[2, 3], microbatches=2, sequences=1)
        seen = []
        for attached in (False, True):
            schedule, modules = (ONE | SEVERAL)[name](job, place, 2, pipelines[replica])
            for module in modules:
                del module.unused, module.frozen
                vars(module)["frozen"] = torch.ones(1, dtype=torch.float64)
            parameters = [parameter for module in modules for parameter in module.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            handle = commlayer.pipeline.slices(schedule, job.lengths)
            attachment = None
            if attached:
                attachment = commlayer.pipeline.attach(schedule, optimizer, replicas[place])
                with pytest.raises(commlayer.ConfigError, match="remove\\(\\) of attach's handle first"):
                    handle.remove()
            for number in range(3):
                step(job, schedule, place, 2, 10 * number + replica)
                if not attached:
                    for parameter in parameters:
                        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=replicas[place])
                optimizer.step()
                optimizer.zero_grad()
            if attachment is not None:
                attachment.remove()
                handle.remove()
            seen.append([parameter.detach().clone() for parameter in parameters])
        for plain, ours in zip(*seen, strict=True):
            assert torch.equal(plain, ours), name


class Plain(nn.Module):
    """A stage without past keys."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def changed(change: Callable[[Stage], Any], lengths: Any = (3, 1, 4)) -> Callable[[int], Any]:
    """`slices` of a schedule whose second stage was changed."""

    def call(rank: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        module: Any = JOB.stage(rank)
        if rank == 1:
            module = change(module) or module
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        return commlayer.pipeline.slices(ScheduleGPipe(stage, 2, loss_fn=mean_loss), lengths)

    return call


def dropping(module: Stage) -> None:
    module.mask = nn.Dropout(0.1)


def attending(module: Stage) -> None:
    module.attention = nn.MultiheadAttention(4, 2, dropout=0.2)


def normalizing(module: Stage) -> None:
    module.statistics = nn.BatchNorm1d(3)


def tied(module: Stage) -> None:
    module.config = type("Config", (), {"tie_word_embeddings": True})()


def lengths_of(given: Any) -> Callable[[int], Any]:
    return lambda rank: changed(lambda _: None, given if rank == 1 else [3, 1, 4])(rank)


def in_halves(rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

    job = Job(stages=4, width=5, lengths=[3], microbatches=2, sequences=1)
    stages: list[Any] = [PipelineStage(job.stage(n), n, 4, torch.device("cpu")) for n in (rank, rank + 2)]
    return commlayer.pipeline.slices(ScheduleInterleavedZeroBubble(stages, 2, loss_fn=mean_loss), [3])


def shared(rank: int) -> Any:
    job = Job(stages=4, width=5, lengths=[3], microbatches=2, sequences=1)
    schedule, modules = SEVERAL["ScheduleLoopedBFS"](job, rank, 2, None)
    if rank == 1:
        modules[1].query = modules[0].query
    return commlayer.pipeline.slices(schedule, [3])


def twice(rank: int) -> Any:
    schedule, _ = ONE["ScheduleGPipe"](JOB, rank, 2, None)
    commlayer.pipeline.slices(schedule, JOB.lengths)
    return commlayer.pipeline.slices(schedule, JOB.lengths)


REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "no past": (changed(lambda _: Plain()), "forward of Plain has no argument 'past'"),
    "dropout": (changed(dropping), "module 'mask' has dropout"),
    "dropout of attention": (changed(attending), "module 'attention' has dropout"),
    "statistics": (changed(normalizing), "module 'statistics' takes statistics"),
    "tied by its config": (changed(tied), "its config ties the head"),
    "tied on one rank": (shared, "stages 1 and 3 share parameter 'query.weight'"),
    "halves": (in_halves, "ScheduleInterleavedZeroBubble runs backward passes in halves"),
    "twice": (twice, "has slices already"),
    "no lengths": (lengths_of([]), "lengths=[]: give whole numbers"),
    "an empty slice": (lengths_of([3, 0, 5]), "lengths=[3, 0, 5]: give whole numbers"),
    "half a token": (lengths_of([3.5]), "lengths=[3.5]: give whole numbers"),
    "a number": (lengths_of(8), "lengths=8: give a list"),
    "other lengths": (
        lengths_of([3, 5]),
        "rank 1 of the pipeline has lengths=[3, 5], and rank 0 has lengths=[3,",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@ranks.on(2, ranks.run_job)
def test_all_ranks_refuse(rank: int, size: int, name: str) -> None:
    case, told = REFUSED[name]
    both = name in ("halves", "twice")
    kind = commlayer.ConfigError if both or (rank == 1 and name != "other lengths") else commlayer.MismatchError
    with pytest.raises(kind) as raised:
        case(rank)
    assert told in str(raised.value)
    assert f"rank {rank}: pipeline.slices" in str(raised.value)


def wrong_length(schedule: Any, rank: int) -> Any:
    return schedule.step(*[torch.zeros(4, 9, dtype=torch.int64)] * (rank == 0), target=torch.zeros(4, 9))


def odd_batch(schedule: Any, rank: int) -> Any:
    return schedule.step(*[torch.zeros(3, 8, dtype=torch.int64)] * (rank == 0), target=torch.zeros(3, 8))


def without_graph(schedule: Any, rank: int) -> Any:
    with torch.no_grad():
        return step(JOB, schedule, rank, 2, 0)


def keywords(schedule: Any, rank: int) -> Any:
    tokens, targets = JOB.data(0)
    return schedule.step(*[tokens] * (rank == 0), target=targets, mask=None)


def no_target(schedule: Any, rank: int) -> Any:
    tokens, _ = JOB.data(0)
    return schedule.step(*[tokens, tokens] * (rank == 0))


STEPS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "length": (wrong_length, "slices of [3, 1, 4] tokens are 8, and the {input} has shape [4, 9]"),
    "batch": (odd_batch, "3 sequences of the {input} are no multiple of 2 micro-batches"),
    "no_grad": (without_graph, "step() under no_grad has no backward pass"),
    "keywords": (keywords, "step(mask=...): slices have no keyword arguments"),
    "arguments": (no_target, "step() got {arguments}"),
}


@ranks.on(2, ranks.run_job)
def test_refused_steps(rank: int, size: int) -> None:
    """Each rank refuses its own arguments, and the next step is as if nothing had been."""
    schedule, modules = ONE["ScheduleGPipe"](JOB, rank, size, None)
    commlayer.pipeline.slices(schedule, JOB.lengths)
    words = {"input": "target" if rank else "input", "arguments": "no target" if rank else "2 inputs"}
    for name, (call, told) in STEPS.items():
        with pytest.raises(commlayer.ConfigError) as raised:
            call(schedule, rank)
        assert told.format(**words) in str(raised.value), name
        assert f"rank {rank}: pipeline.slices" in str(raised.value)
        compare(JOB, schedule, modules, rank, size, 5)


def wrong_pair(module: Stage) -> None:
    forward = module.forward
    module.forward = lambda inputs, past=None: forward(inputs, past)[0]  # type: ignore[method-assign]


def wrong_state(module: Stage) -> None:
    forward = module.forward
    module.forward = lambda inputs, past=None: (forward(inputs, past)[0], [3])  # type: ignore[method-assign]


def shorter(module: Stage) -> None:
    forward = module.forward
    module.forward = lambda inputs, past=None: (forward(inputs, past)[0][:, 1:], [])  # type: ignore[method-assign]


def whole_numbers(module: Stage) -> None:
    forward = module.forward
    module.forward = lambda inputs, past=None: (forward(inputs, past)[0].long(), [])  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wrong_pair, "stage 0 returned Tensor, given past keys and values; return a pair"),
        (wrong_state, "stage 0 returned keys and values with a part of type int"),
        (shorter, "stage 0 returned an output of shape [2, 2, 5] for [2, 3] sequences and tokens"),
        (whole_numbers, "stage 0: an output of torch.int64 [2, 3, 5] for the next stage"),
    ],
)
@ranks.on(2, ranks.run_job)
def test_results_of_a_stage(rank: int, size: int, change: Callable[[Stage], None], told: str) -> None:
    """The rank of the stage says what is wrong, and the later ones that it refuses the step."""
    schedule, modules = ONE["ScheduleGPipe"](JOB, rank, size, None)
    if rank == 0:
        change(modules[0])
    commlayer.pipeline.slices(schedule, JOB.lengths)
    with pytest.raises(commlayer.MismatchError if rank else commlayer.ConfigError) as raised:
        step(JOB, schedule, rank, size, 0)
    assert ("an earlier stage than 1 has refused this step" if rank else told) in str(raised.value)
