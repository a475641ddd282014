"""The virtual sites of bench/jobs/virtual_sites.py beside `LocalSteps` over a network: equal bits in programs."""

from __future__ import annotations

import torch
from hypothesis import given

import commlayer
from bench.jobs.virtual_sites import VirtualSites
from commlayer import Fine
from commlayer.frontend.local.outer import Outer
from commlayer.frontend.local.rounds import Form, Rounds
from commlayer.frontend.local.turns import Turns
from tests import ranks
from tests.drawn import alike
from tests.process.test_local_steps import Given, Program, programs

SIZE = 3
IN_ORDER = {**ranks.NETWORK, "COMMLAYER_DETERMINISTIC": "1"}


def sgd(model: Given) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_the_network(rank: int, drawn: Program) -> list[bytes]:
    """The weights of this site after each step, the shared ones where they are evaluated, and those at the end."""
    model, seen = Given(), []
    optimizer = sgd(model)
    local = commlayer.LocalSteps(
        model, optimizer, drawn.every, drawn.fragments, drawn.outer, drawn.codec, delay=drawn.delay
    )
    with local:
        for step in range(drawn.steps):
            if (rank, step) not in drawn.skipped:
                model.step(optimizer, rank, step)
            seen.append(model.values().numpy().tobytes())
            if step in drawn.evaluated:
                with local.averaged():
                    seen.append(model.values().numpy().tobytes())
    return [*seen, model.values().numpy().tobytes()]


def virtually(rank: int, drawn: Program) -> list[bytes]:
    """The same of one site, by virtual sites."""
    models = [Given() for _ in range(SIZE)]
    turns = Turns(drawn.every, drawn.fragments, drawn.delay)
    outer = Outer.default(turns) if drawn.outer is None else Outer.of(drawn.outer)
    seen = []

    def train(site: int, rounds: Rounds) -> None:
        optimizer = sgd(models[site])
        for step in range(drawn.steps):
            if (site, step) not in drawn.skipped:
                models[site].step(optimizer, site, step)
                rounds.step(1.0)
            if site == rank:
                seen.append(models[site].values().numpy().tobytes())
                if step in drawn.evaluated:
                    with rounds.shared.averaged():
                        seen.append(models[site].values().numpy().tobytes())
        rounds.leave()

    with VirtualSites(models, turns, outer, Form(drawn.codec, Fine(), False)) as sites:
        sites.each(train)
    return [*seen, models[rank].values().numpy().tobytes()]


@ranks.on(SIZE, ranks.run_job, environ=IN_ORDER)
def test_drawn_programs_have_the_bits_of_the_network(rank: int, size: int) -> None:
    @alike(20)
    @given(programs(is_weighted=False))
    def run(drawn: Program) -> None:
        assert on_the_network(rank, drawn) == virtually(rank, drawn), drawn

    run()
