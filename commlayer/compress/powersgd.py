"""`PowerSgd`: matrices of gradients travel as two thin factors.

PowerSGD (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019) is one step of subspace iteration. For each matrix M = gradient + error:

    left factor     P = M Q, averaged over the ranks; then P̂, orthonormal columns that span P
    right factor    Q = Mᵀ P̂, averaged; the next step starts from it
    result          P̂ Qᵀ, the same on all ranks
    error           M − P̂ Qᵀ, for the next step of this rank

The caller averages the factors. It may round them to 16 bits, or lose parts: result + mean error = mean M holds for any
P and Q that all ranks share. The result is bit-identical on ranks with the same type of CPU, build of torch and number
of threads.

The code differs from the paper in two ways that change the result by rounding only. Q is made orthonormal after each
step, so P is as large as the gradient and fits in 16 bits. Factors are stored transposed, one row per rank of the
approximation, because torch multiplies batches of such matrices several times faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from ..config import number, whole
from ..errors import ConfigError
from .values import is_finite, is_zero

MIN_COMPRESSION = 2.0
"""Matrices whose factors would save less are not compressed."""

_LARGEST = torch.finfo(torch.float32).max

_UNIT = 2.0**-24
"""Factors are averaged in this part of their size: then sums of finite values, over a matrix and ranks, are finite."""


@dataclasses.dataclass
class _Stack:
    """The matrices of one shape in a bucket."""

    numbers: list[int]
    gradients: list[Tensor]
    inputs: Tensor  # (matrices, rows, columns): gradient + error; at the end the new error
    waiting: dict[int, Tensor]  # errors by place in the stack that this step leaves out
    right: Tensor  # (matrices, rank, columns): Q, orthonormal; at the end that of the next step
    left: Tensor  # (matrices, rank, rows): P, later P̂


class PowerSgd:
    """Low-rank approximation of a model's gradients, with error feedback and warm start.

    `rank` is that of the approximation. A matrix is compressed if its factors have fewer elements than the matrix
    divided by `min_compression`. `seed` draws the first right factors; let all ranks use the same.

    Parameters are known by number, as `Feedback` numbers them: DDP may regroup its buckets at any time. Errors are kept
    in float32, for a loss scale of 1, before any clipping. Raises ConfigError for arguments out of range.
    """

    def __init__(self, rank: int, *, min_compression: float = MIN_COMPRESSION, seed: int = 0) -> None:
        self.rank = _at_least(1, rank, f"powersgd:{rank}", "a rank from 1, as powersgd:4")
        self.seed = _at_least(0, seed, f"PowerSgd(seed={seed!r})", "a number from 0")
        self.min_compression = number(min_compression)
        if not 1 <= self.min_compression < math.inf:
            raise ConfigError(f"PowerSgd(min_compression={min_compression!r}): use a finite number from 1, as 2.0")
        self._errors: dict[int, Tensor] = {}  # (rows, columns) by parameter
        self._right: dict[int, Tensor] = {}  # (rank, columns) by parameter
        self._restored: set[int] = set()  # parameters that have not been met since

    def compress(
        self,
        numbers: Sequence[int],
        gradients: Sequence[Tensor],
        *,
        excluded: Container[int] = (),
        loss_scale: float = 1.0,
    ) -> Compression:
        """Begins the reduction of a bucket: numbers[i] is the parameter of gradients[i], a view of a float32 buffer.

        `numbers`, the shapes and `excluded` are the same on all ranks. `excluded` holds the indices in
        `gradients` of matrices to keep exact, such as embeddings. A matrix that was compressed before, and is exact
        now, gets its error. `loss_scale` is the factor that the loss was multiplied with.

        The error of a parameter waits if its gradient is all zero: the parameter may be unused in this step, and then
        DDP drops its average. Raises ConfigError for gradients of another type, and if the state of a parameter has
        another shape.
        """
        matrices = [None if i in excluded else self._matrix_of(gradient.shape) for i, gradient in enumerate(gradients)]
        for parameter, gradient in zip(numbers, gradients, strict=True):
            self._check(parameter, gradient)
        self._restored.difference_update(numbers)
        places: dict[tuple[int, int], list[int]] = {}
        for place, shape in enumerate(matrices):
            if shape is not None:
                places.setdefault(shape, []).append(place)
        stacks = [
            self._stack([numbers[i] for i in group], [gradients[i] for i in group], shape, loss_scale)
            for shape, group in places.items()
        ]
        rest = [i for i, shape in enumerate(matrices) if shape is None]
        exact = [gradients[i] for i in rest]
        added = self.add_errors([numbers[i] for i in rest], exact, loss_scale)
        return Compression(self._errors, self._right, stacks, exact, added, loss_scale)

    def _matrix_of(self, shape: torch.Size) -> tuple[int, int] | None:
        return matrix_of(shape, self.rank, self.min_compression)

    def _stack(self, numbers: list[int], gradients: list[Tensor], shape: tuple[int, int], loss_scale: float) -> _Stack:
        inputs = torch.stack([gradient.reshape(shape) for gradient in gradients])
        waiting = {}
        for i, norm in enumerate(torch.linalg.vector_norm(inputs, dim=(1, 2)).tolist()):
            error = self._errors.get(numbers[i])
            if error is not None and norm == 0:
                waiting[i] = error
            elif error is not None:
                inputs[i].add_(error, alpha=loss_scale)
        for parameter in numbers:
            if parameter not in self._right:
                self._right[parameter] = self._first_right(parameter, shape[1])
        right = torch.stack([self._right[parameter] for parameter in numbers])
        return _Stack(numbers, gradients, inputs, waiting, right, torch.bmm(right * _UNIT, inputs.mT))

    def _first_right(self, parameter: int, columns: int) -> Tensor:
        drawn = numpy.random.default_rng((self.seed, parameter)).standard_normal((1, self.rank, columns))
        return _orthonormal(torch.from_numpy(drawn))[0]

    def add_errors(self, numbers: Sequence[int], gradients: Sequence[Tensor], loss_scale: float = 1.0) -> list[int]:
        """Adds the errors of these parameters to their gradients, which are not compressed in this step.

        Returns the parameters that had one, for `forget_errors`. The error of a parameter whose gradient is all zero
        waits. Raises ConfigError if an error has another size than the gradient.
        """
        self._restored.difference_update(numbers)
        added = []
        for parameter, gradient in zip(numbers, gradients, strict=True):
            error = self._errors.get(parameter)
            if error is not None and error.numel() != gradient.numel():
                raise _of_another_model(parameter, error, gradient)
            if error is not None and not is_zero(gradient):
                gradient.add_(error.view(gradient.shape), alpha=loss_scale)
                added.append(parameter)
        return added

    def forget_errors(self, numbers: Sequence[int]) -> None:
        """Forgets errors that `add_errors` has added, once the step is known to count."""
        for parameter in numbers:
            del self._errors[parameter]

    def state_dict(self) -> dict[str, Any]:
        """The errors and right factors by the parameters' numbers; to be called between steps.

        The right factors are the same on all ranks, the errors each rank's own.
        """
        return {
            "rank": self.rank,
            "min_compression": self.min_compression,
            "errors": dict(self._errors),
            "right": dict(self._right),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`, of this rank.

        For another number of ranks the caller makes the states. Their right factors are those of any rank. Their
        errors keep the mean over the ranks: from W to W' ranks, an error is the sum of some ranks' errors, times W'/W,
        each old rank's in one new state; a state may lack errors. Raises ConfigError if the state has another rank of
        the approximation or another `min_compression`; `compress` checks the sizes.
        """
        for name, own in (("rank", self.rank), ("min_compression", self.min_compression)):
            if state.get(name) != own:
                raise ConfigError(
                    f"the restored PowerSGD state has {name}={state.get(name)}, but this one has {own}: use the same, "
                    f"or begin with a new state"
                )
        self._errors, self._right = dict(state.get("errors", {})), dict(state.get("right", {}))
        self._restored = {*self._errors, *self._right}

    def _check(self, parameter: int, gradient: Tensor) -> None:
        """Raises ConfigError unless the gradient is float32, and the parameter's state, if any, fits it as a matrix."""
        if gradient.dtype != torch.float32:
            raise ConfigError(
                f"PowerSGD compresses float32 gradients, but parameter {parameter} from the end has {gradient.dtype}: "
                f"copy the bucket to float32 first, or use another codec"
            )
        rows, columns = math.prod(gradient.shape[:1]), math.prod(gradient.shape[1:])
        for kept, expected in ((self._errors, (rows, columns)), (self._right, (self.rank, columns))):
            if parameter in kept and kept[parameter].shape != expected:
                raise _of_another_model(parameter, kept[parameter], gradient)

    def check_met(self) -> None:
        """Raises ConfigError at the end of a step if a restored state has a parameter that the model lacks."""
        if self._restored:
            raise ConfigError(
                f"the restored PowerSGD state has values for parameter {max(self._restored)} from the end, which this "
                f"model lacks: the state is another model's; restore the state of this model, or begin with a new one"
            )


