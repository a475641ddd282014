"""Tensor parallelism in one, two, two and a half and three dimensions: its shards and its exchanges.

For one linear layer Y = X A, of M rows (tokens), inner width K and outer width N (docs/parallelism.md derives all):

- 1-D (Megatron-LM, arXiv 1909.08053): A by columns, in the next layer by rows; X and Y are whole on each rank.
- 2-D (SUMMA; Xu et al., arXiv 2104.05343), q x q ranks: X, A and Y in q x q blocks. A rank gathers the panel of X of
  its row and the panel of A of its column.
- 2.5-D (Tesseract, arXiv 2105.14500), q x q x d ranks: d such squares, each with 1/d of the rows; A exists d times.
- 3-D (Bian et al., arXiv 2105.14450), q x q x q ranks: each gathers a block of X along one axis and one of A along the
  second, and Y is added up along the third.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..config import whole
from ..errors import ConfigError
from .exchange import Axis, Exchange, When
from .transformer import Transformer

Form = Literal["none", "1-D", "2-D", "2.5-D", "3-D"]


@dataclass(frozen=True)
class Mesh:
    """The ranks among which each matrix is split."""

    form: Form = "none"
    side: int = 1
    """q; all ranks in 1-D."""
    depth: int = 1
    """d of 2.5-D."""

    @classmethod
    def of(cls, form: Form, ranks: int, depth: int = 1) -> Mesh:
        """The mesh of `ranks` ranks.

        Raises:
            ConfigError: an unknown form, ranks that are no whole number of at least 2 (1 for `none`), no square for
                2-D, no square times `depth` for 2.5-D, or no cube for 3-D.
        """
        if form not in get_args(Form):
            raise ConfigError(f"form={form!r} is unknown; use one of {', '.join(get_args(Form))}")
        if whole(ranks, 0) < 1 or whole(depth, 0) < 1 or (form == "none") != (ranks == 1):
            raise ConfigError(
                f"ranks={ranks}, depth={depth} do not make a {form} mesh; give whole numbers, and 2 ranks or more"
            )
        if form in ("none", "1-D"):
            return cls(form, ranks)
        if form == "3-D":
            side = round(ranks ** (1 / 3))
            if side**3 != ranks:
                raise ConfigError(f"ranks={ranks} is no cube, which 3-D needs; give {_near(side, 3)}")
            return cls(form, side)
        if form == "2-D" and depth != 1:
            raise ConfigError(f"depth={depth} does not fit 2-D, which has one layer of ranks; use 2.5-D")
        if form == "2.5-D" and depth < 2:
            raise ConfigError(f"depth={depth} does not fit 2.5-D; give 2 or more layers of ranks, or use 2-D")
        side = math.isqrt(ranks // depth)
        if side < 2 or side**2 * depth != ranks:
            times = f" times {depth}" if depth > 1 else ""
            raise ConfigError(f"ranks={ranks} is no square{times}, which {form} needs; give {_near(side, 2, depth)}")
        return cls(form, side, depth)

    @property
    def ranks(self) -> int:
        """P, the ranks of the mesh."""
        return int(self.side**self.dimensions) * self.depth

    @property
    def dimensions(self) -> int:
        """Axes of `side` ranks."""
        return {"none": 1, "1-D": 1, "2-D": 2, "2.5-D": 2, "3-D": 3}[self.form]

    @property
    def parts(self) -> int:
        """Parts of each matrix of parameters; each rank has one. 2.5-D has it `depth` times."""
        return self.ranks // self.depth

    @property
    def rows(self) -> int:
        """Parts of the batch. A sequence stays in one, for its attention."""
        return {"none": 1, "1-D": 1, "2-D": self.side, "2.5-D": self.side * self.depth, "3-D": self.side**2}[self.form]

    @property
    def is_grid(self) -> bool:
        """Whether activations are split among all ranks: not in 1-D."""
        return self.form in ("2-D", "2.5-D", "3-D")

    def refusal(self, model: Transformer, batch: int) -> str:
        """The reason why the mesh cannot split the model and micro-batches of `batch` sequences; empty: it can."""
        if self.form == "none":
            return ""
        if batch % self.rows:
            return f"{batch} sequences of a micro-batch are no multiple of {self.rows}"
        widths = self.side**2 if self.form == "3-D" else self.side
        for name, value, parts in (
            ("heads", model.heads, self.side),
            ("width", model.width, widths),
            ("inner", model.hidden, widths),
        ):
            if value % parts:
                return f"{name}={value} is no multiple of {parts}"
        return ""

    def exchanges(self, model: Transformer, tokens: int, *, kept: bool) -> Iterator[Exchange]:
        """The exchanges of a layer with `tokens` tokens of a micro-batch, split or not.

        `kept`: the gathered panels stay until the backward pass; else they are gathered again (1-D gathers none).
        """
        if self.form == "1-D":
            whole_bytes = tokens * model.width * model.value_bytes
            passes: tuple[When, ...] = ("forward", "forward", "backward", "backward")
            for when in passes:
                yield Exchange("all_reduce", Axis(self.side), whole_bytes, when)
        for place, (inputs, outputs) in enumerate(model.linears if self.is_grid else ()):
            x, a, y = (model.value_bytes * values for values in (tokens * inputs, inputs * outputs, tokens * outputs))
            if self.form == "3-D":
                yield from self._cube(x, a, y, is_even=place % 2 == 0, kept=kept)
            else:
                yield from self._square(x, a, kept=kept)

    def _square(self, x: int, a: int, *, kept: bool) -> Iterator[Exchange]:
        row, column = Axis(self.side), Axis(self.side, self.side)
        x_panel, a_panel = x // (self.side * self.depth), a // self.side
        passes: tuple[When, ...] = ("forward",) if kept else ("forward", "backward")
        for when in passes:
            yield Exchange("all_gather", row, x_panel, when)
            yield Exchange("all_gather", column, a_panel, when, is_parameters=True)
        yield Exchange("reduce_scatter", row, x_panel, "backward")
        yield Exchange("reduce_scatter", column, a_panel, "backward", is_parameters=True)
        if self.depth > 1:
            depth = Axis(self.depth, self.side**2)
            yield Exchange("all_reduce", depth, a // self.side**2, "step", is_parameters=True)

    def _cube(self, x: int, a: int, y: int, *, is_even: bool, kept: bool) -> Iterator[Exchange]:
        """The output is split along the axis of the input's columns: so the next layer swaps the two."""
        q = self.side
        of_x, of_y = (Axis(q), Axis(q, q)) if is_even else (Axis(q, q), Axis(q))
        of_a = Axis(q, q * q)
        x, a, y = x // q**2, a // q**2, y // q**2
        passes: tuple[When, ...] = ("forward",) if kept else ("forward", "backward")
        for when in passes:
            yield Exchange("all_gather", of_x, x, when)
            yield Exchange("all_gather", of_a, a, when, is_parameters=True)
        yield Exchange("reduce_scatter", of_y, y, "forward")
        yield Exchange("all_gather", of_y, y, "backward")
        yield Exchange("reduce_scatter", of_x, x, "backward")
        yield Exchange("reduce_scatter", of_a, a, "backward", is_parameters=True)

    def panel_values(self, model: Transformer, tokens: int) -> list[int]:
        """Gathered values of each linear layer on a rank, beyond its own shards."""
        if not self.is_grid:
            return []
        found = []
        for inputs, outputs in model.linears:
            x, a = tokens * inputs // self.ranks, inputs * outputs // self.parts
            found.append((self.side - 1) * (x + a))
        return found


def _near(side: int, power: int, factor: int = 1) -> str:
    return f"{max(side, 2) ** power * factor} or {(max(side, 2) + 1) ** power * factor}"
