"""FSDP2 with codecs: gradients, gathered weights, replicas, and the refusals."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commlayer
from commlayer.compress.codec import STATELESS
from commlayer.frontend.gradients.fsdp import GradientAllReduce, GradientReduceScatter, Weights
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks
from tests.drift import Drift, check_equal, directions, mean, nmse

NMSE = {"f16": 1e-7, "bf16": 5e-6, "int8": 6e-5, "int4-int8": 0.0145}
"""The errors of contributions, on Gaussian values."""

DEFAULT = commlayer.Policy(codec="int8")


def sharded(policy: commlayer.Policy, mesh: Any = None, mp_policy: Any = None, **options: Any) -> Drift:
    model = Drift()
    fully_shard(model, mesh=mesh, mp_policy=mp_policy or MixedPrecisionPolicy())
    commlayer.compress_fsdp(model, policy, **options)
    return model


def gradients_of(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Whole gradients; DTensor gathers their shards as they are."""
    model.zero_grad()
    model(inputs).backward()
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [gradient.full_tensor() for gradient in found]


def test_codecs_that_keep_errors_are_left_out() -> None:
    assert [*NMSE] == [name for name in STATELESS if name != "none"]


@pytest.mark.parametrize("codec", NMSE)
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_gradients_are_within_the_errors_of_the_codec(rank: int, size: int, codec: str) -> None:
    model = sharded(commlayer.Policy(codec=codec))
    for step in range(2):
        for gradient, exact in zip(gradients_of(model, directions(rank, step)), mean(size, step), strict=True):
            error, small = nmse(gradient, exact), exact.numel() < 1000  # one block has the bounds, but not the mean
            assert error <= NMSE[codec] * (1 + 2 * small)
            assert error >= 0.1 * NMSE[codec]  # it was encoded


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_rotations_differ_between_steps(rank: int, size: int) -> None:
    model, inputs = sharded(commlayer.Policy(codec="int4-int8")), directions(rank, 0)
    first, second = gradients_of(model, inputs), gradients_of(model, inputs)
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_divide_factor_of_fsdp_holds(rank: int, size: int) -> None:
    model: Any = sharded(DEFAULT)
    model.set_gradient_divide_factor(0.5)  # FSDP2 asks for a PREMUL_SUM then
    for gradient, exact in zip(gradients_of(model, directions(rank, 0)), mean(size, 0), strict=True):
        assert 0.1 * NMSE["int8"] <= nmse(gradient, exact * size / 0.5) <= 2 * NMSE["int8"]


class Seen(nn.Module):
    """Keeps a copy of the weight that its last forward has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(301, 400, generator=torch.Generator().manual_seed(1)))
        self.seen = self.seen_backward = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().clone()
        return (x * self.weight).sum()


@pytest.mark.parametrize(("weights", "error"), [("bf16", 5e-6), ("int8", 6e-5)])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_forward_sees_rounded_weights_equal_on_all_ranks(rank: int, size: int, weights: Any, error: float) -> None:
    model = Seen()
    exact = model.weight.detach().clone()
    fully_shard(model)
    commlayer.compress_fsdp(model, commlayer.Policy(), weights=weights)
    for step in range(2):
        if step:
            model.unshard(async_op=True)  # type: ignore[operator]  # the forward pass waits for it
        (gradient,) = gradients_of(model, [torch.full_like(exact, rank + 1.0)][0])  # type: ignore[arg-type]
        assert torch.equal(gradient, torch.full_like(exact, (size + 1) / 2))  # codec="none"
        check_equal([model.seen], size)
        assert 0.1 * error <= nmse(model.seen, exact) <= error
        whole: Any = model.weight
        assert torch.equal(whole.full_tensor(), exact)  # the shards stay as they are


class Watched(torch.autograd.Function):
    """The sum of the products with a module's weight. Its backward keeps a copy of that weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any, weight: Tensor) -> Tensor:
        ctx.x, ctx.module = x, module
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.module.seen_backward = ctx.module.weight.detach().clone()
        return None, None, gradient * ctx.x


