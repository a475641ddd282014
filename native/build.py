"""cffi API-mode builder of `commlayer._native` (used by setup.py).

build.mk has the folders, flags and libraries; the Makefile uses them, too. The binding is the text between the CFFI
markers of include/commlayer.h, so header and binding cannot disagree. `CL_SANITIZE=address,undefined` or
`CL_SANITIZE=thread` builds an instrumented module; the process that imports it must preload the sanitizer's runtime.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cffi import FFI
from setuptools.command.build_ext import build_ext

NATIVE = Path("native")  # setuptools runs in the project's root, and wants relative paths
SANITIZE = os.environ.get("CL_SANITIZE", "")
MODULE_FLAGS = ["-O3", "-fvisibility=hidden"]


def listed(name: str) -> list[str]:
    """The words of a variable in build.mk."""
    lines = re.findall(rf"^{name} := (.*)$", (NATIVE / "build.mk").read_text(encoding="utf-8"), re.MULTILINE)
    if len(lines) != 1:
        raise ValueError(f"native/build.mk has {len(lines)} lines that begin with `{name} := `; write one")
    return str(lines[0]).split()


def sources() -> list[Path]:
    """The engine's C files; sim/, fabric/, tests/ and fuzz/ are not part of it."""
    return [path for folder in listed("ENGINE_FOLDERS") for path in sorted((NATIVE / folder).glob("*.c"))]


def binding(header: str) -> str:
    """The declarations between the CFFI markers."""
    _, _, rest = header.partition("/* CFFI-BEGIN */")
    declarations, end, _ = rest.partition("/* CFFI-END */")
    if not end:
        raise ValueError("commlayer.h has no CFFI-BEGIN ... CFFI-END section")
    return declarations


class BuildNative(build_ext):
    """Compiles changed files only, on every core; setuptools alone compiles all files again, one after another."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Editable installs build in a temporary folder, and would lose the objects each time.
        self.build_temp = str(Path("build") / "native" / (SANITIZE.replace(",", "-") or "plain"))

    def build_extension(self, ext: Any) -> None:
        compile_all, compile_one = self.compiler.compile, self.compiler._compile
        rules = [*NATIVE.rglob("*.h"), NATIVE / "build.mk", Path(__file__)]
        newest_rule = max(path.stat().st_mtime for path in rules)

        def compile_in_parallel(*args: Any, **kwargs: Any) -> Any:
            jobs: list[Future[None]] = []

            def compile_if_stale(obj: str, src: str, *rest: Any) -> None:
                built = Path(obj).stat().st_mtime if Path(obj).exists() else 0.0
                if self.force or built < max(newest_rule, Path(src).stat().st_mtime):
                    jobs.append(pool.submit(compile_one, obj, src, *rest))

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.compiler._compile = compile_if_stale
                objects = compile_all(*args, **kwargs)
            for job in jobs:
                job.result()
            return objects

        self.compiler.compile = compile_in_parallel
        super().build_extension(ext)


ffibuilder = FFI()
ffibuilder.cdef(binding((NATIVE / "include" / "commlayer.h").read_text(encoding="utf-8")))
_sanitize = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
ffibuilder.set_source(
    "commlayer._native",
    '#include "commlayer.h"',
    sources=[str(path) for path in sources()],
    depends=[str(path) for path in sorted(NATIVE.rglob("*.h"))],
    extra_compile_args=[*listed("C_FLAGS"), *MODULE_FLAGS, *_sanitize],
    extra_link_args=[*listed("C_LIBS"), *_sanitize],
)
