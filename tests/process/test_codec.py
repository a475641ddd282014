"""Gradients that travel encoded: DDP's hook with each codec, between ranks that share no memory."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.compress.codec import ENCODED
from tests import ranks
from tests.drift import SHAPES, Drift, check_equal, directions, hooked, mean, nmse, step_of, trained
from tests.residual import total

NMSE = {"f16": 2e-7, "bf16": 1e-5, "int8": 1e-4, "int4-int8": 0.0145, "int4": 0.028, "sign": 0.55}
"""The errors of contributions and sums together, on Gaussian values."""

CODECS = [*ENCODED]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("deterministic", [False, True])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_average_is_within_the_errors_of_the_codec(rank: int, size: int, codec: str, deterministic: bool) -> None:
    model, state = hooked(commlayer.Policy(codec=codec, deterministic=deterministic))
    for step in range(3):  # DDP regroups its buckets after the first one
        gradients = step_of(model, directions(rank, step))
        check_equal(gradients, size)
        for gradient, exact in zip(gradients, mean(size, step), strict=True):
            error, fine = nmse(gradient, exact), exact.dim() < 2
            grows = step > 0 and codec in ("int4", "sign")  # by the residuals of earlier steps
            assert error <= (NMSE["bf16"] if fine else NMSE[codec] * (1 + grows))
            assert fine or error >= 0.1 * NMSE[codec]  # it was encoded
    assert state.uncounted_bytes == 0


@pytest.mark.parametrize(("codec", "residual"), [("int4", "f32"), ("int4", "bf16"), ("sign", "f32")])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_rounding_errors_come_back(rank: int, size: int, codec: str, residual: Any) -> None:
    model, state = hooked(commlayer.Policy(codec=codec, residual=residual))
    results, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(6):
        for result, gradient in zip(results, step_of(model, directions(rank, step)), strict=True):
            result += gradient
        for tensor, one in zip(exact, mean(size, step), strict=True):
            tensor += one
    for parameter, result, right in zip(model.parameters(), results, exact, strict=True):
        left = total(state.feedback, parameter)
        dist.all_reduce(left)
        if parameter.dim() < 2:
            assert not left.any()
            continue
        assert left.any()
        error = (result + left / size - right).square().mean() / right.square().mean()
        assert error < (1e-10 if residual == "f32" else 1e-6)
    stored = sum(len(v) * v.itemsize for entries in state.feedback._kept.values() for _, v, late in entries if not late)
    assert stored == sum(p.numel() for p in model.parameters() if p.dim() > 1) * (4 if residual == "f32" else 2)


@pytest.mark.parametrize("codec", ["int8", "int4", "sign"])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_overflow_reaches_every_rank_and_leaves_the_residual(rank: int, size: int, codec: str) -> None:
    model, state = hooked(commlayer.Policy(codec=codec))
    for step in range(2):
        step_of(model, directions(rank, step))
    before = [total(state.feedback, parameter) for parameter in model.parameters()]
    for value in (float("inf"), float("nan")):
        inputs = directions(rank, 2)
        if rank == 1:
            for tensor in inputs:
                tensor.view(-1)[7] = value
        gradients = step_of(model, inputs)
        assert not any(gradient.isfinite().all() for gradient in gradients)
        after = [total(state.feedback, parameter) for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_gradients_of_other_types_are_encoded_as_float32(rank: int, size: int, dtype: torch.dtype) -> None:
    model, _ = hooked(commlayer.Policy(codec="int8"), dtype)
    gradients = step_of(model, directions(rank, 0, dtype))
    check_equal(gradients, size)
    for gradient, exact in zip(gradients, mean(size, 0, dtype), strict=True):
        assert gradient.dtype == dtype
        assert nmse(gradient, exact) < 2e-4


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_fine_parameters_travel_in_16_bits(rank: int, size: int) -> None:
    model = Drift()
    _, state = hooked(commlayer.Policy(codec="int4"), fine=commlayer.Fine(model, ["weights.3", "weights.0"]))
    state.fine = commlayer.Fine(model, ["weights.3", "weights.0"])
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.6)
    wrapped.register_comm_hook(state, commlayer.allreduce_hook)
    for step in range(3):
        gradients = step_of(wrapped, directions(rank, step))
        check_equal(gradients, size)
        errors = [nmse(gradient, exact) for gradient, exact in zip(gradients, mean(size, step), strict=True)]
        assert max(errors[0], errors[1], errors[3]) < NMSE["bf16"]
        assert errors[2] > 0.005


@ranks.on(2, ranks.run_job)
def test_a_hook_that_chooses_nothing_says_why(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(codec="auto"))
    step_of(model, directions(rank, 0))
    told = "Policy(codec='auto') has chosen nothing: all ranks share a host, where nothing is encoded"
    assert state.explain() == told
    assert hooked(commlayer.Policy())[1].explain() == "Policy(codec='none') leaves nothing to choose; auto chooses"


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_auto_decides_and_explains(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy())
    state.policy = commlayer.Policy(codec="auto", allow_state=True, exact_steps=1000)
    assert state.explain() == "Policy(codec='auto') has chosen nothing: no step has been made"
    for step in range(30):
        gradients = step_of(model, directions(rank, step))
        check_equal(gradients, size)
        for gradient, exact in zip(gradients, mean(size, step), strict=True):
            assert float((gradient - exact).square().mean() / exact.square().mean()) < 2 * NMSE["int4"]
    table = state.explain()
    assert "Mbit/s measured" in table
    assert "chosen:" in table
    for codec in ("powersgd:4", "sign"):
        assert re.search(rf"^{codec} .* ms  counts 1.3 times.*; from step 1000 on$", table, re.MULTILINE)
    codecs: list[object] = [None] * size
    dist.all_gather_object(codecs, state.state_dict()["choice"])
    assert codecs == [codecs[0]] * size
    assert codecs[0]["codecs"]  # type: ignore[index]
    restored = commlayer.HookState()
    restored.load_state_dict(state.state_dict())
    assert restored.state_dict()["choice"] == codecs[0]


@pytest.mark.parametrize("codec", ["int4", "powersgd:2", "topk:0.01"])
@ranks.on(2, ranks.run_job)
def test_shared_memory_takes_no_codec(rank: int, size: int, codec: str) -> None:
    model, _ = hooked(commlayer.Policy(codec=codec))
    for gradient, exact in zip(step_of(model, directions(rank, 0)), mean(size, 0), strict=True):
        torch.testing.assert_close(gradient, exact.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "codecs", [("int4", "int8"), ("powersgd:2", "int8"), ("topk:0.01", "int8"), ("topk:0.05", "topk:0.02")]
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_ranks_with_different_codecs_are_told(rank: int, size: int, codecs: tuple[str, str]) -> None:
    model, _ = hooked(commlayer.Policy(codec=codecs[rank]))
    with pytest.raises(RuntimeError, match=r"rank"):
        step_of(model, directions(rank, 0))


def test_codecs_belong_to_hooks() -> None:
    with pytest.raises(commlayer.ConfigError, match=r"Policy\(codec='int8', algorithm='ring'\): a ring"):
        commlayer.Policy(codec="int8", algorithm="ring")
    with pytest.raises(commlayer.ConfigError, match=r"codec='int8'.*would round counters and metrics, too.*HookState"):
        commlayer.Options(commlayer.Policy(codec="int8"))


def test_fine_wants_a_model_and_patterns() -> None:
    names: Any = ["*head*"]
    with pytest.raises(commlayer.ConfigError, match=r"HookState\(fine=\['\*head\*'\]\): give a Fine"):
        commlayer.HookState(fine=names)
    with pytest.raises(commlayer.ConfigError, match=r"Fine\(model=\['\*head\*'\]\)"):
        commlayer.Fine(names)
    with pytest.raises(commlayer.ConfigError, match=r"Fine\(patterns='head'\): use a list"):
        commlayer.Fine(torch.nn.Linear(2, 2), "head")
    with pytest.raises(commlayer.ConfigError, match=r"Fine\(patterns=\['head'\]\): patterns need the model"):
        commlayer.Fine(None, ["head"])
    with pytest.raises(commlayer.ConfigError, match=r"Fine: 'haed\*' matches no parameter"):
        commlayer.Fine(torch.nn.Linear(2, 2), ["*weight", "haed*"])


@pytest.mark.parametrize(("codec", "encoded"), [("sign", (0, 2, 3)), ("powersgd:2", (0, 2)), ("topk:0.1", (0, 2, 3))])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_the_first_steps_travel_in_16_bits_also_after_a_restore(
    rank: int, size: int, codec: str, encoded: tuple[int, ...]
) -> None:
    model, state = hooked(commlayer.Policy(codec=codec))
    state.policy = commlayer.Policy(codec=codec, exact_steps=3)
    for step in range(5):
        if step == 2:
            saved = state.state_dict()
            model, state = hooked(commlayer.Policy())
            state.load_state_dict(saved)
        pairs = zip(step_of(model, directions(rank, step)), mean(size, step), strict=True)
        for i, (gradient, exact) in enumerate(pairs):
            assert (nmse(gradient, exact) < NMSE["bf16"]) == (step < 3 or i not in encoded)


@pytest.mark.parametrize("codec", ["powersgd:2", "topk:0.05"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_errors_of_unused_parameters_wait(rank: int, size: int, codec: str) -> None:
    def errors(i: int) -> torch.Tensor:
        powersgd = state.low_rank.state_dict()["powersgd"]
        kept = total(state.feedback, model.module.weights[i])
        return kept if powersgd is None else powersgd["errors"][len(SHAPES) - 1 - i].clone()

    model, state = hooked(commlayer.Policy(codec=codec), finds_unused=True)
    for step in range(2):
        step_of(model, directions(rank, step))
    before = errors(0), errors(2)
    step_of(model, [None, *directions(rank, 2)[1:]])
    assert before[0].any()
    assert torch.equal(errors(0), before[0])
    assert not torch.equal(errors(2), before[1])


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_sign_leaves_zeros_alone(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(codec="sign"))
    for step in range(3):
        inputs = directions(rank, step)
        inputs[0][100:200] = 0
        first = step_of(model, inputs)[0]
        for values in (first, total(state.feedback, model.module.weights[0])):
            flat = values.view(-1)
            # A block has 128 values. The second step has other blocks, because DDP regroups its buckets.
            assert not flat[100 * 400 + 256 : 200 * 400 - 256].any()
            assert flat[: 100 * 400].any()
            assert flat[200 * 400 :].any()


@pytest.mark.parametrize(
    "name",
    ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"],
)
def test_sign_and_top_k_refuse_optimizers_with_second_moments(name: str) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    kind = getattr(torch.optim, name)
    derived = type("Derived", (kind,), {})
    for optimizer in (kind(weights), derived(weights)):
        for codec in ("sign", "topk:0.01"):
            match = rf"codec='{codec}'\) with {name}: .*second moment.*SGD with mom"
            with pytest.raises(commlayer.ConfigError, match=match):
                commlayer.HookState(commlayer.Policy(codec=codec), optimizer=optimizer)
        commlayer.HookState(commlayer.Policy(codec="int4"), optimizer=optimizer)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_sign_wants_the_optimizer(rank: int, size: int) -> None:
    for codec in ("sign", "topk:0.01"):
        with pytest.raises(commlayer.ConfigError, match=rf"'{codec}'.*HookState\(optimizer=\.\.\.\)"):
            commlayer.HookState(commlayer.Policy(codec=codec))
    _, saved = hooked(commlayer.Policy(codec="sign"))
    model, state = hooked(commlayer.Policy())
    state.load_state_dict(saved.state_dict())
    state.optimizer = None
    with pytest.raises(RuntimeError, match=r"set the `optimizer` of a restored HookState"):
        step_of(model, directions(rank, 0))
    wrapped = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    with pytest.raises(commlayer.ConfigError, match=r"codec='sign'\) with AdamW"):
        commlayer.HookState(saved.policy, optimizer=wrapped)


@pytest.mark.parametrize(("codec", "most"), [("sign", 1.1), ("powersgd:2", 1.25), ("topk:0.05", 1.25)])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_it_trains_with_sgd(rank: int, size: int, codec: str, most: float) -> None:
    exact, encoded = (trained(rank, commlayer.Policy(codec=name, exact_steps=10)) for name in ("none", codec))
    assert exact < 0.01  # from 0.14 at the start
    assert encoded < most * exact
