"""`LocalSteps` with models that FSDP2 shards: each rank shares its shard with its peers in the other sites."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.errors import AbortedError, ConfigError
from commlayer.frontend.local.arguments import CODECS
from commlayer.frontend.local.exact import MEASURED
from tests import ranks
from tests.process.test_local_errors import Stopped, check_refused
from tests.process.test_local_state import EXACT, Normed
from tests.process.test_local_steps import WIDE, Net, equal_on_all, loss_of, train

LAYOUTS = {"FSDP2": (2, 2), "HSDP": (2, 2, 2), "one rank per site": (2, 1)}
"""(sites, shards) or (sites, replicas, shards)."""


def mesh_of(*shape: int) -> Any:
    """The mesh of this rank's site."""
    names = ("site", "replica", "shard") if len(shape) == 3 else ("site", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)[names[1:]]


def sharded(mesh: Any, model: Any = None) -> Any:
    """FSDP2 leaves the last layers, those of the outer module, gathered after a forward pass without gradients."""
    model = model or Net(WIDE)
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def values(model: nn.Module) -> Tensor:
    """The whole weights. All ranks of a site call."""
    every: list[Any] = list(model.parameters())
    return torch.cat([(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().flatten() for one in every])


class Parts(nn.Module):
    """Copies of this rank's shards of a model. What `LocalSteps` does to shards, it does to these."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._sources: list[Any] = list(model.parameters())
        self.parts = nn.ParameterList(nn.Parameter(one.to_local().detach().clone()) for one in self._sources)

    def take_gradients(self) -> None:
        """Those of the shards, which the site has averaged."""
        for part, source in zip(self.parts, self._sources, strict=True):
            part.grad = source.grad.to_local().clone()

    def check_equal(self, what: object) -> None:
        for part, source in zip(self.parts, self._sources, strict=True):
            assert torch.equal(part, source.to_local()), what


def train_as_site(model: nn.Module, optimizer: Any, site: Sequence[int], step: int) -> None:
    """Trains one process with the batches of all ranks of a site."""
    optimizer.zero_grad()
    for rank in site:
        (loss_of(model, rank, step) / len(site)).backward()
    optimizer.step()


def losses_of(rank: int, models: Sequence[nn.Module], step: int) -> list[float]:
    with torch.no_grad():
        return [float(loss_of(model, rank, step)) for model in models]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training."""

    every: int
    fragments: int
    delay: int
    codec: str
    outer: tuple[float, float] | None
    exact_steps: int
    weights: tuple[int, int] | None
    """Samples per step of a rank, by site."""
    evaluated: frozenset[int]
    """Steps after which all ranks run the model within `averaged()`."""
    steps: int
    min_sites: int | None


@st.composite
def programs(draw: Any, codecs: Sequence[str]) -> Program:
    fragments = draw(st.sampled_from([1, 1, 2, 3]))
    every = draw(st.integers(fragments, 6))
    return Program(
        every,
        fragments,
        draw(st.integers(0, -(-every // fragments))),
        draw(st.sampled_from(codecs)),
        draw(st.sampled_from([None, (1.0, 0.0), (0.7, 0.6)])),
        draw(st.sampled_from([0, 0, 2, 50])),
        draw(st.none() | st.tuples(st.integers(0, 3), st.integers(1, 3))),
        draw(st.frozensets(st.integers(0, 11), max_size=2)),
        draw(st.integers(0, 12)),
        draw(st.sampled_from([None, 1])),
    )


def local_of(model: nn.Module, optimizer: Any, drawn: Program, samples: int, **more: Any) -> Any:
    return commlayer.LocalSteps(
        model, optimizer, drawn.every, drawn.fragments, drawn.outer, drawn.codec,
        None if drawn.weights is None else lambda: samples,
        delay=drawn.delay, exact_steps=drawn.exact_steps, min_sites=drawn.min_sites, **more,
    )  # fmt: skip


def check(rank: int, drawn: Program, mesh: Any) -> None:
    """Compares bit by bit with plain modules that have the shards; and with sites of one rank, each of which trains
    with the batches of a site. Fragments are cut of shards, so those of whole weights are others."""
    site, model = mesh.mesh.flatten().tolist(), sharded(mesh)
    of_site = (0, 0) if drawn.weights is None else drawn.weights
    samples = of_site[rank // len(site)]
    peers = range(rank % len(site), dist.get_world_size(), len(site))
    group = dist.new_group(list(peers), use_local_synchronization=True)
    parts, alone = Parts(model), Net(WIDE)
    optimizers = [sgd(module) for module in (model, parts, alone)]
    losses_of(rank, [model], 0)
    compares_whole = drawn.fragments == 1 and drawn.codec == "none"
    with (
        local_of(model, optimizers[0], drawn, samples) as local,
        local_of(parts, optimizers[1], drawn, samples * len(site), group=group) as of_parts,
        local_of(alone, optimizers[2], drawn, samples, group=group) as other,
    ):
        for step in range(drawn.steps):
            optimizers[0].zero_grad()
            loss_of(model, rank, step).backward()
            parts.take_gradients()
            for optimizer in optimizers[:2]:
                optimizer.step()
            parts.check_equal(drawn)
            train_as_site(alone, optimizers[2], site, step)
            if step in drawn.evaluated:
                before = losses_of(rank, [model, alone], step)
                with local.averaged(), of_parts.averaged(), other.averaged():
                    found = losses_of(rank, [model, alone], step)
                    parts.check_equal(drawn)
                    assert local._training.rounds is None or equal_on_all(values(model)), drawn
                after = losses_of(rank, [model, alone], step)
                assert before == after, drawn
                for ours, theirs in [before, found] if compares_whole else []:
                    assert ours == pytest.approx(theirs, rel=1e-4), drawn
        assert (local.steps, local.syncs) == (of_parts.steps, of_parts.syncs)
    parts.check_equal(drawn)
    assert equal_on_all(values(model)), drawn
    assert not compares_whole or torch.allclose(values(model), values(alone), rtol=1e-4, atol=1e-5), drawn


def run_drawn(rank: int, size: int, layout: str) -> None:
    mesh = mesh_of(*LAYOUTS[layout])

    @settings(
        max_examples=16 // size, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(["none"] if layout == "HSDP" else CODECS))  # replicas encode other blocks
    def run(drawn: Program) -> None:
        check(rank, drawn, mesh)

    run()


@pytest.mark.parametrize(
    "wire",
    [pytest.param(EXACT, id="udp"), pytest.param({"COMMLAYER_DETERMINISTIC": "1"}, id="shm", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_programs(layout: str, wire: Any) -> None:
    ranks.run_job(run_drawn, math.prod(LAYOUTS[layout]), layout, environ=wire, timeout_s=250)


@pytest.mark.parametrize("codec", ["bf16", pytest.param("int4", marks=pytest.mark.slow), "powersgd:4", "auto"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_exact_steps_in_a_codec(rank: int, size: int, codec: str) -> None:
    policy = commlayer.Policy(codec=codec, exact_steps=0 if codec == "auto" else 2)
    model, other = sharded(mesh_of(2, 2)), DistributedDataParallel(Net(WIDE))
    optimizers = sgd(model), sgd(other)
    with commlayer.LocalSteps(model, optimizers[0], 4, 2, exact_steps=100, policy=policy) as local:
        train(model, optimizers[0], rank, range(12))
        assert f"gradients travel in {codec}, in optimizer.step()" in local.explain()
    train(other, optimizers[1], rank, range(12))
    assert equal_on_all(values(model))
    change = values(other) - values(Net(WIDE))
    error = (values(model) - values(other)).norm() / change.norm()
    assert error < 0.3
    assert codec == "auto" or error > 1e-4, error  # it was encoded


def restored(model: Any, optimizer: Any, local: Any, state: Any) -> None:
    for part, saved in zip((model, optimizer, local), state, strict=True):
        part.load_state_dict(copy.deepcopy(saved))


@pytest.mark.parametrize("exact_steps", [0, 9])
@ranks.on(4, ranks.run_job, environ=EXACT)
def test_a_restored_training_has_the_bits_of_one_that_went_on(rank: int, size: int, exact_steps: int) -> None:
    mesh = mesh_of(2, 2)
    policy = commlayer.Policy(codec="int4", exact_steps=2, deterministic=True)

    def begin() -> tuple[Any, Any, Any]:
        model = sharded(mesh)
        optimizer = sgd(model)
        return model, optimizer, commlayer.LocalSteps(
            model, optimizer, 6, 2, (0.7, 0.6), exact_steps=exact_steps, policy=policy
        )  # fmt: skip

    model, optimizer, local = begin()
    saved = []
    with local:
        for step in range(15):
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), local.state_dict())))
            train(model, optimizer, rank, [step])
        with local.averaged():
            whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert equal_on_all(torch.cat([one.flatten() for one in whole.values()]))
    for step in (0, 2, 4, 9, 13):
        parts = begin()
        restored(*parts, saved[step])
        with parts[2]:
            train(parts[0], parts[1], rank, range(step, 15))
        assert torch.equal(values(parts[0]), values(model)), step


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_auto_finds_the_same_on_ranks_with_other_parts(rank: int, size: int) -> None:
    """The parts of 7 rows are of 4 and of 3."""
    model = sharded(mesh_of(2, 2))
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer) as local:
        train(model, optimizer, rank, range(MEASURED))
        explained: list[Any] = [None] * size
        dist.all_gather_object(explained, local.explain().splitlines()[0])
        train(model, optimizer, rank, range(9))
    assert "H* = " in explained[0]
    assert len(set(explained)) == 1
    assert equal_on_all(values(model))


class Small(nn.Module):
    """A parameter of one value: some ranks have none of it. `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(40, 7), nn.Linear(7, 7).requires_grad_(False)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor) -> Tensor:
        for layer in self.layers:
            given = torch.tanh(layer(given))
        return given * self.scale


@pytest.mark.parametrize("exact_steps", [0, 100])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_frozen_and_small_parameters(rank: int, size: int, exact_steps: int) -> None:
    model = sharded(mesh_of(1, 4), Small())  # no exchange: only the parts matter here
    assert [len(part.to_local()) for part in [model.scale]] == [int(rank == 0)]
    model = sharded(mesh_of(2, 2), Small())
    before = model.layers[1].weight.full_tensor()
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=exact_steps):
        train(model, optimizer, rank, range(9))
    assert equal_on_all(values(model))
    assert torch.equal(model.layers[1].weight.full_tensor(), before)
    assert not torch.equal(model.scale.full_tensor(), torch.ones(1))


def thaw(model: Any) -> None:
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2):
        train(model, optimizer, dist.get_rank(), range(1))
        model.layers[1].weight.detach().add_(1)
        train(model, optimizer, dist.get_rank(), range(1, 9))


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_a_frozen_parameter_that_changes(rank: int, size: int) -> None:
    with pytest.raises((ConfigError, AbortedError)) as error:
        thaw(sharded(mesh_of(2, 2), Small()))
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, str(error.value))
    assert any("'layers.1.weight' has changed" in text for text in texts)


@pytest.mark.parametrize("buffers", ["average", "own"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_buffers(rank: int, size: int, buffers: str) -> None:
    model = sharded(mesh_of(2, 2), Normed())
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2, (1, 0), buffers=buffers) as local:
        train(model, optimizer, rank, range(8))
        mean = model.layers[1].running_var.clone()
        assert not equal_on_all(mean)
        with local.averaged():
            assert equal_on_all(model.layers[1].running_var) == (buffers == "average")
    assert equal_on_all(values(model))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert equal_on_all(model.layers[1].running_var) == (buffers == "average")
    assert torch.allclose(model.layers[1].running_var, mean, rtol=1e-5) == (buffers == "average")


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_bf16_computes_and_a_scaler_skips_a_step_of_a_site(rank: int, size: int) -> None:
    mesh = mesh_of(2, 2)
    model = Net()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with commlayer.LocalSteps(model, optimizer, 2, 2) as local:
        for step in range(9):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (torch.inf if (rank, step) in ((3, 4), (3, 8)) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert local.steps == 9 - 2 * (rank // 2)
    assert equal_on_all(values(model))


@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_uneven_sites_of_two_ranks(rank: int, size: int, kind: str) -> None:
    """The ranks of a site hear the bell at several times, and begin a turn at the same step."""
    mesh = mesh_of(2, 2)
    model: Any = sharded(mesh) if kind == "FSDP2" else DistributedDataParallel(Net(), process_group=mesh.get_group())
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer, 8, 2, codec="none", uneven=True) as local:
        while local.trained < 80:
            time.sleep(0.02 if rank // 2 else 0.002)
            train(model, optimizer, rank, [local.steps])
        steps: list[Any] = [None] * size
        dist.all_gather_object(steps, local.steps)
    assert steps[0] == steps[1] > steps[2] == steps[3]
    assert equal_on_all(values(model))


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_steps", [0, 100])
@pytest.mark.parametrize("layout", ["FSDP2", "HSDP"])
def test_an_exception_on_one_rank_ends_all_others(layout: str, exact_steps: int) -> None:
    shape = LAYOUTS[layout]
    ranks.run_job(stopped, math.prod(shape), shape, exact_steps, environ=ranks.NETWORK)


def run_with(shape: Sequence[int], before: Callable[[int, Any], None], **arguments: Any) -> None:
    """A training that calls `before(step, model)` before each step."""
    model = sharded(mesh_of(*shape))
    optimizer = sgd(model)
    with commlayer.LocalSteps(model, optimizer, 4, 1, **arguments):
        for step in range(9):
            before(step, model)
            train(model, optimizer, dist.get_rank(), [step])


def stopped(rank: int, size: int, shape: Sequence[int], exact_steps: int) -> None:
    def stop(step: int, _: Any) -> None:
        if (rank, step) == (1, 5):
            raise Stopped("rank 1")

    with pytest.raises(Stopped if rank == 1 else RuntimeError) as caught:
        run_with(shape, stop, exact_steps=exact_steps)
    assert rank == 1 or isinstance(caught.value, AbortedError) or "AbortedError: " in str(caught.value), caught.value
    dist.barrier()


@pytest.mark.parametrize("layout", ["FSDP2", "HSDP"])
def test_weights_that_are_not_finite_in_one_shard(layout: str) -> None:
    ranks.run_job(spoiled, math.prod(LAYOUTS[layout]), LAYOUTS[layout], environ=ranks.NETWORK)


def spoiled(rank: int, size: int, shape: Sequence[int]) -> None:
    """The last rank has the value. Its peer, and the neighbours of both, raise, too."""

    def spoil(step: int, model: Any) -> None:
        if (rank, step) == (size - 1, 3):
            model.layers[0].bias.detach().to_local()[-1] = torch.inf  # the loss stays finite

    with pytest.raises(commlayer.CommError, match=r"the weights of rank \d are not finite"):
        run_with(shape, spoil, delay=0)
    dist.barrier()


def parallel(mesh: Any) -> Any:
    return parallelize_module(Net(), mesh, {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_meshes_that_are_refused(rank: int, size: int) -> None:
    within, between = mesh_of(2, 2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    check_refused("all ranks average their gradients in each step, so they are one site", sharded(None))
    check_refused("so they are one site", sharded(between))
    check_refused(
        r"LocalSteps\(group=\): the ranks \[[01, ]+\] of it are ranks of one site",
        sharded(within),
        group=dist.group.WORLD,
    )
    odd = [dist.new_group([0]), dist.new_group([1, 2, 3])][min(rank, 1)]
    check_refused(r"the sites have the ranks \[0\], \[1, 2, 3\]", DistributedDataParallel(Net(), process_group=odd))
    check_refused("the sites have the ranks", Net() if rank == 0 else sharded(within))
    plain = parallel(between["shard"])
    check_refused("parameters that are DTensors, without fully_shard", plain)
    split = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "shard", "tensor"))
    both = sharded(split["shard"], parallel(split["tensor"]))
    check_refused("has the placements .*: local steps take those of fully_shard alone", both)


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_models_that_are_refused(rank: int, size: int) -> None:
    mesh = mesh_of(2, 2)
    partly = Net()
    fully_shard(partly.layers[0], mesh=mesh)
    check_refused("'layers.2.weight' is not sharded, and others are", partly)
    narrow = Net().bfloat16()
    check_refused("'layers.0.weight' is torch.bfloat16", sharded(mesh, narrow))
    averaged = sharded(mesh)
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    commlayer.compress_fsdp(averaged, commlayer.Policy(), replicate=peers)
    check_refused(r"compress_fsdp\(replicate=...\) averages its gradients", averaged)
    for at in range(size):
        other = sharded(mesh)
        if rank == at:
            other.layers[2].bias.detach().to_local().add_(1e-6)
        check_refused("'layers.2.bias' has other values on rank", other)
    for at in range(size):
        check_refused(f"rank {at}: .*topk", sharded(mesh), codec="topk:0.01" if rank == at else "none")
    check_refused(r"every differs: 4 on rank \d, 6 on rank", sharded(mesh), every=6 if rank % 2 else 4)


@ranks.on(8, ranks.run_job, environ=ranks.NETWORK)
def test_replicas_that_differ_are_refused(rank: int, size: int) -> None:
    """All sites are alike; the replicas of each are not."""
    model = sharded(mesh_of(2, 2, 2))
    if rank % 4 >= 2:
        model.layers[0].weight.detach().to_local().add_(1)
    check_refused("'layers.0.weight' has other values on rank", model)
