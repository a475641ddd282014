"""The Megatron example's segments, on a stand-in for Megatron's buckets and distributed optimizer with one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commlayer.frontend.work.context import current_priority
from examples.megatron.segments import ByNextUse, Deferred, in_order

WIDTH = 3


class Handle:
    def __init__(self, log: list[Any], name: str) -> None:
        self._note = log, name

    def wait(self) -> None:
        log, name = self._note
        log.append(name)


class Group:
    """One bucket with one parameter; notes what happens, with its class."""

    is_first_batch = False
    grad_reduce_handle: Handle | None = None
    param_gather_handle: Handle | None = None

    def __init__(self, name: str, parameter: Any, log: list[Any]) -> None:
        self.name, self.params, self.log = name, {parameter}, log
        self.buckets = [SimpleNamespace(grad_data=parameter.main_grad)]

    def start_grad_sync(self) -> None:
        self.log.append(f"reduce {self.name} {current_priority()}")
        self.grad_reduce_handle = Handle(self.log, f"reduced {self.name}")

    def finish_grad_sync(self) -> None:
        assert self.grad_reduce_handle is not None
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None

    def start_param_sync(self) -> None:
        self.log.append(f"gather {self.name} {current_priority()}")
        self.param_gather_handle = Handle(self.log, f"gathered {self.name}")

    def finish_param_sync(self) -> None:
        raise AssertionError("replaced by Deferred")


class Job:
    """Two chunks of two layers. As in Megatron, groups are in the order of the backward pass."""

    def __init__(self, **changes: Any) -> None:
        self.log: list[Any] = []
        settings = {"sequence_parallel": False, "calculate_per_token_loss": False, "num_moe_experts": None, **changes}
        ddp = SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=changes.get("overlap_param_gather", True))
        config = SimpleNamespace(**settings, finalize_model_grads_func=None)
        self.chunks, self.groups, self.parameters = [], [], []
        for names in ("ab", "cd"):
            module = nn.ParameterList(torch.arange(float(WIDTH)) + ord(name) for name in names)
            for parameter in module:
                parameter.main_grad = torch.zeros(WIDTH)
            groups = [Group(name, parameter, self.log) for name, parameter in zip(names, module, strict=True)][::-1]
            buffers = [SimpleNamespace(reset=None)]
            module.share_embeddings_and_output_weights = changes.get("share", False)
            chunk = SimpleNamespace(
                parameters=module.parameters, bucket_groups=groups, expert_parallel_bucket_groups=[], config=config
            )
            self.chunks.append(SimpleNamespace(**vars(chunk), ddp_config=ddp, buffers=buffers, module=module))
            self.parameters += list(module)
            self.groups += groups[::-1]
        self.shards = [nn.Parameter(parameter.data) for parameter in self.parameters]  # views, as Megatron's
        self.adam = torch.optim.AdamW(self.shards, lr=0.1)
        self.optimizer = SimpleNamespace(
            config=SimpleNamespace(
                clip_grad=changes.get("clip_grad", 0.0), bf16=changes.get("bf16", False), fp16=False
            ),
            optimizer=self.adam,
            is_stub_optimizer=False,
            model_fp32_groups=[self.parameters],
            shard_fp32_groups=[self.shards],
            _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=0, end=WIDTH)},
            step=self.step,
        )
        self.optimizer.chained_optimizers = [self.optimizer]

    def step(self) -> tuple[bool, float, None]:
        self.log.append(f"step {current_priority()}")
        return True, 1.5, None

    def backward(self) -> None:
        for group, parameter in zip(self.groups[::-1], self.parameters[::-1], strict=True):
            parameter.main_grad += parameter.detach() / 100
            group.start_grad_sync()


def values(parameters: list[Any]) -> list[list[float]]:
    return [parameter.detach().tolist() for parameter in parameters]


def test_groups_are_in_the_order_of_the_forward_pass() -> None:
    assert "".join(group.name for group in in_order(Job().chunks)) == "abcd"


def test_classes_follow_the_next_use() -> None:
    job = Job()
    by_next_use = ByNextUse(job.chunks, job.optimizer)
    job.backward()
    assert by_next_use.step() == (True, 1.5, None)
    by_next_use.finish()
    assert job.log == [
        *("reduce d 7", "reduce c 5", "reduce b 3", "reduce a 1"),
        "step 0",
        *("gather a 1", "gather b 3", "gather c 5", "gather d 7"),
        *("gathered a", "gathered b", "gathered c", "gathered d"),
    ]
    assert current_priority() is None


def test_steps_are_made_before_the_next_use() -> None:
    job = Job()
    deferred = Deferred(job.chunks, job.optimizer)
    before = values(job.parameters)
    job.backward()
    job.chunks[0].config.finalize_model_grads_func(job.chunks)
    assert deferred.step() == (True, 0.0, None)
    assert job.log == ["reduce d 7", "reduce c 5", "reduce b 3", "reduce a 1"]
    job.log.clear()
    job.groups[0].finish_param_sync()
    assert job.log == ["reduced a", "gather a 1", "reduced b", "gather b 3", "gathered a"]
    assert [old != new for old, new in zip(before, values(job.parameters), strict=True)] == [True, True, False, False]
    assert all(not parameter.main_grad.any() for parameter in job.parameters[:2])  # for the next backward pass
    job.log.clear()
    job.groups[0].finish_param_sync()  # of the next microbatch
    assert job.log == []
    deferred.finish()
    assert job.log == ["reduced c", "gather c 5", "reduced d", "gather d 7", "gathered b", "gathered c", "gathered d"]


def test_deferred_steps_equal_the_optimizers_own() -> None:
    job, plain = Job(), Job()
    deferred = Deferred(job.chunks, job.optimizer)
    for rate in (0.1, 0.01, 0.05):
        job.adam.param_groups[0]["lr"] = rate
        job.backward()
        job.chunks[0].config.finalize_model_grads_func(job.chunks)
        deferred.step()
        job.adam.param_groups[0]["lr"] = 9.0  # a scheduler comes before the deferred step
        job.adam.zero_grad()
        deferred.finish()
        plain.adam.param_groups[0]["lr"] = rate
        plain.backward()
        for shard, parameter in zip(plain.shards, plain.parameters, strict=True):
            shard.grad = parameter.main_grad.clone()
            parameter.main_grad.zero_()
        plain.adam.step()
        assert values(job.parameters) == values(plain.parameters)


def test_the_first_batch_starts_its_reductions_at_the_end() -> None:
    job = Job()
    for group in job.groups:
        group.is_first_batch = True
    Deferred(job.chunks, job.optimizer)
    job.chunks[0].config.finalize_model_grads_func(job.chunks)
    assert job.log == ["reduce d 7", "reduce c 5", "reduce b 3", "reduce a 1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_grad": 1.0},
        {"bf16": True},
        {"overlap_param_gather": False},
        {"sequence_parallel": True},
        {"calculate_per_token_loss": True},
        {"num_moe_experts": 4},
        {"share": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_configurations_that_need_more_than_a_gradient_are_refused(changes: dict[str, Any]) -> None:
    job = Job(**changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        Deferred(job.chunks, job.optimizer)
