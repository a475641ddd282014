"""`MeshLinear`: a linear layer Y = X A, split among the ranks of a 2-D, 2.5-D or 3-D mesh (planner/mesh.py).

The rows of a rank travel in panels: while one is multiplied, the next one is on its way. Weights are those of
nn.Linear, N x K, so that A is their transpose; docs/parallelism.md derives what is gathered and what is added up.

- 2-D and 2.5-D (SUMMA, arXiv 2104.05343; Tesseract, arXiv 2105.14500): rank (k, i, j) of d x q x q has rows (k, i) and
  columns j of X and of Y, and block (i, j) of A. It gathers X along its row of ranks, and A along its column.
- 3-D (arXiv 2105.14450): rank (i, j, l) of q x q x q has rows (i, l) and columns j of X, rows (i, j) and columns l of
  Y, and part i of block (j, l) of A. It gathers X along l and A along i, and Y is added up along j. The next layer,
  which is `swapped`, exchanges j and l.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.autograd.function import once_differentiable

from ...errors import ConfigError, MismatchError
from ...planner.exchange import Axis
from ...planner.mesh import Form, Mesh
from ..group.backend import CommProcessGroup

WHO = "tp.mesh"
FORMS: dict[str, Form] = {"2d": "2-D", "2.5d": "2.5-D", "3d": "3-D"}

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Axis, Any]] = weakref.WeakKeyDictionary()
"""This rank's groups along the axes of a mesh: layers of one mesh share them."""


class Axes(NamedTuple):
    """The groups of a rank."""

    x: Any
    """Along which X is gathered."""
    a: Any
    """Along which A is gathered."""
    y: Any
    """Along which parts of Y are added up; None: they are whole."""
    copies: Any
    """The ranks with the same block of A; None: there is one."""


