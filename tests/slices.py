"""A small causal model in float64, cut into stages that take past keys and values, and its training on one process."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 11
PLACES = 64

Loss = Callable[[Tensor, Tensor], Tensor]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the tokens but those of number 0, which are not counted: parts of a sequence count unequally."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    """The sum of all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def pair_of(keys: Tensor, values: Tensor, places: Tensor) -> Any:
    return keys, values, places


def nested_of(keys: Tensor, values: Tensor, places: Tensor) -> Any:
    return {"layers": [(keys, values)], "places": places}


def leaves_of(state: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and places of any form."""
    found: tuple[Tensor, Tensor, Tensor] = state if isinstance(state, tuple) else (*state["layers"][0], state["places"])
    return found


class Stage(nn.Module):
    """One attention layer; the first stage embeds tokens and places, the last has a head."""

    def __init__(self, number: int, total: int, width: int, form: Callable[..., Any] = pair_of) -> None:
        super().__init__()
        torch.manual_seed(7 * number + total)
        self.form = form
        self.places = nn.Embedding(PLACES, width)
        self.embedding = nn.Embedding(VOCABULARY, width) if number == 0 else None
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY) if number == total - 1 else None
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.rand(width), requires_grad=False)
        self.double()

    def forward(self, inputs: Tensor, past: tuple[Any, ...] | None = None) -> Any:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        before = [leaves_of(kept) for kept in past or ()]
        places = torch.arange(hidden.size(1)) + sum(kept[2].numel() for kept in before)
        normed = self.norm(hidden) + self.places(places)
        own = self.key(normed), self.value(normed), places
        keys, values = (torch.cat([*(kept[i] for kept in before), own[i]], 1) for i in range(2))
        known = torch.cat([*(kept[2] for kept in before), places])
        scores = self.query(normed) @ keys.transpose(1, 2)
        weights = scores.masked_fill(known > places[:, None], -torch.inf).softmax(-1)
        output = hidden + self.out(torch.tanh(weights @ values)) * self.frozen
        output = output if self.head is None else self.head(output)
        return output if past is None else (output, self.form(*own))


@dataclasses.dataclass
class Job:
    """One step: the whole model, and the data of all micro-batches."""

    stages: int
    width: int
    lengths: Sequence[int]
    microbatches: int
    sequences: int
    """Of one micro-batch."""
    loss: Loss = mean_loss
    form: Callable[..., Any] = pair_of
    scale: bool = True
    """Whether gradients are divided by the number of micro-batches."""

    def stage(self, number: int) -> Stage:
        """A stage with its initial parameters, equal on all ranks."""
        return Stage(number, self.stages, self.width, self.form)

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.microbatches * self.sequences, sum(self.lengths)
        tokens, targets = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
        targets[:, -1] = 3  # each mean has a token
        return tokens, targets

    def expected(self, seed: int) -> tuple[list[Tensor], list[dict[str, Tensor | None]], Tensor]:
        """Losses by micro-batch, gradients by stage, and outputs, of whole sequences on one process."""
        stages = [self.stage(number) for number in range(self.stages)]
        losses, outputs = [], []
        for tokens, targets in zip(*(data.chunk(self.microbatches) for data in self.data(seed)), strict=True):
            hidden = tokens
            for stage in stages:
                hidden = stage(hidden)
            losses.append(self.loss(hidden, targets))
            outputs.append(hidden.detach())
        torch.autograd.backward(losses)
        divisor = self.microbatches if self.scale else 1
        return (
            [loss.detach() for loss in losses],
            [
                {
                    name: None if parameter.grad is None else parameter.grad / divisor
                    for name, parameter in stage.named_parameters()
                }
                for stage in stages
            ],
            torch.cat(outputs),
        )
