"""Packs `make gpu` for a machine with nothing but Python, torch and a GPU: one archive, 64 MiB at most.

    python -m tests.gpu.bundle dist/commlayer-*.whl out/gpu-bundle.tar.gz

There, without a network: `tar xf gpu-bundle.tar.gz && sh gpu-bundle/run`. It has the wheel of commlayer (abi3: for
every Python), those of the dependencies that the checks import, and the checks.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests import ROOT

LIMIT_BYTES = 64 << 20
FOLDER = "gpu-bundle"
VERSIONS = ("3.11", "3.12", "3.13")
"""The Pythons for which wheels of cffi and numpy are packed, which are for one version each. numpy takes 17 MiB."""
DEPENDENCIES = ("cffi", "pycparser", "numpy")
"""The dependencies that the checks import. numpy is unpacked where torch came without it."""

RUN = """\
#!/bin/sh
# Checks the GPU with this Python and its torch. Nothing is installed: the wheels are unpacked here.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
"$python" -c 'import torch' || { echo "$python has no torch: PYTHON=/path/to/python sh $0 takes another one"; exit 2; }
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
needed="PACKAGES"
"$python" -c 'import numpy' 2>/dev/null || needed="$needed numpy"
for name in $needed; do
    for wheel in wheels/$name-*-$tag-*.whl wheels/$name-*-abi3-*.whl wheels/$name-*-none-any.whl; do
        [ ! -e "$wheel" ] || break
    done
    [ -e "$wheel" ] || { echo "no wheel of $name for $python ($tag) here: use Python VERSIONS"; exit 2; }
    "$python" -m zipfile -e "$wheel" packages
done
PYTHONPATH="$PWD/packages:$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m tests.gpu "$@"
""".replace("PACKAGES", "commlayer cffi pycparser").replace("VERSIONS", ", ".join(VERSIONS))


def dependencies(folder: Path) -> None:
    """Downloads the wheels of the dependencies."""
    for version in VERSIONS:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", version, "-d", str(folder), *DEPENDENCIES]
        subprocess.run(command, check=True)


def pack(wheel: Path, target: Path, wheels: Path) -> int:
    """Writes the archive; returns its bytes. Raises SystemExit if it is larger than the limit."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        for file in (wheel, *sorted(wheels.iterdir())):
            archive.add(file, f"{FOLDER}/wheels/{file.name}")
        checks = [path for path in sorted((ROOT / "tests" / "gpu").glob("*.py")) if path.name != "bundle.py"]
        for path in (*checks, *(ROOT / "tests" / name for name in ("__init__.py", "ranks.py", "fake_cuda.py"))):
            archive.add(path, f"{FOLDER}/{path.relative_to(ROOT)}")
        entry = tarfile.TarInfo(f"{FOLDER}/run")
        entry.size, entry.mode = len(RUN), 0o755
        archive.addfile(entry, io.BytesIO(RUN.encode()))
    size = target.stat().st_size
    if size > LIMIT_BYTES:
        sys.exit(f"{target}: {size} bytes are more than {LIMIT_BYTES}")
    return size


def main() -> None:
    wheel, target = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        dependencies(Path(folder))
        print(f"{target}: {pack(wheel, target, Path(folder)) / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
