"""Builds the wheels of a release from an sdist: manylinux, for x86-64 and aarch64, on a machine of either kind.

    python native/wheels.py dist/commlayer-0.1.0.tar.gz dist    # `make wheels`

The compiler is clang as the package `ziglang` ships it: it has the headers and symbols of old versions of glibc, and
compiles for both processors. cffi uses the stable ABI, so one wheel per processor serves every Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ziglang

PROCESSORS = ("x86_64", "aarch64")
GLIBC = "2.28"
"""The version that torch's wheels need."""


def environ(processor: str) -> dict[str, str]:
    """The variables by which setuptools compiles for another processor."""
    compiler = f"{Path(ziglang.__file__).parent / 'zig'} cc -target {processor}-linux-gnu.{GLIBC}"
    return {
        **os.environ,
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -Wl,--strip-debug",
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
    }


def build(sdist: Path, processor: str, folder: Path) -> Path:
    """Builds a wheel, has auditwheel check the symbols it needs, and returns its path in `folder`."""
    with tempfile.TemporaryDirectory() as plain:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
        command = [*pip, "--no-build-isolation", "--no-cache-dir", "-w", plain, str(sdist)]
        subprocess.run(command, env=environ(processor), check=True)
        (wheel,) = Path(plain).glob("*.whl")
        return tag(wheel, folder)


def tag(wheel: Path, folder: Path) -> Path:
    """Has auditwheel name the wheel after the oldest manylinux on which it runs. Raises CalledProcessError."""
    before = set(folder.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(wheel)], check=True)
    (new,) = set(folder.glob("*.whl")) - before
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for processor in PROCESSORS:
        print(build(options.sdist, processor, options.folder))


if __name__ == "__main__":
    main()
