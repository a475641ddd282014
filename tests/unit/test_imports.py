"""The direction of imports is part of the architecture (docs/architecture.md); this is where it is enforced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

# What each folder of commlayer/ may import: all of Python's direction of imports. A module's folder is the first part
# of its name below `commlayer`, and in the frontend, whose rooms lie above each other, the second part, too. "" is
# commlayer/__init__.py, files beside the folders stand for themselves, and so do the modules beside the package.
MAY_IMPORT = {
    "commlayer_environment": set(),
    "commlayer_autoload": {"commlayer_environment", "config", "errors", "frontend.group", "frontend.overlap", "tools"},
    "commlayer_command": {"tools"},
    "errors": set(),
    "dynamo": set(),
    "kind": {"errors"},
    "setting": {"errors", "kind"},
    "policy": {"errors", "kind", "setting"},
    "config_file": {"errors", "commlayer_environment"},
    "config": {"errors", "kind", "setting", "policy", "config_file", "commlayer_environment"},
    "plans": {"errors", "config"},
    "transport": {"errors", "config"},
    "telemetry": {"errors", "config", "transport"},
    "weights": {"errors", "config", "transport", "telemetry"},
    "scheduler": {"errors", "config", "dynamo"},
    "planner": {"errors", "config", "scheduler"},
    "compress": {"errors", "config"},
    "loss": {"errors", "config", "plans"},
    "frontend": {"frontend.gradients"},  # the former name of a class that is pickled
    "frontend.work": {"errors", "config", "dynamo", "transport", "telemetry"},
    "frontend.device": {"errors", "transport", "frontend.work"},
    "frontend.group": {
        *("errors", "config", "plans", "transport", "telemetry", "scheduler", "compress", "loss"),
        *("commlayer_environment", "dynamo", "frontend.work", "frontend.device"),
    },
    "frontend.experts": {"errors", "config", "dynamo", "frontend.work", "frontend.group"},
    "frontend.embedding": {"errors", "config", "frontend.experts"},
    "frontend.gradients": {
        *("errors", "config", "plans", "transport", "telemetry", "scheduler", "compress", "loss"),
        *("dynamo", "frontend.work", "frontend.device", "frontend.group"),
    },
    "frontend.local": {
        *("errors", "kind", "config", "dynamo", "plans", "transport", "scheduler", "compress"),
        *("frontend.work", "frontend.group", "frontend.gradients"),
    },
    "frontend.overlap": {
        *("errors", "config", "dynamo", "telemetry", "scheduler", "compress"),
        *("frontend.work", "frontend.group", "frontend.gradients"),
    },
    "frontend.pipelines": {
        *("errors", "config", "dynamo", "scheduler", "planner", "compress"),
        *("frontend.work", "frontend.gradients", "frontend.overlap"),
    },
    "frontend.elastic": {
        *("errors", "config", "transport", "planner", "scheduler"),
        *("frontend.work", "frontend.group", "frontend.gradients"),
    },
    "frontend.tensor_parallel": {
        *("errors", "config", "dynamo", "planner", "frontend.work", "frontend.group"),
        *("frontend.gradients", "frontend.overlap"),
    },
    "tools": {
        *("errors", "config", "config_file", "plans", "transport", "telemetry", "scheduler", "compress", "loss"),
        *(
            "planner",
            "commlayer_environment",
            "frontend.work",
            "frontend.group",
            "frontend.gradients",
            "frontend.overlap",
        ),
    },
    "": {
        *("commlayer_autoload", "errors", "config", "transport", "scheduler", "planner", "compress", "loss"),
        *("frontend.work", "frontend.group", "frontend.gradients", "frontend.local", "frontend.overlap"),
        *("frontend.pipelines", "frontend.tensor_parallel", "frontend.experts", "frontend.elastic", "weights"),
        "frontend.embedding",
    },
    "torchft": {"errors", "config", "frontend.group"},
    "torchrec": {"errors", "plans", "transport"},
    "megatron": {"errors", "config", "frontend.experts"},
    "torchtitan": {"errors", "config", "frontend.experts"},
    "vllm": {"errors", "weights"},
    "verl": {"errors", "weights"},
    "__main__": {"tools"},
}
BESIDE = ("commlayer_autoload", "commlayer_command", "commlayer_environment")  # modules beside the package
SHARED_TYPES = "transport.base"  # what packages below the frontend may know of the transport
MAY_USE_TORCH_DISTRIBUTED = {
    *("commlayer_autoload", "frontend", "torchft", "torchtitan", "vllm", "transport.bootstrap", "transport.group_life")
} | {f"tools.{name}" for name in ("bench", "check", "cli", "job", "probe")}
PURE = ("simulate", "link", "trace", "actions", "pipelines", "measure")
WITHOUT_TORCH = {"planner", *(f"scheduler.{name}" for name in PURE)}
DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")

# The same for native/: which folders a file may include headers of, beside its own. The public header is everybody's.
MAY_INCLUDE = {
    "include": set(),
    "kernels": set(),
    "os": set(),
    "wire": {"os"},
    "congestion": set(),
    "protocol": {"congestion", "kernels"},
    "plan": {"protocol", "congestion", "kernels"},
    "group": {"plan", "protocol", "congestion", "kernels"},
    "engine": {"group", "plan", "protocol", "congestion", "kernels", "os", "wire"},
    "sim": {"group", "plan", "protocol", "congestion", "kernels"},
    "fabric": {"sim", "plan", "protocol", "congestion", "kernels"},
    "speed": {"engine", "group", "plan", "protocol", "congestion", "os", "tests"},
    "fuzz": {"sim", "group", "plan", "protocol", "congestion"},
}
# What other folders may know of native/congestion/, so that another rate control can take its place.
OF_CONGESTION = {"congestion/congestion.h", "congestion/class.h"}
INSIDE_CONGESTION = re.compile(
    r"\bcongestion(?:\.|->)\w+|\bcl_(?:active_set|cc|contest|cubic|delay|egress|fixed|ingress|loss_trial|neighbours|pacer|peak)\w*"
)
WITHOUT_IO = {"group", "plan", "protocol", "congestion", "kernels"}  # time, sockets and threads come from outside
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
C_FUNCTION = re.compile(r"^(?!static)[a-z][\w *]*?\b((?:cl|sim)_\w+)\([^;{]*?\)\n\{", re.MULTILINE)
IO_HEADERS = re.compile(
    r"(sys/(socket|epoll|eventfd|timerfd|mman|time|uio)|netinet/.*|arpa/.*|poll|pthread|threads|time|unistd|sched)\.h"
)


def layer(module: str) -> str:
    first, _, rest = module.partition(".")
    room = f"{first}.{rest.partition('.')[0]}"
    return room if room in MAY_IMPORT else first


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
    parts = full_name(module).split(".")
    up = node.level - is_package
    base = ".".join([*(parts[: len(parts) - up] if node.level else []), *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def full_name(module: str) -> str:
    return module if module in BESIDE else f"commlayer.{module}".rstrip(".")


def own_name(name: str) -> str | None:
    """The name below `commlayer` of a module that an import statement names in full; None: it is none of ours."""
    if name in BESIDE or name.startswith(tuple(f"{folder}." for folder in BESIDE)):
        return name
    is_own = name == "commlayer" or name.startswith("commlayer.")
    return name.removeprefix("commlayer").lstrip(".") if is_own else None


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
            if is_within(name, {"torch"}) and is_within(module, WITHOUT_TORCH):
                found.append(f"{module}: imports {name}; the planner and the model are pure functions of numbers")
            if name.startswith("commlayer._native"):
                if module != "transport.status":
                    found.append(f"{module}: only transport.status touches the compiled module")
            elif (target := own_name(name)) is not None:
                if layer(target) not in MAY_IMPORT:
                    target = ""  # a name that the package itself exports
                own, other = layer(module), layer(target)
                is_shared = own in {"plans", "scheduler", "compress", "loss"} and is_within(target, {SHARED_TYPES})
                if own != other and other not in MAY_IMPORT[own] and not is_shared:
                    found.append(
                        f"{module}: imports {name}; {own or 'commlayer'} may not import {other or 'commlayer'}"
                    )
        if module not in ("config", "commlayer_environment") and reads_own_environment(node):
            found.append(f"{module}: line {getattr(node, 'lineno', 0)} reads a COMMLAYER_ variable; config does that")
    return found


def c_violations(path: str, source: str) -> list[str]:
    """What a file of native/ (named from there) includes that its place forbids."""
    folder = path.partition("/")[0]
    found = []
    for name in INCLUDE.findall(source):
        other = name.removeprefix("../").partition("/")[0]
        if folder != "tests" and other in MAY_INCLUDE and other not in MAY_INCLUDE[folder] | {folder}:
            found.append(f"{path}: includes {name}; {folder}/ may not include headers of {other}/")
        if folder in WITHOUT_IO and IO_HEADERS.fullmatch(name):
            found.append(f"{path}: includes <{name}>; {folder}/ has no I/O, clock or thread")
        if folder not in ("congestion", "tests") and other == "congestion" and name not in OF_CONGESTION:
            found.append(f"{path}: includes {name}; congestion/congestion.h is all that other folders use")
    if folder not in ("congestion", "tests"):
        code = re.sub(r"/\*.*?\*/|^\s*#.*?$", "", source, flags=re.DOTALL | re.MULTILINE)
        inside = sorted(set(INSIDE_CONGESTION.findall(code)))
        found += [f"{path}: uses {name}; congestion/congestion.h has functions for that" for name in inside]
    return found


def c_circles(sources: dict[str, str]) -> list[set[str]]:
    """Sets of nouns (paths without .c or .h) that use each other, by an include or by a function, of files by path."""
    code = {path: re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL) for path, source in sources.items()}
    noun_of = {path: path.rpartition(".")[0] for path in code}
    defined = {name: noun_of[path] for path, source in code.items() for name in C_FUNCTION.findall(source)}
    includes: dict[str, set[str]] = {}
    for path, source in code.items():
        functions = re.findall(r"(?<!struct )(?<!enum )\b(?:cl|sim)_\w+", source)
        used = {noun_of[name] for name in INCLUDE.findall(source) if name in sources}
        used |= {defined[name] for name in functions if name in defined}
        includes.setdefault(noun_of[path], set()).update(used)

    def reached(noun: str) -> set[str]:
        found: set[str] = set()
        new = includes[noun] - {noun}
        while new:
            found |= new
            new = set().union(*(includes[header] for header in new)) - found
        return found

    below = {noun: reached(noun) for noun in includes}
    circles = {frozenset(other for other in below[noun] if noun in below[other]) for noun in includes}
    return [set(circle) for circle in circles if circle]


def modules() -> list[Path]:
    return [*sorted((ROOT / "commlayer").rglob("*.py")), *(ROOT / f"{name}.py" for name in BESIDE)]


def module_name(path: Path) -> str:
    if path.parent == ROOT:
        return path.stem
    parts = path.relative_to(ROOT / "commlayer").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_python_module_imports_only_allowed_folders(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert python_violations(module_name(path), source, is_package=path.name == "__init__.py") == []


def imported_modules(module: str, source: str, known: set[str], *, is_package: bool = False) -> set[str]:
    """The modules of commlayer that `commlayer.<module>` loads at run time, also those it imports inside functions."""
    found = set()
    for node in run_time_nodes(ast.parse(source)):
        for name in imported(node, module, is_package):
            target = own_name(name) or ""
            while target and target not in known:  # a name that the module defines
                target = target.rpartition(".")[0]
            if target:
                found.add(target)
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Some modules each of which imports the next, and the last the first; empty if there is no such circle."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]
        if path[-1] in done:
            return []
        found = next(filter(None, (search([*path, module]) for module in sorted(imports[path[-1]]))), [])
        done.add(path[-1])
        return found

    return next(filter(None, (search([module]) for module in sorted(imports))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {module_name(path) for path in modules()}
    imports = {
        module_name(path): imported_modules(
            module_name(path), path.read_text(encoding="utf-8"), known, is_package=path.name == "__init__.py"
        )
        for path in modules()
    }
    assert len(imports["frontend.gradients.ddp"]) >= 4
    assert circle(imports) == []


def test_a_circle_of_imports_is_found() -> None:
    known = {"", "plans", "plans.ring", "plans.plan", "errors"}
    ring = imported_modules("plans.ring", "from . import plan\nfrom ..errors import ConfigError", known)
    late = imported_modules("plans.plan", "def late():\n    from .ring import make", known)
    typed = imported_modules("errors", "if TYPE_CHECKING:\n    from .plans.plan import Plan", known)
    assert (ring, late, typed) == ({"plans.plan", "errors"}, {"plans.ring"}, set())
    assert circle({"errors": typed, "plans.plan": set(), "plans.ring": ring}) == []
    assert circle({"errors": typed, "plans.plan": late, "plans.ring": ring}) == [
        "plans.plan",
        "plans.ring",
        "plans.plan",
    ]


def c_files() -> list[str]:
    native = ROOT / "native"
    return sorted(str(path.relative_to(native)) for path in [*native.rglob("*.c"), *native.rglob("*.h")])


@pytest.mark.parametrize("path", c_files())
def test_c_file_includes_only_allowed_folders(path: str) -> None:
    assert c_violations(path, (ROOT / "native" / path).read_text(encoding="utf-8")) == []


def test_no_c_files_include_each_other_in_a_circle() -> None:
    sources = {path: (ROOT / "native" / path).read_text(encoding="utf-8") for path in c_files()}
    assert c_circles(sources) == []


def test_a_circle_of_c_files_is_found() -> None:
    sources = {"a/x.c": '#include "a/x.h"\n#include "b/y.h"', "a/x.h": "", "b/y.h": '#include "b/z.h"', "b/z.h": ""}
    assert c_circles(sources) == []
    assert c_circles({**sources, "b/z.c": '#include "a/x.h"'}) == [{"a/x", "b/y", "b/z"}]
    sources["a/x.c"] += "\nint cl_x(struct cl_y *y)\n{\n}"
    assert c_circles({**sources, "b/z.c": "/* cl_x */ struct cl_x;"}) == []
    assert c_circles({**sources, "b/z.c": "int cl_z(void)\n{\n    return cl_x(0);\n}"}) == [{"a/x", "b/y", "b/z"}]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plans.ring", "from ..transport.native import NativeGroup"),
        ("plans.ring", "from .. import transport"),
        ("plans.ring", "from ..compress import codec"),
        ("compress.codec", "import commlayer.plans.ring"),
        ("scheduler.order", "from commlayer.transport.native import Engine"),
        ("scheduler.order", "from ..loss import tolerance"),
        ("scheduler.simulate", "from ..planner import search"),
        ("scheduler.simulate", "from torch.distributed.pipelining import ScheduleLoopedBFS"),
        ("planner.search", "from ..plans.plan import Plan"),
        ("planner.search", "import torch"),
        ("transport.native", "from ..plans.plan import Plan"),
        ("transport.native", "def late():\n    from ..frontend.group.backend import CommProcessGroup"),
        ("plans.ring", "from commlayer import HookState"),
        ("plans.ring", "import commlayer"),
        ("config", "from .plans import plan"),
        ("frontend.work.work", "from ..tools.cli import app"),
        ("frontend.group.backend", "from .. import _native"),
        ("frontend.group.backend", "from commlayer._native import lib"),
        ("transport.native", "from .._native import ffi, lib"),
        ("plans.ring", "import torch.distributed as dist"),
        ("plans.ring", "from torch import distributed"),
        ("plans.ring", "import torch\ntorch.distributed.get_rank()"),
        ("transport.native", "from torch._C._distributed_c10d import Work"),
        ("frontend.gradients.ddp", "import os\nos.environ.get('COMMLAYER_SHM')"),
        ("frontend.gradients.ddp", "import os\nos.environ['COMMLAYER_SHM']"),
        ("frontend.gradients.ddp", "from os import getenv\ngetenv('COMMLAYER_SHM')"),
        ("tools.bench.launch", "import os\n'COMMLAYER_SHM' in os.environ"),
        ("frontend.group.submit", "from ..gradients.ddp import allreduce_hook"),
        ("frontend.work.work", "from ..device import pinned"),
        ("frontend.gradients.ddp", "def late():\n    from ..overlap.overlap import overlap"),
        ("frontend.pipelines.pipeline", "from ..tensor_parallel.tp import overlap"),
        ("config_file", "import commlayer_autoload"),
        ("commlayer_environment", "from commlayer.config import Config"),
        ("commlayer_autoload", "import os\nos.environ.get('COMMLAYER_CONFIG')"),
    ],
)
def test_python_violation_is_found(module: str, source: str) -> None:
    assert len(python_violations(module, source)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plans.ring", "from .plan import Plan\nfrom ..errors import ConfigError\nfrom ..transport.base import DType"),
        ("transport.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..plans.plan import Plan"),
        ("transport.status", "from .._native import ffi, lib"),
        ("transport.bootstrap", "import torch.distributed as dist"),
        ("planner.search", "from ..scheduler.simulate import simulate"),
        ("scheduler.gradient", "import torch"),
        (
            "frontend.group.backend",
            "from ...plans.plan import Plan\nfrom ...transport import native\nimport torch.distributed as dist",
        ),
        (
            "tools.bench.launch",
            "import os\nenvironment = {'COMMLAYER_SHM': '0', **os.environ}\nenvironment['COMMLAYER_SHM'] = '1'",
        ),
        ("config", "import os\nos.environ.get('COMMLAYER_SHM')"),
        ("commlayer_environment", "import os\nos.environ.get('COMMLAYER_SHM')"),
        ("frontend.overlap.ddp", "from ..gradients.ddp import check_dense\nfrom .handle import Overlap"),
        ("frontend.gradients.gradient", "from ..group.backend import CommProcessGroup"),
    ],
)
def test_python_permission_is_kept(module: str, source: str) -> None:
    assert python_violations(module, source) == []


def test_package_relative_import_is_resolved_from_the_package() -> None:
    source = "from .plan import Plan\nfrom ..compress import codec"
    assert len(python_violations("plans", source, is_package=True)) == 1


def test_every_folder_is_listed_and_every_listed_folder_is_there() -> None:
    native = ROOT / "native"
    assert {layer(module_name(path)) for path in modules()} == set(MAY_IMPORT)
    assert {path.parent.name for path in native.glob("*/*.[ch]")} - {"tests"} == set(MAY_INCLUDE)
    assert not list(native.glob("*.[ch]"))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/sent.c", '#include "wire/udp.h"'),
        ("protocol/sent.c", '#include "../wire/udp.h"'),
        ("protocol/sent.c", "#include <sys/socket.h>"),
        ("protocol/sent.h", "#  include <pthread.h>"),
        ("congestion/cc.c", "#include <time.h>"),
        ("protocol/path.c", '#include "congestion/cc.h"'),
        ("protocol/path.c", "if (path->congestion.window > bytes)"),
        ("protocol/path.c", "bool urgent = cl_egress_urgent(egress, class, now_us);"),
        ("wire/udp.c", '#include "protocol/endpoint.h"'),
        ("kernels/reduce.c", '#include "protocol/packet.h"'),
    ],
)
def test_c_violation_is_found(path: str, source: str) -> None:
    assert len(c_violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "protocol/sent.c",
            '#include "protocol/sent.h"\n#include "commlayer.h"\n#include "congestion/class.h"\n#include <string.h>',
        ),
        ("wire/udp.c", "#include <sys/socket.h>"),
        ("protocol/path.c", "/* see cl_egress_urgent */\ncl_congestion_lost(&path->congestion, packets);"),
        ("congestion/cc.c", '#include "congestion/pacer.h"\ncl_pacer_sent(&congestion->pacer, bytes);'),
        ("engine/engine.c", '#include "protocol/endpoint.h"\n#include "wire/udp.h"\n#include <pthread.h>'),
    ],
)
def test_c_permission_is_kept(path: str, source: str) -> None:
    assert c_violations(path, source) == []
