"""`commlayer.torchtitan` on classes that look like torchtitan's, which is not installed here."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import commlayer
from tests import ranks
from tests.process.hosts import LOOPBACK, on_hosts

SIZE, WIDTH, EXPERTS, TOP_K = 4, 64, 8, 3
HOSTS = [0, 0, 1, 1]


class LocalTokenDispatcher:
    """torchtitan's dispatcher of a layer that is not divided over ranks."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Any) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh

    def dispatch(self, tokens: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor) -> Any:
        return "local", tokens, scores, expert_ids, counts

    def combine(self, outputs: Any, sent: Any, tokens: Any) -> Any:
        return "local", outputs, sent, tokens


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    """torchtitan's dispatcher by all-to-alls."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass


class TorchAOTokenDispatcher(AllToAllTokenDispatcher):
    """The same with padded rows."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass


@contextmanager
def torchtitan() -> Iterator[Any]:
    """`commlayer.torchtitan`, imported beside the classes above."""

    def override(*, target: type, description: str) -> Callable[[Any], Any]:
        assert target is LocalTokenDispatcher.Config
        assert description
        return lambda factory: factory

    dispatchers: Any = ModuleType("token_dispatcher")
    dispatchers.LocalTokenDispatcher = LocalTokenDispatcher
    dispatchers.AllToAllTokenDispatcher = AllToAllTokenDispatcher
    parts: dict[str, Any] = {
        "torchtitan": ModuleType("torchtitan"),
        "torchtitan.config": SimpleNamespace(override=override),
        "torchtitan.models": ModuleType("models"),
        "torchtitan.models.common": ModuleType("common"),
        "torchtitan.models.common.token_dispatcher": dispatchers,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, part in parts.items():
            patch.setitem(sys.modules, name, part)
        patch.delitem(sys.modules, "commlayer.torchtitan", raising=False)
        import commlayer.torchtitan as found

        yield found
        del sys.modules["commlayer.torchtitan"]


class Job:
    """A layer's input of one rank, whole numbers: sums are exact in any order."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float64) -> None:
        drawn = torch.Generator().manual_seed(rank)
        count = (5, 0, 7, 3)[rank]

        def whole(*shape: int) -> Tensor:
            return torch.randint(-4, 5, shape, generator=drawn).to(dtype)

        self.tokens = whole(count, WIDTH).requires_grad_()
        self.scores = whole(count, TOP_K).requires_grad_()
        self.ids = torch.rand(count, EXPERTS, generator=drawn).argsort(1)[:, :TOP_K]
        self.counts = torch.bincount(self.ids.reshape(-1), minlength=EXPERTS)
        shared = torch.Generator().manual_seed(99)
        self.matrices = [torch.randint(-2, 3, (WIDTH, WIDTH), generator=shared).to(dtype) for _ in range(EXPERTS)]
        self.gradient = whole(count, WIDTH)

    def layer(self, dispatcher: Any) -> Tensor:
        """torchtitan's `RoutedExperts.forward`, with a product as expert."""
        rows, counts, sent = dispatcher.dispatch(self.tokens, self.scores, self.ids, self.counts)
        assert counts.dtype == torch.int64
        first = dist.get_rank() * EXPERTS // SIZE
        parts = rows.split(counts.tolist())
        outputs = torch.cat([part @ self.matrices[first + at] for at, part in enumerate(parts)])
        return dispatcher.combine(outputs, sent, self.tokens)  # type: ignore[no-any-return]

    def expected(self) -> Tensor:
        """The same of one process that has all experts."""
        every = torch.stack([self.tokens @ matrix for matrix in self.matrices], 1)
        chosen = every.gather(1, self.ids[:, :, None].expand(-1, -1, WIDTH))
        return (chosen * self.scores[:, :, None]).sum(1)

    def values(self, output: Tensor) -> list[Tensor]:
        """The output and the gradients of tokens and scores."""
        return [output.detach(), *torch.autograd.grad(output, [self.tokens, self.scores], self.gradient)]


def dispatcher_of(adapter: Any, **settings: str) -> Any:
    """A layer's dispatcher, as torchtitan's override and `RoutedExperts.parallelize` make it."""
    config = adapter.dispatch_by_host(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K), **settings)
    return adapter.Dispatcher(config)


@ranks.on(SIZE, environ=LOOPBACK)
def test_a_layer_computes_as_in_one_process(rank: int, size: int) -> None:
    with on_hosts(rank, size, HOSTS), torchtitan() as adapter:
        dispatcher, job = dispatcher_of(adapter), Job(rank)
        dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))
        for again in (False, True):  # activations that are computed again in the backward pass
            output = checkpoint(job.layer, dispatcher, use_reentrant=False) if again else job.layer(dispatcher)
            for mine, theirs in zip(job.values(output), job.values(job.expected()), strict=True):
                assert torch.equal(mine, theirs)
        with torch.no_grad():
            assert torch.equal(job.layer(dispatcher), job.expected())


@ranks.on(SIZE, environ=LOOPBACK)
def test_rows_between_hosts_may_have_a_codec(rank: int, size: int) -> None:
    with on_hosts(rank, size, HOSTS), torchtitan() as adapter:
        dispatcher, job = dispatcher_of(adapter, codec="int8"), Job(rank, torch.float32)
        dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))
        found, expected = job.layer(dispatcher), job.expected()
        torch.testing.assert_close(found, expected, rtol=0.05, atol=8.0)
        assert rank == 1 or not torch.equal(found, expected)


def test_a_layer_of_one_rank_stays_torchtitans() -> None:
    with torchtitan() as adapter:
        dispatcher = dispatcher_of(adapter)
        dispatcher.wire_meshes(ep_mesh=None)
        assert dispatcher.dispatch(1, 2, 3, 4)[0] == dispatcher.combine(1, 2, 3)[0] == "local"


@pytest.mark.parametrize("of", [LocalTokenDispatcher, TorchAOTokenDispatcher])
def test_another_dispatcher_is_refused(of: Any) -> None:
    told = rf"^torchtitan\.dispatch_by_host: the layers have {of.__name__}, .*: give the model comm_backend='standard'"
    with torchtitan() as adapter, pytest.raises(commlayer.ConfigError, match=told):
        adapter.dispatch_by_host(of.Config(num_experts=EXPERTS, top_k=TOP_K))


@pytest.mark.parametrize("codec", ["topk:0.01", "int7"])
def test_a_codec_that_rows_cannot_have_is_refused(codec: str) -> None:
    with torchtitan() as adapter, pytest.raises(commlayer.ConfigError, match=codec):
        dispatcher_of(adapter, codec=codec)