class Compression:
    """One bucket's reduction. The caller averages `exact` and `left`, then `project(left)`, then calls `finish`, and
    `keep` if the step counts.

    These calls, and `compress` for other buckets, may come from different threads. Without `keep`, errors and right
    factors stay as they were.
    """

    def __init__(
        self,
        errors: dict[int, Tensor],
        right: dict[int, Tensor],
        stacks: list[_Stack],
        exact: list[Tensor],
        added: list[int],
        loss_scale: float,
    ) -> None:
        self._errors = errors
        self._right = right
        self._stacks = stacks
        self._exact = exact
        self._added = added  # parameters whose errors are in `exact`
        self._loss_scale = loss_scale
        self._is_finished = False
        self.exact = _flat(exact)
        """Gradients that are not compressed, one after the other, to be averaged in 16 bits. May be empty."""
        self.left = _flat(stack.left for stack in stacks)
        """Left factors of all matrices, to be averaged. May be empty: then `project` returns nothing to average."""

    def project(self, left: Tensor) -> Tensor:
        """Takes the averaged left factors, and returns the right factors, to be averaged.

        All are NaN if a value of `left` is not finite: so is their average, on every rank.
        """
        if not is_finite(left):
            return torch.full(
                (sum(stack.right.numel() for stack in self._stacks),), math.nan, dtype=torch.float32, device="cpu"
            )
        averaged = left.split([stack.left.numel() for stack in self._stacks])
        for stack, factor in zip(self._stacks, averaged, strict=True):
            stack.left = _orthonormal(factor.view(stack.left.shape))
        return _flat(torch.bmm(stack.left * _UNIT, stack.inputs) for stack in self._stacks)

    def finish(self, exact: Tensor, right: Tensor) -> None:
        """Takes the averaged exact part and right factors, and writes the averages into the gradients.

        If a value is not finite, all gradients of the bucket become NaN, on all ranks alike: GradScaler skips the step.
        """
        if not (is_finite(right) and is_finite(exact)):
            for gradient in (*self._exact, *(gradient for stack in self._stacks for gradient in stack.gradients)):
                gradient.fill_(math.nan)
            return
        averages = exact.split([gradient.numel() for gradient in self._exact])
        for gradient, average in zip(self._exact, averages, strict=True):
            gradient.copy_(average.view(gradient.shape))
        factors = right.split([stack.right.numel() for stack in self._stacks])
        for stack, factor in zip(self._stacks, factors, strict=True):
            self._finish_stack(stack, factor.view(stack.right.shape).to(torch.float32, copy=True))
        self._is_finished = True

    def keep(self) -> None:
        """Keeps the errors and right factors for the next step; not those of a bucket that is not finite."""
        if self._is_finished:
            for parameter in self._added:
                del self._errors[parameter]
            for stack in self._stacks:
                for i, parameter in enumerate(stack.numbers):
                    self._errors[parameter] = stack.inputs[i]
                    self._right[parameter] = stack.right[i]

    def _finish_stack(self, stack: _Stack, right: Tensor) -> None:
        # Both factors are in memory of their own: the products' last bits may depend on the alignment of the operands.
        # The sum bounds the result, as the elements of the left factors are 1 at most.
        fits = float(right.abs().sum(dtype=torch.float64)) <= _LARGEST * _UNIT
        if fits:
            result = torch.bmm(stack.left.mT, right / _UNIT)
        else:
            result = torch.bmm(stack.left.mT, right).clamp_(-_LARGEST * _UNIT, _LARGEST * _UNIT).div_(_UNIT)
        errors = stack.inputs.sub_(result)
        if not fits:
            errors.clamp_(-_LARGEST, _LARGEST)
        if self._loss_scale != 1:
            errors.div_(self._loss_scale)
        for i, error in stack.waiting.items():
            errors[i].add_(error)
        # A row of zeros finds nothing in the next step: there the last one stays.
        is_zero = (right == 0).all(2, keepdim=True)
        stack.right = _orthonormal(torch.where(is_zero, stack.right, right))
        for i, gradient in enumerate(stack.gradients):
            gradient.copy_(result[i].view(gradient.shape))