class MeshLinear(nn.Module):
    """What `commlayer.tp.mesh` returns. `weight` and `bias` are this rank's blocks."""

    def __init__(
        self, linear: nn.Linear, form: str, group: Any, depth: int, *, swapped: bool, kept: bool, panels: int
    ) -> None:
        super().__init__()
        _check_options(form, swapped, panels)
        _check_linear(linear)
        whole = dist.distributed_c10d._get_default_group() if group is None else group
        if not isinstance(whole, CommProcessGroup):
            raise ConfigError(
                f"rank {dist.get_rank()}: {WHO}: the group {getattr(whole, 'group_name', whole)!r} is not commlayer's; "
                f"call init_process_group('commlayer')"
            )
        self.mesh = Mesh.of(FORMS[form], whole.size(), depth)
        self.swapped, self.kept, self.panels = swapped, kept, panels
        self.group = whole
        _check_widths(linear, self.mesh)
        _check_alike(linear, whole, (form, depth, swapped, kept, panels))
        self._place_of(whole.rank())
        self.axes = self._axes()
        block = linear.weight.detach().chunk(self.mesh.side, 0)[self.n].chunk(self.mesh.side, 1)[self.k]
        if self.mesh.form == "3-D":
            block = block.chunk(self.mesh.side, 0)[self.part]
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(block.clone(memory_format=torch.contiguous_format), linear.weight.requires_grad)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(
                linear.bias.detach().chunk(self.mesh.side)[self.n].clone(), linear.bias.requires_grad
            )

    def _place_of(self, rank: int) -> None:
        """Sets the places of the blocks: columns of A (`n`) and its rows (`k`), rows of X and of Y."""
        q = self.mesh.side
        upper, i, j = rank // q**2, rank // q % q, rank % q
        if self.mesh.form == "3-D":
            i, (j, l) = upper, (j, i) if self.swapped else (i, j)  # noqa: E741  # the letters of the paper
            self.k, self.n, self.part = j, l, i
            self.rows_of_x, self.rows_of_y = i * q + l, i * q + j
        else:
            self.k, self.n, self.part = i, j, 0
            self.rows_of_x = self.rows_of_y = upper * q + i
        self.columns_of_x = self.k if self.mesh.form == "3-D" else j

    def _axes(self) -> Axes:
        q, depth = self.mesh.side, self.mesh.depth
        if self.mesh.form == "3-D":
            of_x, of_y = (Axis(q, q), Axis(q)) if self.swapped else (Axis(q), Axis(q, q))
            return Axes(self._along(of_x), self._along(Axis(q, q * q)), self._along(of_y), None)
        copies = self._along(Axis(depth, q * q)) if depth > 1 else None
        return Axes(self._along(Axis(q)), self._along(Axis(q, q)), None, copies)

    def _along(self, axis: Axis) -> Any:
        """The group of this rank along an axis. All ranks of the mesh make theirs at the same time."""
        found = _groups.setdefault(self.group, {})
        if axis not in found:
            lines = sorted({axis.group(rank) for rank in range(self.group.size())})
            found[axis] = dist.split_group(self.group, [list(line) for line in lines])
        return found[axis]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """This rank's block of Y, from its block of X: any shape whose last dimension has its columns."""
        columns = self.in_features // self.mesh.side
        if x.dim() < 2 or x.shape[-1] != columns or x.dtype != self.weight.dtype:
            raise ConfigError(
                f"{self.group.who}: {WHO}: a block of shape {tuple(x.shape)} and {x.dtype}; give this rank's rows of "
                f"{columns} columns in {self.weight.dtype}, as split(x) returns them"
            )
        rows = x.reshape(-1, columns)
        found: Tensor = Product.apply(rows, self.weight, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            found = found + Shared.apply(self.bias, self.groups_of_bias())  # type: ignore[no-untyped-call]
        return found.view(*x.shape[:-1], self.out_features // self.mesh.side)

    def groups_of_bias(self) -> list[Any]:
        """The groups along which the same columns of Y lie."""
        return [group for group in (self.axes.a, self.axes.y, self.axes.copies) if group is not None]

    def split(self, x: Tensor) -> Tensor:
        """This rank's block of X, of which all ranks have the whole: rows (of dimension 0) and columns (of the last
        one). Raises ConfigError if they do not divide."""
        self._check_rows(x, self.in_features)
        return x.chunk(self.mesh.rows, 0)[self.rows_of_x].chunk(self.mesh.side, -1)[self.columns_of_x]

    def split_output(self, y: Tensor) -> Tensor:
        """This rank's block of Y, as `split` of X: for targets, or to compare."""
        self._check_rows(y, self.out_features)
        return y.chunk(self.mesh.rows, 0)[self.rows_of_y].chunk(self.mesh.side, -1)[self.n]

    def _check_rows(self, values: Tensor, width: int) -> None:
        rows = self.mesh.rows
        if values.dim() < 2 or values.shape[0] % rows or values.shape[-1] != width:
            raise ConfigError(
                f"{self.group.who}: {WHO}: shape {tuple(values.shape)} does not divide among {rows} parts of rows; "
                f"give a multiple of {rows} in dimension 0, and {width} columns"
            )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.mesh.form}, {self.mesh.ranks} ranks"


# ---- products -------------------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Y = X A of a mesh, from this rank's blocks of X and of the weights; the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: MeshLinear) -> Tensor:
        axes, is_cube = layer.axes, layer.mesh.form == "3-D"
        gathered, w = _gather(x, weight, layer)
        sums: list[Any] = []
        panels = []
        for panel in gathered:
            values = panel.wait()  # the later panels are on their way
            panels.append(values)
            if is_cube:
                sums.append(Scattered(torch.matmul(values, w.flatten(0, 1).T), axes.y))
            else:
                sums.append(Ready(sum_of_products(values, w)))
        ctx.layer = layer
        ctx.panels, ctx.w = (panels, w) if layer.kept else ([], None)
        ctx.save_for_backward(x, weight)
        return torch.cat([total.wait() for total in sums])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer, axes = ctx.layer, ctx.layer.axes
        x, weight = ctx.saved_tensors
        is_cube = layer.mesh.form == "3-D"
        needs_x, needs_w, _ = ctx.needs_input_grad
        rows = gradient.contiguous().tensor_split(layer.panels)
        of_y: list[Any] = [Gathered(row, axes.y) if is_cube else Ready(row) for row in rows]
        panels: list[Any]
        if layer.kept:
            panels, w = [Ready(panel) for panel in ctx.panels], ctx.w
        else:
            panels, w = _gather(x, weight, layer)
        sums, of_weight = [], torch.zeros_like(w)
        for values, arriving in zip(panels, of_y, strict=True):
            dy, panel = arriving.wait(), values.wait()
            if needs_x:
                sums.append(Scattered(torch.matmul(dy, w.flatten(0, 1) if is_cube else w), axes.x))
            if needs_w and is_cube:
                of_weight += (dy.flatten(0, 1).T @ panel.flatten(0, 1)).view_as(of_weight)
            elif needs_w:
                of_weight += torch.matmul(dy.T, panel)
        own = None
        if needs_w:
            own = Scattered(of_weight, axes.a).wait()
            if axes.copies is not None:
                axes.copies.allreduce([own], AllreduceOptions()).wait()
        return (torch.cat([total.wait() for total in sums]) if needs_x else None), own, None


def _gather(x: Tensor, weight: Tensor, layer: MeshLinear) -> tuple[list[Any], Tensor]:
    """Panels of X, each q blocks, on their way; and A, of q blocks."""
    of_weight = Gathered(weight, layer.axes.a)
    panels: list[Any] = [Gathered(rows, layer.axes.x) for rows in x.tensor_split(layer.panels)]
    return panels, of_weight.wait()


def sum_of_products(x: Tensor, w: Tensor) -> Tensor:
    """The sum over the blocks of X, q x m x k, and of the weights, q x n x k: m x n."""
    found = x[0] @ w[0].T
    for one, other in zip(x[1:], w[1:], strict=True):
        found.addmm_(one, other.T)
    return found


class Ready:
    """Values that need not travel."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def wait(self) -> Tensor:
        return self._values


class Gathered:
    """The blocks of all ranks of a group, on their way; one after the other in a new dimension 0."""

    def __init__(self, block: Tensor, group: Any) -> None:
        self._values = block.new_empty((group.size(), *block.shape))
        source = block.detach().contiguous()
        self._work = group.all_gather_single(self._values, source, AllgatherOptions()) if source.numel() else None

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._values


class Scattered:
    """The sum of all ranks' tensors, on its way: each rank gets the part of dimension 0 with its number."""

    def __init__(self, values: Tensor, group: Any) -> None:
        self._values = values.new_empty(values.shape[1:])
        source = values.contiguous()
        options = ReduceScatterOptions()
        self._work = group.reduce_scatter_single(self._values, source, options) if source.numel() else None

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._values


class Shared(torch.autograd.Function):
    """The same values on several ranks; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, groups: Sequence[Any]) -> Tensor:
        ctx.groups = groups
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            group.allreduce([total], AllreduceOptions()).wait()
        return total, None


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_options(form: str, swapped: bool, panels: int) -> None:
    if form not in FORMS:
        raise ConfigError(f"{WHO}(form={form!r}): use one of {', '.join(FORMS)}; for 1-D use parallelize_module")
    if swapped and form != "3d":
        raise ConfigError(f"{WHO}(swapped=True): only 3d swaps the axes of its input and output; leave it out")
    if type(panels) is not int or panels < 1:
        raise ConfigError(f"{WHO}(panels={panels!r}): use a whole number from 1, as 2")


def _check_linear(linear: nn.Module) -> None:
    """Raises ConfigError for modules other than one plain linear layer."""
    who = f"{WHO}({type(linear).__name__})"
    if any("Dropout" in type(module).__name__ for module in linear.modules()):
        raise ConfigError(
            f"{who}: it has dropout, whose masks would be equal on ranks with equal seeds; give the linear layer "
            f"alone, and draw masks of the whole batch"
        )
    if type(linear) is not nn.Linear:
        raise ConfigError(f"{who}: give an nn.Linear, layer by layer")
    if not linear.weight.dtype.is_floating_point or type(linear.weight) is not nn.Parameter:
        raise ConfigError(
            f"{who}: its weight is a {type(linear.weight).__name__} of {linear.weight.dtype}; give plain "
            f"floating-point weights, before parallelize_module or fully_shard"
        )
    if len(list(_tables_with(linear.weight))) > 1:
        raise ConfigError(
            f"{who}: its weight belongs to another module, too, as that of a tied head; the two would no longer be "
            f"one. Untie them first"
        )


def _tables_with(parameter: Tensor) -> Iterator[dict[str, Any]]:
    """The tables of parameters, of any modules, that have this one."""
    for table in gc.get_referrers(parameter):
        if isinstance(table, dict) and any(value is parameter for value in table.values()):
            owners = (owner for owner in gc.get_referrers(table) if isinstance(owner, (dict, nn.Module)))
            if any((owner if isinstance(owner, dict) else vars(owner)).get("_parameters") is table for owner in owners):
                yield table


def _check_widths(linear: nn.Linear, mesh: Mesh) -> None:
    """Raises ConfigError for widths that the mesh cannot split."""
    q = mesh.side
    for name, parts in (("in_features", q), ("out_features", q * q if mesh.form == "3-D" else q)):
        value = getattr(linear, name)
        if value % parts:
            raise ConfigError(
                f"{WHO}: {name}={value} is no multiple of {parts}, as {mesh.form} with {mesh.ranks} ranks needs; pad "
                f"the layer to {-(-value // parts) * parts}, or use another mesh"
            )


def _check_alike(linear: nn.Linear, group: CommProcessGroup, options: tuple[object, ...]) -> None:
    """Raises MismatchError unless all ranks give the same layer and options."""
    digest = zlib.crc32(repr((options, linear.weight.shape, linear.weight.dtype, linear.bias is None)).encode())
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            digest = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().data, digest)
    found = Gathered(torch.tensor([digest], dtype=torch.int64, device="cpu"), group).wait().flatten().tolist()
    usual = max(found, key=found.count)
    for rank, crc in enumerate(found):
        if crc != usual:
            error = MismatchError(
                f"{group.who}: {WHO}: the layer or the options of rank {rank} of the group differ from those of rank "
                f"{found.index(usual)}; make weights equal on all ranks, as with torch.manual_seed, and all arguments"
            )
            error.rank, error.culprit = dist.get_rank(), dist.get_global_rank(group, rank)
            error.operation = "tp.mesh"
            raise error
