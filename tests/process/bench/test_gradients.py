from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.bench.backends import COUNTERS, open_backends
from commlayer.tools.bench.gradients import Gradients, NotedFeedback
from commlayer.tools.bench.measure import Bench
from commlayer.tools.bench.spec import BackendSpec, Spec
from tests import ranks

WORLD = 4
COUNT = 1000
LOST = slice(100, 200)
BOUND = "commlayer:loss_bound=0.01"


def make(backend: str, rank: int = 1) -> Gradients:
    return Gradients(COUNT * 4, torch.float32, "sum", rank, WORLD, BackendSpec.parse(backend))


def contributions(backend: str) -> list[torch.Tensor]:
    return [make(backend, rank).source.clone() for rank in range(WORLD)]


def checked(gradients: Gradients, result: torch.Tensor) -> int:
    """The check of the result of one run."""
    gradients.runs += 1
    gradients.used = 1
    gradients.results[0].copy_(result)
    return gradients.wrong()


@pytest.mark.parametrize("cast", ["", ":cast=float16", ":cast=bfloat16"])
@pytest.mark.parametrize("backend", ["gloo", "commlayer", BOUND, f"{BOUND}:treatment=zero"])
def test_the_sum_of_all_is_right_and_nothing_else_nearby(backend: str, cast: str) -> None:
    name = backend + cast
    gradients, total = make(name), torch.stack(contributions(name)).sum(0)
    gradients.parts[0][0].source.copy_(gradients.source)  # as if it had been sent
    assert torch.equal(total.to(getattr(torch, cast[6:] or "float32")).float(), total)  # exact on the wire, too
    assert checked(gradients, total) == 0
    assert gradients.not_counted == 0
    total[17] += 1 << gradients.bits * gradients.rank
    assert checked(gradients, total) == 1
    assert checked(gradients, total.zero_()) > 0


def test_a_run_that_loses_nothing_forgets_what_the_run_before_lost() -> None:
    feedback, owner = NotedFeedback(), torch.zeros(COUNT)
    feedback.add_to(torch.ones(COUNT), [owner], [0])
    feedback.keep(torch.ones(COUNT), [owner], [0], [(0, 40)])
    assert feedback.missing == [(0, 40)]
    feedback.add_to(torch.ones(COUNT), [owner], [0])
    assert feedback.missing == []
    assert feedback.added == [(0, 10)]


@pytest.mark.parametrize("cast", ["", ":cast=float16", ":cast=bfloat16"])
def test_a_lost_contribution_is_told_from_a_wrong_result(cast: str) -> None:
    zero, exact = make(f"{BOUND}:treatment=zero{cast}"), make(f"commlayer{cast}")
    parts = contributions(f"{BOUND}:treatment=zero{cast}")
    parts[3][LOST] = 0
    parts[0][LOST.start] = 0
    total = torch.stack(parts).sum(0)
    assert checked(exact, total) == 100  # reliable: all of it is wrong
    assert checked(zero, total) == 0
    assert zero.not_counted == 101 / (WORLD * COUNT)
    total[LOST] += parts[1][LOST]  # counted twice
    assert checked(zero, total) > 90  # 2 bits per rank do not tell all


@pytest.mark.parametrize("cast", ["", ":cast=float16", ":cast=bfloat16"])
def test_a_mean_of_the_arrived_contributions_is_right(cast: str) -> None:
    name = f"{BOUND}:treatment=rescale{cast}"
    gradients, parts = make(name), contributions(name)
    parts[2][LOST] = 0
    total = torch.stack(parts).sum(0)
    total[LOST] = total[LOST] / 3 * 4
    assert checked(gradients, total.to(getattr(torch, cast[6:] or "float32")).float()) == 0
    assert gradients.not_counted == pytest.approx(100 / (WORLD * COUNT), rel=0.1 if "bfloat16" in cast else 0)
    total[LOST] *= 1.1
    assert checked(gradients, total) > 50


def test_a_lost_contribution_must_come_one_step_later() -> None:
    gradients, parts = make(BOUND, rank=1), contributions(BOUND)
    [part] = gradients.parts[0]
    part.source.copy_(parts[1])
    parts[1][LOST] = 0
    lossy = torch.stack(parts).sum(0)
    assert checked(gradients, lossy) == 100  # this rank was not told
    part.missing = [(LOST.start * 4, 100 * 4)]
    assert checked(gradients, lossy) == 0
    assert gradients.not_counted == 100 / (WORLD * COUNT)  # of each run

    again = gradients.source.clone()
    again[LOST] *= 2
    part.source.copy_(again)
    part.missing = []
    assert checked(gradients, gradients.expected.clone()) == 100  # forgotten
    assert checked(gradients, gradients.expected - gradients.source + again) == 0

    part.again = [(LOST.start, LOST.stop)]
    assert checked(gradients, gradients.expected - gradients.source + again) == 0
    part.missing = [(LOST.start * 4, 4)]
    assert checked(gradients, gradients.expected - gradients.source + again) > 0  # lost twice in a row


def test_a_world_too_large_for_the_wire_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 ranks: torch\.bfloat16"):
        Gradients(4096, torch.float32, "sum", 0, 9, BackendSpec.parse("gloo:cast=bfloat16"))


VARIANTS = (
    *("gloo", "gloo:cast=float16:chunks=3", "commlayer", "commlayer:cast=bfloat16"),
    *(f"{BOUND}{rest}:chunks=2" for rest in ("", ":cast=float16", ":treatment=rescale", ":treatment=zero")),
)


@pytest.mark.parametrize("environ", [ranks.NETWORK, {"COMMLAYER_SHM": "1"}], ids=["0", "1"])
@ranks.on(3, ranks.run_gloo, environ="environ")
def test_every_variant_is_right_where_nothing_is_lost(rank: int, size: int) -> None:
    control: Any = dist.group.WORLD
    specs = tuple(map(BackendSpec.parse, VARIANTS))
    backends = open_backends(specs, control, 30.0)
    assert backends[0].group is backends[1].group
    spec = Spec(specs, (3_000_000,), collective="gradients", iters=3, rounds=1)
    results = Bench(spec, backends, control, local_leader=rank == 0).run(lambda _: None)
    found = [
        (result.backend.spec, result.wrong, result.not_counted, list(result.packets) == [*COUNTERS])
        for result in results
    ]
    assert found == [(backend, 0, 0.0, str(backend).startswith("commlayer")) for backend in specs]
