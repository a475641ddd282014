"""Programs that take parameters in any way: with `overlap`, training is bit by bit that of the plain job."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commlayer
from tests import ranks
from tests.drawn import alike
from tests.process.training_loop import OPTIMIZERS, check_same

WIDTH, STEPS = 6, 4
FLAGS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}

Operation = Callable[[Any, Tensor, int], Tensor]
"""Takes a `Net`, values and the number of a layer."""


def times(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(hidden @ weight)


COMPILED = torch.compile(times, backend="eager")

OPERATIONS: dict[str, Operation] = {
    "module": lambda net, hidden, at: net.layers[at](hidden),
    "linear": lambda net, hidden, at: functional.linear(hidden, net.layers[at].weight, net.layers[at].bias),
    "matmul": lambda net, hidden, at: hidden @ net.layers[at].weight.t(),
    "rows": lambda net, hidden, at: hidden * net.layers[at].weight[at],
    "bias": lambda net, hidden, at: hidden + net.layers[at].bias,
    "embedding": lambda net, hidden, at: hidden + functional.embedding(net.words, net.layers[at].weight),
    "list": lambda net, hidden, at: hidden + torch.stack([layer.bias for layer in net.layers])[at],
    "functional_call": lambda net, hidden, at: torch.func.functional_call(
        net.layers[at], {name: 2 * parameter for name, parameter in net.layers[at].named_parameters()}, hidden
    ),
    "named": lambda net, hidden, at: hidden * dict(net.named_parameters())[f"layers.{at}.bias"],
    "data": lambda net, hidden, at: hidden + net.layers[at].weight.data.mean(),
    "no_grad": lambda net, hidden, at: hidden + norm_of(net.layers[at].weight),
    "numpy": lambda net, hidden, at: hidden * float(net.layers[at].weight.detach().numpy()[0, 0]),
    "copy": lambda net, hidden, at: copy.deepcopy(net.layers[at])(hidden),
    "checkpoint": lambda net, hidden, at: checkpoint(OPERATIONS["linear"], net, hidden, at, use_reentrant=False),
    "vmap": lambda net, hidden, at: torch.func.vmap(lambda row: row @ net.layers[at].weight)(hidden),
    "compiled": lambda net, hidden, at: COMPILED(hidden, net.layers[at].weight),
    "view": lambda net, hidden, at: hidden + net.views[at].mean(),
    "alias": lambda net, hidden, at: hidden * net.aliases[at].view(-1)[:WIDTH],
    "tied": lambda net, hidden, at: net.tied[at](hidden),
}


def norm_of(weight: Tensor) -> Tensor:
    with torch.no_grad():
        norm: Tensor = torch.linalg.vector_norm(weight)
        return norm


@dataclasses.dataclass(frozen=True)
class Program:
    """What the steps of a training do."""

    optimizer: str
    forwards: list[list[tuple[str, int]]]
    """The operations of each step, in turn, each on a layer."""
    views: list[int]
    """Layers of whose weights the model keeps a view."""
    aliases: list[int]
    """Layers of whose biases the model keeps an alias without gradient."""
    between: list[str]
    """What happens in each step between `step()` and the next forward pass."""
    compiled: str = ""
    """What torch compiles after `overlap`: the "model", two "modules", or the "step" of the optimizer."""


LAYERS = 4
OPERATION = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, LAYERS - 1))
PROGRAMS = st.builds(
    Program,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(st.lists(OPERATION, min_size=1, max_size=5), min_size=2, max_size=3),
    st.lists(st.integers(0, LAYERS - 1), max_size=2),
    st.lists(st.integers(0, LAYERS - 1), max_size=2),
    st.lists(st.sampled_from(["", "norm", "copy", "change", "vector", "pickle"]), min_size=1, max_size=3),
)


class Net(nn.Module):
    """Runs the operations of a program. Every parameter has a gradient in each step, as DDP asks."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.tied: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for tied, layer in zip(self.tied, self.layers, strict=True):
            tied.weight = layer.weight
        self.words = torch.arange(WIDTH)
        self.step = 0
        self.keep()

    def keep(self) -> None:
        """Views of parameters, of before the training."""
        given = self.program
        self.views = [
            linear.weight.view(-1) if at in given.views else linear.weight for at, linear in enumerate(self.layers)
        ]
        self.aliases = [
            linear.bias.detach() if at in given.aliases else linear.bias for at, linear in enumerate(self.layers)
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        for name, at in self.program.forwards[self.step % len(self.program.forwards)]:
            hidden = torch.tanh(OPERATIONS[name](self, hidden, at))
        return hidden


class Training:
    """One training, plain or overlapped."""

    def __init__(self, rank: int, program: Program, *, overlapped: bool) -> None:
        torch.manual_seed(3)
        dist._DEFAULT_FIRST_BUCKET_BYTES = 512  # Dynamo refuses buckets below this size
        self.rank, self.program = rank, program
        self.net = Net(program)
        self.model: Any = DistributedDataParallel(self.net, **FLAGS)
        self.optimizer = OPTIMIZERS[program.optimizer](self.net.parameters())
        self.seen: list[Tensor] = []
        policy = commlayer.Policy(deterministic=True)
        self.handle = commlayer.overlap(self.model, self.optimizer, policy) if overlapped else None
        if not overlapped:
            self.model.register_comm_hook(
                commlayer.HookState(policy, optimizer=self.optimizer), commlayer.allreduce_hook
            )
        torch._dynamo.reset()
        self.forward: Any = self.compiled(self.model, "model")
        self.make_step: Any = self.compiled(self.optimizer.step, "step")
        for module in self.net.layers[1:3] if program.compiled == "modules" else ():
            module.compile(backend="eager")

    def compiled(self, function: Any, name: str) -> Any:
        return torch.compile(function, backend="eager") if self.program.compiled == name else function

    def loss(self, step: int) -> Tensor:
        self.net.step = step
        inputs = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + self.rank))
        output = self.forward(inputs)
        self.seen.append(output.detach().clone())
        used = torch.stack([parameter.sum() for parameter in self.net.parameters()]).sum()
        return output.square().mean() + 0.1 * used  # type: ignore[no-any-return]

    def run(self) -> None:
        for step in range(STEPS):
            self.loss(step).backward()
            self.make_step()
            self.optimizer.zero_grad()
            self.between(self.program.between[step % len(self.program.between)])
        self.see_parameters()

    def see_parameters(self) -> None:
        if self.handle is not None:
            self.handle.finish()
        self.seen += [parameter.detach().clone() for parameter in self.net.parameters()]

    def between(self, action: str) -> None:
        net = self.net
        if action == "norm":
            self.seen.append(net.layers[0].weight.detach().norm())
        elif action == "copy":
            self.seen += [parameter.detach().clone() for parameter in copy.deepcopy(net.layers[1]).parameters()]
        elif action == "change":
            with torch.no_grad():
                net.layers[2].weight.mul_(0.5)
        elif action == "vector":
            self.seen.append(nn.utils.parameters_to_vector(net.layers.parameters()).detach().clone())
        elif action == "pickle":
            self.seen.append(copy.copy(net.layers[3].bias).detach().clone())


