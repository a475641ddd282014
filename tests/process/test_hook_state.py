"""HookState: the state that a communication hook keeps between steps and saves, and the values that it refuses."""

import dataclasses
import io
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.compress.loss_scale import LossScale
from commlayer.frontend.group.backend import CommProcessGroup
from tests import fake_transport, ranks
from tests.fake_transport import on_fake


@ranks.on(3)
def test_a_state_finds_or_makes_its_group(rank: int, size: int) -> None:
    fake_transport.install()
    ranks.init(rank, size)
    assert commlayer.HookState().group() is dist.group.WORLD
    urgent = commlayer.HookState(commlayer.Policy(priority=1))
    assert urgent.group() is not dist.group.WORLD
    assert urgent.group() is urgent.group()
    assert urgent.group().policy.priority == 1
    dist.destroy_process_group()
    ranks.init(rank, size, "gloo")
    former = urgent.group()
    assert isinstance(former, CommProcessGroup)
    assert not former.closed
    if rank != 1:  # the others take no part
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        of_pair = commlayer.HookState(process_group=pair).group()
        assert dist.get_process_group_ranks(of_pair) == [0, 2]
    dist.destroy_process_group()


@ranks.on(2)
def test_states_share_the_groups_that_they_make(rank: int, size: int) -> None:
    """Each group has threads and descriptors of its own."""
    policy = commlayer.Policy(codec="int8")
    local = [dataclasses.replace(policy, exact_steps=7), dataclasses.replace(policy, residual="bf16"), policy]
    ranks.init(rank, size, "gloo")
    first = commlayer.HookState(policy).group()
    assert {commlayer.HookState(given).group() for given in local} == {first}
    assert commlayer.HookState(commlayer.Policy(priority=1)).group() is not first
    dist.destroy_process_group()
    ranks.init(rank, size, "gloo")
    assert not commlayer.HookState(policy).group().closed
    dist.destroy_process_group()
    ranks.init(rank, size)
    assert {commlayer.HookState(given).group() for given in local} == {dist.group.WORLD}
    dist.destroy_process_group()


