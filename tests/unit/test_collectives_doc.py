"""docs/collectives.md names the backend of every operation and reduction: here it is compared with the code."""

import torch
import torch.distributed as dist

from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.frontend.group.tensors import MOVES, REDUCTIONS
from tests import conformance
from tests.documents import table


def operations() -> set[str]:
    """The methods of torch's process groups that return a work, and the one barrier that waits by itself."""
    documented = {name: getattr(dist.ProcessGroup, name).__doc__ or "" for name in dir(dist.ProcessGroup)}
    return {name for name, text in documented.items() if "-> c10d::Work" in text} | {"monitored_barrier"}


def test_every_operation_has_a_row() -> None:
    rows = {row[0]: row[2] for row in table("collectives.md", "Operations")[1:]}
    assert operations() <= set(rows)
    assert "allreduce" in operations()
    ours = {name for name in rows if name in vars(CommProcessGroup)}
    assert ours - {"monitored_barrier"} == {name for name, runs_on in rows.items() if runs_on == "engine"}
    assert {name for name, runs_on in rows.items() if runs_on == "gloo"} == set(rows) - ours
    assert rows["monitored_barrier"] == "Store"


def test_every_reduction_is_as_the_table_says() -> None:
    head, *rows = table("collectives.md", "Reductions")
    assert [row[0] for row in rows] == [str(dtype).removeprefix("torch.") for dtype in conformance.DTYPES]
    for name, *cells in rows:
        dtype = getattr(torch, name)
        for column, cell in zip(head[1:], cells, strict=True):
            for op in column.split(", "):
                ours = (dtype, getattr(dist.ReduceOp, op).value) in REDUCTIONS
                assert ours == (op in conformance.operators(dtype)), (name, op)
                shared = conformance.gloo_has(conformance.Case("all_reduce", dtype, 1, op))
                assert cell == ("-" if not ours else "both" if shared else "ours"), (name, op)


def test_every_type_can_be_moved() -> None:
    for dtype in (*conformance.DTYPES, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e8m0fnu):
        assert dtype.itemsize in MOVES
