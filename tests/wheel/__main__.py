"""Installs a wheel in a clean environment outside the checkout, and tries it there (trial.py).

    python -m tests.wheel dist/commlayer-*.whl

The environment sees torch and the other dependencies of the calling Python, but none of its editable installs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TRIAL = Path(__file__).with_name("trial.py")


def environment(folder: Path, wheel: Path) -> Path:
    """Makes the environment, and returns its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    # plain lines become entries of sys.path; .pth files in there, as of editable installs, are not read
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(site, "dependencies.pth").write_text("".join(f"{path}\n" for path in packages))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="commlayer-wheel-") as folder:
        python = environment(Path(folder, "environment"), wheel)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([python, str(TRIAL)], cwd=folder, env=environ)
    print(f"{wheel.name}: {'failed' if done.returncode else 'works in a clean environment'}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