def _total(rank: int, group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([float(10**rank)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@ranks.on(4, ranks.run_gloo)
def test_ranks_that_are_in_different_numbers_of_groups_make_one(rank: int, size: int) -> None:
    """The names of torch's `new_group(use_local_synchronization=True)` count the groups of a process."""
    dist.new_group([0, 2])
    assert _total(rank, commlayer.HookState().group()) == 1111.0
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = commlayer.HookState(commlayer.Policy(priority=1), halves[rank // 2])
    assert _total(rank, state.group()) == (11.0, 1100.0)[rank // 2]
    dist.barrier()


@ranks.on(2, ranks.run_gloo)
def test_a_group_gets_a_new_name_after_another_one_was_destroyed(rank: int, size: int) -> None:
    other = dist.new_group([0, 1])
    first = commlayer.HookState(commlayer.Policy(priority=1)).group()
    dist.destroy_process_group(other)
    second = commlayer.HookState(commlayer.Policy(priority=2)).group()
    dist.destroy_process_group(first)
    third = commlayer.HookState(commlayer.Policy(priority=1)).group()
    assert len({first.group_name, second.group_name, third.group_name}) == 3
    assert _total(rank, second) == _total(rank, third) == 11.0
    dist.barrier()


def test_a_pickle_that_names_the_former_module_is_read() -> None:
    state = commlayer.HookState(commlayer.Policy(loss_bound=0.25))
    now, former = b"commlayer.frontend.gradients.hook_state", b"commlayer.frontend.hook_state"
    saved = pickle.dumps(state, protocol=0)
    assert now in saved
    assert pickle.loads(saved.replace(now, former)).policy == state.policy


@pytest.mark.parametrize("copy", [lambda s: pickle.loads(pickle.dumps(s)), lambda s: _loaded(s.state_dict())])
def test_a_state_is_saved_without_its_group(copy: Callable[[commlayer.HookState], commlayer.HookState]) -> None:
    state = commlayer.HookState(commlayer.Policy(priority=2, algorithm="ring"))
    restored = copy(state)
    assert restored.policy == state.policy
    assert restored.process_group is None


def _loaded(saved: dict[str, Any]) -> commlayer.HookState:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    state = commlayer.HookState()
    state.load_state_dict(torch.load(buffer, weights_only=True))
    return state


def averages(model: nn.Module, state: commlayer.HookState) -> list[float]:
    """The gradient of one step with inputs of 1."""
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(state, commlayer.allreduce_hook)
    replica(torch.ones(1, 3)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    found = weight.grad[0].tolist()
    model.zero_grad()
    return found


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_residual_survives_a_restart_of_its_own_rank(rank: int, size: int) -> None:
    found = []
    for how in ("own", "of rank 0"):
        model = nn.Linear(3, 1, bias=False)
        state = commlayer.HookState(commlayer.Policy(loss_bound=0.1))
        averages(model, state)
        (weight,) = model.parameters()
        state.feedback.keep(torch.full((3,), 10.0 * (rank + 1)), [weight], [0], [(4, 4)])
        saved = ranks.store()
        if how == "own" or rank == 0:
            saved.set(f"{how} {rank}", pickle.dumps(state).hex())
        copy = pickle.loads(bytes.fromhex(saved.get(f"{how} {rank if how == 'own' else 0}").decode()))
        model = nn.Linear(3, 1, bias=False)
        found.append(averages(model, copy))
        assert copy.steps == 2
        found.append(averages(model, copy))
    own, after, of_rank_0, _ = found
    assert own == [1, 1 + (10 + 20) / 2, 1]
    assert after == [1, 1, 1]
    assert of_rank_0 == [1, 1 + 10 / 2, 1]  # once, not twice


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_restored_state_that_does_not_fit_the_job_warns(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 128), nn.Linear(128, 256))
    state = commlayer.HookState(commlayer.Policy(codec="int4"), fine=commlayer.Fine(model, ["0.*"]))

    def step(state: commlayer.HookState) -> None:
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(state, commlayer.allreduce_hook)
        replica(torch.randn(5, 3)).square().sum().backward()

    warnings = ranks.logged()
    step(state)
    saved = state.state_dict()
    assert saved["world_size"] == size
    who = f"rank {rank} of group '0' (default_pg)"
    for change, fine, expected in (
        ({}, state.fine, []),
        ({}, commlayer.Fine(), [f"{who}: Fine selects 2 parameters, and 3 when"]),
        (
            {"world_size": 3},
            state.fine,
            [f"{who}: the restored HookState is of a job with 3 ranks, and this one has 2"],
        ),
    ):
        copy = commlayer.HookState(fine=fine)
        copy.load_state_dict({**saved, **change})
        warnings.clear()
        step(copy)
        step(copy)
        assert [text[: len(start)] for text, start in zip(warnings, expected, strict=True)] == expected


@ranks.on(1, on_fake)
def test_a_state_that_had_a_tolerance_wants_it_again(rank: int, size: int) -> None:
    state = pickle.loads(pickle.dumps(commlayer.HookState(tolerance=commlayer.BySteps({0: 0.1}))))
    with pytest.raises(commlayer.ConfigError, match="saved with a tolerance"):
        averages(nn.Linear(3, 1, bias=False), state)
    state.tolerance = commlayer.BySteps({0: 0.1})
    averages(nn.Linear(3, 1, bias=False), state)


@pytest.mark.parametrize(
    ("policy", "loss_scale", "expected"),
    [(commlayer.Policy(), 1.0, [1, 11, 1]), (commlayer.Policy(loss_bound=0.1), 0.5, [1, 6, 1])],
    ids=["policy", "scale"],
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_residual_is_added_after_policy_or_scale_have_changed(
    rank: int, size: int, policy: commlayer.Policy, loss_scale: float, expected: list[float]
) -> None:
    model, state = nn.Linear(3, 1, bias=False), commlayer.HookState(commlayer.Policy(loss_bound=0.1))
    averages(model, state)
    (weight,) = model.parameters()
    state.feedback.keep(torch.full((3,), 10.0), [weight], [0], [(4, 4)])
    state.policy, state.loss_scale = policy, loss_scale
    assert averages(model, state) == expected
    assert not state.feedback


@ranks.on(1, on_fake)
def test_a_state_is_for_one_model(rank: int, size: int) -> None:
    state = commlayer.HookState()
    first, second = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    averages(first, state)
    with pytest.raises(RuntimeError, match="make a HookState for each model"):
        averages(second, state)
    averages(first, state)
    together = commlayer.HookState()
    models = [DistributedDataParallel(module) for module in (first, second)]
    for model in models:
        model.register_comm_hook(together, commlayer.allreduce_hook)
    with pytest.raises(RuntimeError, match="make a HookState for each model"):
        sum(model(torch.ones(1, 3)).sum() for model in models).backward()


@ranks.on(2, ranks.run_job)
def test_a_rank_that_is_new_has_the_schedule_of_the_others(rank: int, size: int) -> None:
    state = commlayer.HookState(tolerance=commlayer.BySteps({0: 0.1, 6: 0.2}))
    if rank == 0:
        state.load_state_dict(commlayer.HookState().state_dict() | {"steps": 5})
    model = nn.Linear(3, 1, bias=False)
    averages(model, state)
    averages(model, state)
    assert state.steps == 7


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"policy": {"priority": 9}}, "priority=9"),
        ({"policy": {"nonesuch": 1}}, "nonesuch"),
        ({}, "not the state of a HookState"),
        (None, "not the state of a HookState"),
    ],
)
def test_a_saved_state_that_makes_no_sense_is_refused(state: Any, text: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=text):
        commlayer.HookState().load_state_dict(state)


def test_a_saved_bound_is_no_state_for_a_tolerance() -> None:
    saved = commlayer.HookState(commlayer.Policy(loss_bound=0.1)).state_dict()
    with pytest.raises(commlayer.ConfigError, match="use one of both"):
        commlayer.HookState(tolerance=commlayer.BySteps({0: 0.1})).load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"policy": "x"}, r"HookState\(policy='x'\): give a Policy, or None$"),
        ({"policy": 3}, r"HookState\(policy=3\): give a Policy, or None$"),
        ({"policy": 0.01}, r"HookState\(policy=0.01\): .*Policy\(loss_bound=0.01\)$"),
        ({"process_group": "x"}, r"HookState\(process_group='x'\): give a ProcessGroup, or None$"),
        ({"tolerance": 0.01}, r"HookState\(tolerance=0.01\): give a Tolerance, or None; .*Policy\(loss_bound=0.01\)$"),
    ],
)
def test_a_state_of_anything_else_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=text):
        commlayer.HookState(**arguments)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "2", True, None, torch.tensor(2.0), lambda: 2.0])