def check(rank: int, program: Program) -> None:
    trainings = [Training(rank, program, overlapped=overlapped) for overlapped in (False, True)]
    for training in trainings:
        training.run()
    plain, ours = trainings
    check_same(plain, ours)
    assert ours.handle is not None
    ours.handle.remove()
    assert {type(parameter) for parameter in ours.net.parameters()} == {nn.Parameter}


def program(*forwards: list[tuple[str, int]], **options: Any) -> Program:
    every = [("module", at) for at in range(LAYERS)]
    given: dict[str, Any] = {"optimizer": "SGD", "views": [], "aliases": [], "between": [""]} | options
    return Program(forwards=[every, *forwards], **given)


@pytest.mark.parametrize("name", OPERATIONS)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_later_step_takes_a_parameter_in_another_way(rank: int, size: int, name: str) -> None:
    """The first forward pass calls the modules, and the next ones do not."""
    held = [2] if name in ("view", "alias") else []  # what others hold is stepped at once
    check(rank, program([(name, 2), ("module", 0)], views=held, aliases=held, optimizer="AdamW"))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_drawn_programs(rank: int, size: int) -> None:
    @alike(30)
    @given(PROGRAMS)
    def run(drawn: Program) -> None:
        check(rank, drawn)

    run()


@pytest.mark.parametrize("part", ["model", "modules", "step"])
@ranks.on(2, functools.partial(ranks.run_job, timeout_s=250), environ=ranks.NETWORK)  # compiling takes long
def test_drawn_programs_that_torch_compiles(rank: int, size: int, part: str) -> None:
    """Dynamo reads parameters while it traces, and asks the optimizer for other operations then.

    A compiled step of AdamW rounds otherwise, and those of `overlap` are not compiled.
    """
    fixed: dict[str, Any] = {"optimizer": "SGD"} if part == "step" else {}

    @alike(6)
    @given(PROGRAMS)
    def run(drawn: Program) -> None:
        check(rank, dataclasses.replace(drawn, compiled=part, **fixed))

    run()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_code_that_python_does_not_show_is_refused(rank: int, size: int) -> None:
    """torch.func.grad takes parameters that no function of Python takes."""

    def slope(net: Any, hidden: Tensor, at: int) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda bias: (hidden.detach() * bias).sin().sum())(net.layers[at].bias)
        return hidden * slopes

    OPERATIONS["slope"] = slope
    with pytest.raises(commlayer.ConfigError, match=rf"rank {rank}: .*'layers.2.bias' as it was .* handle.finish\(\)"):
        check(rank, program([("slope", 2)]))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_memory_that_others_hold_is_stepped_at_once(rank: int, size: int) -> None:
    """The log says so, once."""
    records = ranks.logged()
    check(rank, program([("module", 0)], views=[1], aliases=[3]))
    found = [record for record in records if "is held by another tensor" in record]
    assert len(found) == 1
    assert "2 parameters" in found[0]
    assert "parameter 2 of the optimizer, (6, 6)" in found[0]