class SeenTwice(Seen):
    """Keeps copies of the weights that its last forward and its last backward have seen."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return Watched.apply(x, self, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_backward_sees_the_weights_of_forward_also_from_a_smaller_group(rank: int, size: int) -> None:
    inner = SeenTwice()
    exact = inner.weight.detach().clone()
    fully_shard(inner, reshard_after_forward=2)
    model = nn.Sequential(inner, nn.Identity())
    fully_shard(model)
    commlayer.compress_fsdp(model, commlayer.Policy(), weights="int8")
    for _ in range(2):
        model(torch.ones_like(exact)).backward()
        assert torch.equal(inner.seen, inner.seen_backward)
        assert 1e-6 < nmse(inner.seen, exact) < 6e-5


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_second_call_replaces_the_first(rank: int, size: int) -> None:
    model, policy = Seen(), commlayer.Policy()
    exact = model.weight.detach().clone()
    fully_shard(model)
    ways: tuple[Weights, ...] = ("int8", "none", "bf16")
    for weights in ways:
        commlayer.compress_fsdp(model, policy, weights=weights)
        model(torch.ones_like(exact)).backward()
        assert nmse(model.seen, exact) <= {"none": 0, "bf16": 5e-6, "int8": 6e-5}[weights]
        assert torch.equal(model.seen, exact) == (weights == "none")


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_second_call_must_not_forget_the_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = mesh.get_group("replicate")
    model = sharded(DEFAULT, mesh["shard"], replicate=replicas)
    with pytest.raises(commlayer.ConfigError, match=r"replicate=None\): an earlier call .* give it again"):
        commlayer.compress_fsdp(model, DEFAULT)
    commlayer.compress_fsdp(model, DEFAULT, replicate=replicas)
    check_equal(gradients_of(model, directions(rank, 0)), size)


def loss_after(steps: int, rank: int, policy: commlayer.Policy | None = None, weights: Any = "none") -> float:
    """The mean squared error of a small model on data that no rank has trained with."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    teacher = torch.randn(64, 8) / 8
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if policy is not None:
        commlayer.compress_fsdp(model, policy, weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of(seed: int) -> Tensor:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        return nn.functional.mse_loss(model(x), (x @ teacher).tanh())

    for step in range(steps):
        optimizer.zero_grad()
        loss_of(1000 * rank + step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(999_999))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_training_with_int8_equals_training_without(rank: int, size: int) -> None:
    exact = loss_after(60, rank)
    assert exact < 0.5 * loss_after(0, rank)
    for codec, weights in (("int8", "none"), ("int8", "int8"), ("int4-int8", "bf16")):
        loss = loss_after(60, rank, commlayer.Policy(codec=codec), weights)
        assert loss == pytest.approx(exact, rel=0.02)
        assert loss != exact


@pytest.mark.parametrize("codec", ["int8", "int4-int8"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_replicas_average_encoded(rank: int, size: int, codec: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(commlayer.Policy(codec=codec), mesh["shard"], replicate=mesh.get_group("replicate"))
    gradients = gradients_of(model, directions(rank, 0))
    check_equal(gradients, size)
    for gradient, exact in zip(gradients, mean(size, 0), strict=True):
        assert 0.55 * NMSE[codec] <= nmse(gradient, exact) <= 3.5 * NMSE[codec]  # 0.3 to 0.45 by the reduce-scatter


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_torchs_own_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(DEFAULT, mesh, weights="int8")
    gradients = gradients_of(model, directions(rank, 0))
    check_equal(gradients, size)
    for gradient, exact in zip(gradients, mean(size, 0), strict=True):
        assert NMSE["int8"] * 0.1 <= nmse(gradient, exact) <= 2 * NMSE["int8"]
    with pytest.raises(commlayer.ConfigError, match="averages the gradients of this model over its replicas already"):
        commlayer.compress_fsdp(model, DEFAULT, replicate=mesh.get_group("replicate"))


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_groups_of_ranks_with_other_shards_are_no_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for group in (mesh.get_group("shard"), dist.group.WORLD):
        who = rf"rank {rank}: compress_fsdp\(replicate=...\): ranks \[{rank ^ 1}\] "  # the other one of its shards
        with pytest.raises(commlayer.ConfigError, match=f"{who}of the group .* have other shards of FSDPDrift"):
            sharded(DEFAULT, mesh["shard"], replicate=group)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_replicas_without_shards_are_refused(rank: int, size: int) -> None:
    model: Any = replicate_with_fsdp.replicate(Drift())
    with pytest.raises(commlayer.ConfigError, match="nothing in it is sharded; call fully_shard first"):
        commlayer.compress_fsdp(model, DEFAULT)


@ranks.on(2, ranks.run_job)
def test_one_host_encodes_nothing(rank: int, size: int) -> None:
    for gradient, exact in zip(gradients_of(sharded(DEFAULT), directions(rank, 0)), mean(size, 0), strict=True):
        assert nmse(gradient, exact) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "int8"}, r"compress_fsdp\(int8\): give a Policy"),
        *(({"policy": commlayer.Policy(codec=codec)}, f"'{codec}'.*no place for the state.*use one of none, f16")
          for codec in ("int4", "sign", "powersgd:2")),
        ({"policy": commlayer.Policy(codec="auto")}, "codec='auto'.*use one of none, f16"),
        ({"policy": commlayer.Policy(codec="int8", loss_bound=0.01)}, "loss_bound=0.01.*use loss_bound=0"),
        ({"weights": "int4"}, "weights='int4': use one of none, bf16, int8"),
        ({"replicate": 3}, r"replicate=3: give a process group"),
        ({}, r"compress_fsdp\(Linear\): nothing in it is sharded; call fully_shard first"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=message):
        commlayer.compress_fsdp(nn.Linear(3, 3), **{"policy": DEFAULT} | options)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_other_types_are_named(rank: int, size: int) -> None:
    # Without reduce_dtype, torch 2.15 reduces in the type of the gradients that the optimizer gets.
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    inputs = [direction.bfloat16() for direction in directions(rank, 0)]
    with pytest.raises(
        commlayer.ConfigError, match=r"rank \d: .*torch.bfloat16 instead of float32; use weights='none'"
    ):
        sharded(DEFAULT, None, half, weights="int8")(inputs)
    with pytest.raises(commlayer.ConfigError, match=r"bfloat16 .*MixedPrecisionPolicy\(reduce_dtype=torch.float32\)"):
        gradients_of(sharded(DEFAULT, None, half), inputs)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rounded = [[direction.bfloat16() for direction in directions(r, 0)] for r in range(size)]
    for i, gradient in enumerate(gradients_of(sharded(DEFAULT, None, mixed), inputs)):
        assert nmse(gradient, torch.stack([gradients[i].double() for gradients in rounded]).mean(0)) < 3 * NMSE["int8"]


@pytest.mark.parametrize("setting", [{"deterministic": True}, {"algorithm": "ring"}])
@ranks.on(2, ranks.run, environ=ranks.NETWORK)
def test_settings_that_only_the_group_can_follow_are_named(rank: int, size: int, setting: dict[str, Any]) -> None:
    policy = commlayer.Policy(**setting)
    ((name, value),) = setting.items()
    for options in (None, commlayer.Options(policy)):
        ranks.init(rank, size, pg_options=options)
        model = sharded(policy)
        if options is None:
            message = rf"rank {rank}: .*Policy\({name}={value!r}\): .*has {name}=.*commlayer.Options"
            with pytest.raises(commlayer.ConfigError, match=message):
                gradients_of(model, directions(rank, 0))
        else:
            gradients_of(model, directions(rank, 0))
        dist.destroy_process_group()


def test_a_lost_rank_is_named() -> None:
    ended = ranks.outcomes(_lose_rank_2, 3, environ=ranks.NETWORK | {"COMMLAYER_PEER_TIMEOUT_S": "1"})
    for outcome in ended[:2]:
        assert outcome.error is None, outcome.error


def _lose_rank_2(rank: int, size: int) -> None:
    ranks.init(rank, size)
    model = sharded(DEFAULT, weights="int8")
    gradients_of(model, directions(rank, 0))
    result = model(directions(rank, 1))
    if rank == 2:
        os._exit(0)
    with pytest.raises(commlayer.PeerLostError, match=r"rank [01] .*\(culprit: rank 2 on "):
        result.backward()


def test_importing_commlayer_does_not_import_dtensor() -> None:
    code = "import sys, commlayer; assert 'torch.distributed.tensor' not in sys.modules"  # it takes a second
    subprocess.run([sys.executable, "-c", code], check=True, env=ranks.script_environ())


@ranks.on(2, ranks.run)
def test_other_backends_are_named(rank: int, size: int) -> None:
    ranks.init(rank, size, "gloo")
    with pytest.raises(commlayer.ConfigError, match=r"rank \d: .*is not commlayer's; call init_process_group\('comml"):
        gradients_of(sharded(DEFAULT), directions(rank, 0))
    dist.destroy_process_group()


@ranks.on(1, ranks.run_job)
def test_another_backend_for_the_device_is_named(rank: int, size: int) -> None:
    group: Any = dist.distributed_c10d._get_default_group()
    group.devices = SimpleNamespace(neighbour=lambda _: "nccl")
    try:
        with pytest.raises(
            commlayer.ConfigError, match="another backend has the cpu tensors of the group; call init_p"
        ):
            GradientReduceScatter(DEFAULT, 0).check(group, torch.ones(3))
    finally:
        group.devices = None


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_operations_that_cannot_be_encoded_are_named(rank: int, size: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, CommProcessGroup)

    def scatter(dtype: torch.dtype, op: Any, policy: commlayer.Policy, numel: int = 100) -> None:
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(op)
        output, whole = torch.empty(numel, dtype=dtype), torch.full((200,), 127, dtype=dtype)
        group.reduce_scatter_single(output, whole, options, policy=policy, key=1).wait()
        assert (output == 127 * size).all()

    total = dist.ReduceOp.SUM
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        scatter(dtype, total, DEFAULT)
    scatter(torch.float64, total, commlayer.Policy(priority=1))
    for arguments, message in (
        (
            (torch.int32, total, DEFAULT),
            rf"rank {rank} of group '0' \(default_pg\): this encoded reduce-scatter is of torch.int32",
        ),
        ((torch.float32, dist.ReduceOp.MAX, DEFAULT), "sums, averages and copies of dense floating-point"),
        ((torch.float32, total, commlayer.Policy(codec="int4")), "would lose rounding errors"),
        ((torch.float32, total, DEFAULT, 90), r"from torch.float32 \(200,\) into torch.float32 \(90,\)"),
    ):
        with pytest.raises(commlayer.ConfigError, match=message):
            scatter(*arguments)
    whole, part = torch.empty(4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(commlayer.ConfigError, match=r"this encoded all-gather is of torch\.int32"):
        group.all_gather_single(whole, part, AllgatherOptions(), policy=DEFAULT, key=1)


@ranks.on(4, ranks.run_job)
def test_averages_of_halves_over_replicas_do_not_overflow(rank: int, size: int) -> None:
    gradients = torch.full((100,), 40_960.0 if rank else 49_152.0, dtype=torch.float16)
    group = dist.distributed_c10d._get_default_group()
    GradientAllReduce(commlayer.Policy(), 2, group)(gradients)
    assert (gradients == 43_008).all()