def test_a_loss_scale_that_is_none_is_refused_where_it_is_set(scale: Any) -> None:
    state = commlayer.HookState()
    with pytest.raises(commlayer.ConfigError, match=r"^HookState.loss_scale=.*: use a finite number above 0"):
        state.loss_scale = scale
    assert state.loss_scale == 1.0
    with pytest.raises(commlayer.ConfigError, match="loss_scale"):
        commlayer.HookState().load_state_dict({**state.state_dict(), "loss_scale": scale})


def test_a_loss_scale_is_that_of_the_scaler_unless_it_is_set() -> None:
    scale = LossScale()
    scale.find_scalers()
    assert scale.value == 1.0
    scaler, disabled = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)
    scale.find_scalers()
    assert scale.value == 8.0
    another = torch.amp.GradScaler("cpu", init_scale=2.0)
    scale.find_scalers()
    with pytest.raises(commlayer.ConfigError, match=r"different scales \(2.0, 8.0\).*set HookState.loss_scale"):
        _ = scale.value
    scale.set(4.0)
    assert scale.value == 4.0
    scale = LossScale()
    scale.find_scalers()
    del scaler, another, disabled
    assert scale.value == 1.0


def test_a_checkpoint_holds_a_scale_only_if_one_was_set() -> None:
    state = commlayer.HookState()
    assert "loss_scale" not in state.state_dict()
    state.loss_scale = 2.0
    other = commlayer.HookState()
    other.load_state_dict(state.state_dict())
    assert other.loss_scale == 2.0
    state.load_state_dict({**commlayer.HookState().state_dict(), "loss_scale": 1.0})  # as former versions did
    assert "loss_scale" not in state.state_dict()
    state.loss_scale = 1.0  # the loss of this model is not scaled, whatever scalers there are
    other.load_state_dict(state.state_dict())
    assert other.state_dict()["loss_scale"] == 1.0


def test_a_loss_scale_may_be_any_that_a_scaler_has() -> None:
    state = commlayer.HookState()
    assert state.loss_scale == 1.0
    for scale in (2.0**-20, 2, np.float32(65536.0), torch.amp.GradScaler("cpu", init_scale=3.0).get_scale()):
        state.loss_scale = scale
        assert state.loss_scale == float(scale)
        assert type(state.loss_scale) is float


@ranks.on(2, ranks.run_job)
def test_a_bad_loss_scale_names_the_rank(rank: int, size: int) -> None:
    with pytest.raises(commlayer.ConfigError, match=rf"^rank {rank}: HookState.loss_scale=0: "):
        commlayer.HookState().loss_scale = 0