def matrix_of(shape: Sequence[int], rank: int, min_compression: float = MIN_COMPRESSION) -> tuple[int, int] | None:
    """Rows and columns of a gradient, as (first dimension, the rest); None if it is not worth compressing."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    is_worth = (rows + columns) * rank * min_compression < rows * columns
    return (rows, columns) if is_worth else None


def _of_another_model(parameter: int, kept: Tensor, gradient: Tensor) -> ConfigError:
    return ConfigError(
        f"the PowerSGD state has a matrix of the shape {tuple(kept.shape)} for parameter {parameter} from the end, "
        f"whose gradient has the shape {tuple(gradient.shape)}: the state is another model's; restore the state of "
        f"this model, or begin with a new one"
    )


def _at_least(least: int, value: object, what: str, use: str) -> int:
    """A whole number. Raises ConfigError, which begins with `what`, for anything else."""
    found = whole(value, least - 1)
    if found < least:
        raise ConfigError(f"{what}: use {use}, a whole number")
    return found


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements, one tensor after the other, in new memory."""
    return torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *(tensor.reshape(-1) for tensor in tensors)])


def _orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows, for each matrix of a batch, that span its rows; in new memory, float32.

    Rows that are zero, or depend on others, become some other rows: the factorisation by Householder reflections is
    orthonormal whatever its input.
    """
    columns: Tensor = torch.linalg.qr(rows.mT.double()).Q
    return columns.mT.to(torch.float32, memory_format=torch.contiguous_format)
