"""The direction of imports is part of the architecture (docs/architecture.md); this is where it is enforced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lower floors never import higher ones. A module's layer is the first part of its name below `commlayer`.
FLOORS = (
    {"errors", "config"},
    {"scheduler", "compress", "plans", "transport", "telemetry"},
    {
        "backend",
        "collectives",
        "counters",
        "bound",
        "launcher",
        "devices",
        "staging",
        "work",
        "tensors",
        "protect",
        "replicas",
        "residual",
        "tolerance",
        "dynamo",
        "profile",
        "ddp",
        "fsdp",
        "pipeline",
        "tp",
    },
    {"", "__main__", "cli", "bench", "emulate"},  # "" is commlayer/__init__.py
)
FRONTENDS = FLOORS[2]
PACKAGES = FLOORS[1]
SHARED_TYPES = "transport.base"  # the one thing compress and plans may know of another package
MAY_USE_TORCH_DISTRIBUTED = FRONTENDS | {"cli", "bench", "transport.bootstrap"}
DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")

# The core has no I/O: time, sockets and threads come from outside.
NOT_IN_CORE = re.compile(
    r"(sys/(socket|epoll|eventfd|timerfd|mman|time|uio)|netinet/.*|arpa/.*|poll|pthread|threads|time|unistd)\.h"
)


def layer(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    for number, layers in enumerate(FLOORS):
        if layer(module) in layers:
            return number
    raise AssertionError(f"commlayer.{module} belongs to no floor: give it one in FLOORS and in the architecture")


def is_within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but what only type checkers see: types may be named without depending on their module."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        for node in tree.orelse:
            yield from run_time_nodes(node)
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from run_time_nodes(child)


def imported(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """Full names that an import statement of `commlayer.<module>` may load; attributes of modules included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = ["commlayer", *filter(None, module.split("."))]
    up = node.level - is_package
    base = ".".join([*(parts[: len(parts) - up] if node.level else []), *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def reads_own_environment(node: ast.AST) -> bool:
    """os.environ["COMMLAYER_X"], os.environ.get("COMMLAYER_X"), os.getenv("COMMLAYER_X") and the like."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key, source = node.slice, ast.unparse(node.value)
    elif isinstance(node, ast.Call) and node.args:
        key, source = node.args[0], ast.unparse(node.func)
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        key, source = node.left, ast.unparse(node.comparators[0])
    else:
        return False
    return ("environ" in source or "getenv" in source) and (
        isinstance(key, ast.Constant) and str(key.value).startswith("COMMLAYER_")
    )


def python_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What `commlayer.<module>` (without the prefix; "" is the package itself) does that its place forbids."""
    found = []
    for node in run_time_nodes(ast.parse(source)):
        names = imported(node, module, is_package)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in DISTRIBUTED:
            names = [ast.unparse(node)]
        for name in names:
            if name.startswith(DISTRIBUTED) and not is_within(module, MAY_USE_TORCH_DISTRIBUTED):
                found.append(f"{module}: torch.distributed is for frontends, work and transport.bootstrap")
            if name.startswith("commlayer._native"):
                if module != "transport.native":
                    found.append(f"{module}: only transport.native touches the compiled module")
            elif name == "commlayer" or name.startswith("commlayer."):
                target = name.removeprefix("commlayer").lstrip(".")
                if layer(target) not in set().union(*FLOORS):
                    target = ""  # a name that the package itself exports
                own, other = layer(module), layer(target)
                if floor(target) > floor(module):
                    found.append(f"{module}: imports {name}, which is above it")
                shared = own in {"compress", "plans"} and is_within(target, {SHARED_TYPES})
                if own != other and {own, other} <= PACKAGES and not shared:
                    found.append(f"{module}: imports {name}; these packages do not know each other")
        if module != "config" and reads_own_environment(node):
            found.append(f"{module}: line {getattr(node, 'lineno', 0)} reads a COMMLAYER_ variable; config does that")
    return found


def c_violations(path: str, source: str) -> list[str]:
    """What a file of native/ (named from there) includes that its place forbids."""
    folder = path.partition("/")[0]
    foreign = {"core": ("wire/", "sim/"), "wire": ("core/", "sim/"), "kernels": ("core/", "wire/", "sim/")}.get(
        folder, ()
    )
    found = []
    for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE):
        if name.removeprefix("../").startswith(foreign):
            found.append(f"{path}: includes {name}; core, wire and kernels meet in engine.c and sim/ only")
        if folder == "core" and NOT_IN_CORE.fullmatch(name):
            found.append(f"{path}: includes <{name}>; the core has no I/O, clock or thread")
    return found


def modules() -> list[Path]:
    return sorted((ROOT / "commlayer").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "commlayer").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_python_module_keeps_to_its_floor(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert python_violations(module_name(path), source, is_package=path.name == "__init__.py") == []


def c_files() -> list[str]:
    native = ROOT / "native"
    return sorted(str(path.relative_to(native)) for path in [*native.rglob("*.c"), *native.rglob("*.h")])


@pytest.mark.parametrize("path", c_files())
def test_c_file_keeps_to_its_folder(path: str) -> None:
    assert c_violations(path, (ROOT / "native" / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plans.ring", "from ..transport.native import NativeGroup"),
        ("plans.ring", "from .. import transport"),
        ("plans.ring", "from ..compress import codec"),
        ("compress.codec", "import commlayer.plans.ring"),
        ("scheduler.order", "from commlayer.transport.base import Group"),
        ("transport.native", "from ..plans.plan import Plan"),
        ("transport.native", "def late():\n    from ..backend import CommProcessGroup"),
        ("plans.ring", "from commlayer import HookState"),
        ("plans.ring", "import commlayer"),
        ("config", "from .plans import plan"),
        ("work", "from .cli import app"),
        ("backend", "from . import _native"),
        ("backend", "from commlayer._native import lib"),
        ("plans.ring", "import torch.distributed as dist"),
        ("plans.ring", "from torch import distributed"),
        ("plans.ring", "import torch\ntorch.distributed.get_rank()"),
        ("transport.native", "from torch._C._distributed_c10d import Work"),
        ("ddp", "import os\nos.environ.get('COMMLAYER_SHM')"),
        ("ddp", "import os\nos.environ['COMMLAYER_SHM']"),
        ("ddp", "from os import getenv\ngetenv('COMMLAYER_SHM')"),
        ("bench.launch", "import os\n'COMMLAYER_SHM' in os.environ"),
    ],
)
def test_python_violation_is_found(module: str, source: str) -> None:
    assert len(python_violations(module, source)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plans.ring", "from .plan import Plan\nfrom ..errors import ConfigError\nfrom ..transport.base import DType"),
        ("transport.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..plans.plan import Plan"),
        ("transport.native", "from .._native import ffi, lib"),
        ("transport.bootstrap", "import torch.distributed as dist"),
        ("backend", "from .plans.plan import Plan\nfrom .transport import native\nimport torch.distributed as dist"),
        (
            "bench.launch",
            "import os\nenvironment = {'COMMLAYER_SHM': '0', **os.environ}\nenvironment['COMMLAYER_SHM'] = '1'",
        ),
        ("config", "import os\nos.environ.get('COMMLAYER_SHM')"),
    ],
)
def test_python_permission_is_kept(module: str, source: str) -> None:
    assert python_violations(module, source) == []


def test_package_relative_import_is_resolved_from_the_package() -> None:
    source = "from .plan import Plan\nfrom ..compress import codec"
    assert len(python_violations("plans", source, is_package=True)) == 1


def test_module_outside_every_floor_is_an_error() -> None:
    with pytest.raises(AssertionError, match="belongs to no floor"):
        floor("helpers")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/sent.c", '#include "wire/udp.h"'),
        ("core/sent.c", '#include "../wire/udp.h"'),
        ("core/sent.c", "#include <sys/socket.h>"),
        ("core/sent.h", "#  include <pthread.h>"),
        ("core/rtt.c", "#include <time.h>"),
        ("wire/udp.c", '#include "core/endpoint.h"'),
        ("kernels/reduce.c", '#include "core/packet.h"'),
    ],
)
def test_c_violation_is_found(path: str, source: str) -> None:
    assert len(c_violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "core/sent.c",
            '#include "core/sent.h"\n#include "commlayer.h"\n#include "kernels/reduce.h"\n#include <string.h>',
        ),
        ("wire/udp.c", "#include <sys/socket.h>"),
        ("engine.c", '#include "core/endpoint.h"\n#include "wire/udp.h"\n#include <pthread.h>'),
    ],
)
def test_c_permission_is_kept(path: str, source: str) -> None:
    assert c_violations(path, source) == []
