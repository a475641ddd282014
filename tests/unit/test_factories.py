"""Tensors of commlayer's own are on the CPU and of one type, whatever `torch.set_default_device` and
`torch.set_default_dtype` say: the engine and the kernels get their addresses and counts."""

import ast
from collections.abc import Iterator

from tests import ROOT

OF_VALUES = {"arange", "randint", "randperm"}
"""Their type follows from their arguments, which are whole numbers."""
FACTORIES = {"as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"} | OF_VALUES


def lacking(source: str) -> Iterator[tuple[int, str]]:
    """The line of each call of torch that makes a tensor, and what the call leaves to the defaults."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        wanted = {"device"} if node.func.attr in OF_VALUES else {"device", "dtype"}
        yield from ((node.lineno, name) for name in sorted(wanted - {keyword.arg for keyword in node.keywords}))


def test_a_call_that_follows_the_defaults_is_found() -> None:
    source = "torch.zeros(3)\ntorch.arange(4)\ntorch.tensor([1], dtype=torch.int64, device='cpu')\nother.zeros(1)"
    assert list(lacking(source)) == [(1, "device"), (1, "dtype"), (2, "device")]


def test_each_tensor_has_a_device_and_a_type_of_its_own() -> None:
    package = ROOT / "commlayer"  # the tools are processes of their own
    files = [file for file in package.rglob("*.py") if "tools" not in file.relative_to(package).parts]
    assert len(files) > 100
    found = [f"{file.relative_to(ROOT)}:{line}: {name}" for file in files for line, name in lacking(file.read_text())]
    assert not found, "name it: " + ", ".join(found)