@ranks.on(2, ranks.run_job)
def test_without_a_policy_a_state_follows_a_deterministic_group(rank: int, size: int) -> None:
    """So do `overlap` and `attach`, which make one."""
    options = commlayer.Options(commlayer.Policy(deterministic=True))
    exact = dist.new_group(backend="commlayer", pg_options=options)
    state = commlayer.HookState(process_group=exact)
    assert state.group() is exact
    assert state.policy.deterministic
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=exact, gradient_as_bucket_view=True)
    handle: Any = commlayer.overlap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert handle.state.group() is exact
    assert handle.state.policy.deterministic
    assert not commlayer.HookState(commlayer.Policy(), exact).policy.deterministic
    given = commlayer.HookState(commlayer.Policy(), exact)
    given.group()
    assert not given.policy.deterministic
    tolerant = commlayer.HookState(process_group=exact, tolerance=commlayer.BySteps({0: 0.1}))
    tolerant.group()
    assert not tolerant.policy.deterministic
    plain = commlayer.HookState()
    plain.group()
    assert not plain.policy.deterministic


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("deterministic", [False, True]),  # only rank 1 needs a group of its own
        ("loss_bound", [0.0, 0.01]),
        ("codec", ["bf16", "int8"]),  # none does
        ("exact_steps", [100, 0]),
    ],
)
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_ranks_with_other_policies_all_learn_it(rank: int, size: int, field: str, values: list[Any]) -> None:
    ranks.init(rank, size)
    state = commlayer.HookState(commlayer.Policy(**{field: values[rank == 1]}))
    text = f"rank {rank} of group .* differ: {field}: {values[0]!r} on rank 0, {values[1]!r} on rank 1; use the same"
    with pytest.raises(commlayer.MismatchError, match=text) as caught:
        state.group()
    assert (caught.value.rank, caught.value.culprit) == (rank, 1)
    assert commlayer.HookState(commlayer.Policy(codec="int8")).group() is dist.group.WORLD  # the group goes on
    dist.destroy_process_group()


@ranks.on(2, environ=ranks.NETWORK)
def test_ranks_on_gloo_with_other_codecs_all_learn_it(rank: int, size: int) -> None:
    ranks.init(rank, size, "gloo")
    with pytest.raises(commlayer.MismatchError, match="codec: 'none' on rank 0, 'int8' on rank 1"):
        commlayer.HookState(commlayer.Policy(codec="int8" if rank else "none")).group()
    dist.destroy_process_group()


@ranks.on(2, environ=ranks.NETWORK)
def test_a_rank_without_a_hook_learns_of_that_of_the_other(rank: int, size: int) -> None:
    ranks.init(rank, size)
    with pytest.raises(
        commlayer.MismatchError, match=r"rank 0 called all_gather 1 .* \(the policies of its comm hook\)"
    ):
        dist.all_reduce(torch.ones(3)) if rank else commlayer.HookState().group()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "commlayer"])
@ranks.on(2)
def test_a_group_of_a_hook_has_the_timeout_of_the_models(rank: int, size: int, backend: str) -> None:
    ranks.init(rank, size, backend)
    pair = dist.new_group(timeout=timedelta(seconds=17))
    made = commlayer.HookState(commlayer.Policy(priority=1), pair).group()
    assert made is not pair
    assert made.timeout == timedelta(seconds=17)
    dist.destroy_process_group()


@pytest.mark.parametrize("given", [None, "WORLD"])
@ranks.on(1, ranks.run_job)
def test_a_state_that_is_none_is_refused(rank: int, size: int, given: str | None) -> None:
    """torch's own hooks take a group, or None."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None if given is None else dist.group.WORLD, commlayer.allreduce_hook)
    text = r"rank 0: .* as its state; .*HookState\(commlayer.Policy\(\)" + (
        r"\)" if given is None else ", process_group"
    )
    with pytest.raises(commlayer.ConfigError, match=text):
        model(torch.ones(1, 2)).sum().backward()


@ranks.on(2, ranks.run_job)
def test_a_static_graph_of_several_types_is_refused_by_name(rank: int, size: int) -> None:
    """DDP numbers both of its buckets 0."""
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)])
    net.forward = lambda given: net[0](given).double() + net[1](given.double())
    model = DistributedDataParallel(net, static_graph=True)
    model.register_comm_hook(commlayer.HookState(commlayer.Policy()), commlayer.allreduce_hook)
    with pytest.raises(RuntimeError, match="leave static_graph out"):
        model(torch.ones(2, 4)).sum().backward()
