"""Line coverage: C by the C tests and the simulator, Python by pytest. `make coverage` installs the tools it needs.

    python -m bench.coverage                          both (half an hour)
    python -m bench.coverage --only native            one of them, merged into the kept results
    python -m bench.coverage --before before.json     compares with an earlier file of results
    python -m bench.coverage --table                  prints the table of the kept results

Two kinds of Python lines do not count as covered: those that only run on threads made by C++, which Python before 3.12
cannot trace, and those that only run in processes that the test kills.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from bench.harness.options import options

PYTHON = str(Path(".venv/bin/python").absolute())
OUT = Path("out/coverage")
BESIDE_ENGINE = ("sim", "fabric", "tests", "fuzz")
"""Folders of native/ outside the engine. Lines of tests and fuzz are not counted."""

# Tracing slows tests down, so each has more time than its own limit.
PYTEST = ["-m", "pytest", "-q", "-rs", "--timeout=300"]
SETTINGS = """\
[run]
source_dirs = {package}
data_file = {out}/data
parallel = true
concurrency = multiprocessing, thread
patch = subprocess
disable_warnings = no-data-collected, module-not-measured

[report]
include_namespace_packages = true
"""

Count = dict[str, int]
"""`covered` and `lines`."""


def total(counts: list[Count]) -> Count:
    """The sum of several counts."""
    return {key: sum(count[key] for count in counts) for key in ("covered", "lines")}


def summary(
    files: Mapping[str, Count], groups: Mapping[str, list[str]], failed: list[str], begun: float
) -> dict[str, Any]:
    """The results of one measurement: counts by group, by folder and by file, and the tests that failed twice."""
    folders = sorted({str(PurePath(name).parent) for name in files})
    head = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return {
        "commit": subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip(),
        "totals": {group: total([files[name] for name in names]) for group, names in groups.items() if names},
        "folders": {
            folder: total([count for name, count in files.items() if str(PurePath(name).parent) == folder])
            for folder in folders
        },
        "files": dict(sorted(files.items())),
        "failed": failed,
        "seconds": round(time.monotonic() - begun),
    }


def passes_at_last(command: list[str]) -> bool:
    """Runs a test, twice if it fails: a busy machine may be the reason. Prints the output of a failure."""
    for _ in range(2):
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            print(f"TIMEOUT: {' '.join(command)}", flush=True)
            continue
        if done.returncode == 0:
            return True
        print(f"FAILED ({done.returncode}): {' '.join(command)}\n{done.stdout[-2000:]}", flush=True)
    return False


def group_of(name: str) -> str:
    """The group of a C source: "engine", or its folder if that is outside the engine."""
    folder = PurePath(name).parts[1]
    return folder if folder in BESIDE_ENGINE else "engine"


def measure_native(seeds: int) -> dict[str, Any]:
    """Runs all C tests and the simulator, built with counters and without optimisation."""
    begun = time.monotonic()
    subprocess.run(["rm", "-rf", "build/cov"], check=True)  # it may hold counts of files that have moved
    tests = [f"build/cov/{path.stem}" for path in sorted(Path("native/tests").glob("test_*.c"))]
    subprocess.run(["make", "-s", "-j2", *tests, "build/cov/simulate", "build/plans.bin"], check=True)
    simulate = f"build/cov/simulate --plans build/plans.bin --first 1 --seeds {seeds} --jobs 2"
    failed = [line for line in [*tests, simulate] if not passes_at_last(line.split())]

    # A header's functions are compiled into several files; each line counts once.
    report = OUT / "native.json"
    gcovr = [PYTHON, "-m", "gcovr", "--root", ".", "--filter", "native/", "--json-summary", str(report)]
    merged = ["--merge-mode-functions=separate", "--merge-lines", "--gcov-suspicious-hits-threshold=0"]
    subprocess.run([*gcovr, *merged, "build/cov"], check=True)
    files: dict[str, Count] = {
        file["filename"]: {"covered": file["line_covered"], "lines": file["line_total"]}
        for file in json.loads(report.read_text())["files"]
        if group_of(file["filename"]) not in ("tests", "fuzz")
    }
    groups = {group: [name for name in files if group_of(name) == group] for group in ("engine", "sim", "fabric")}
    groups["sim and fabric"] = groups["sim"] + groups["fabric"]
    return summary(files, groups, failed, begun)


def failed_tests() -> list[str]:
    """The tests that failed in pytest's last run."""
    path = Path(".pytest_cache/v/cache/lastfailed")
    return sorted(json.loads(path.read_text())) if path.exists() else []


def measure_python(arguments: list[str]) -> dict[str, Any]:
    """Runs the Python tests, and traces all processes they start. Failed tests run once more."""
    begun = time.monotonic()
    settings = OUT / "settings.ini"
    settings.write_text(SETTINGS.format(package=Path("commlayer").absolute(), out=OUT.absolute()))
    for path in OUT.glob("data*"):
        path.unlink()
    coverage, given = [PYTHON, "-m", "coverage"], f"--rcfile={settings.absolute()}"
    run = [*coverage, "run", given, *PYTEST, *(arguments or ["tests"])]
    first = subprocess.run([*run, "--cache-clear"]).returncode
    if first == 1:
        print(f"once more: {failed_tests()}", flush=True)
        subprocess.run([*run, "--last-failed"])
    elif first != 0:
        raise SystemExit(f"pytest ended with {first}")

    report = OUT / "python.json"
    subprocess.run([*coverage, "combine", "-q", given], check=True)
    subprocess.run([*coverage, "json", "-q", given, "-o", str(report)], check=True)
    files: dict[str, Count] = {
        name: {"covered": file["summary"]["covered_lines"], "lines": file["summary"]["num_statements"]}
        for name, file in json.loads(report.read_text())["files"].items()
    }
    return summary(files, {"commlayer": list(files)}, failed_tests(), begun)


def row(name: str, count: Count, before: Count | None) -> str:
    """One row of the table."""
    texts = [
        f"{covered['covered']:6} / {covered['lines']:6} {100 * covered['covered'] / max(covered['lines'], 1):6.1f} %"
        if covered is not None
        else ""
        for covered in (count, before)
    ]
    return f"{name:34}{texts[0]}   {texts[1]}".rstrip()


def table(results: dict[str, Any], before: dict[str, Any]) -> str:
    """Covered lines and all lines, by folder and in total, beside those of `before`."""
    lines: list[str] = []
    for part in ("native", "python"):
        if part not in results:
            continue
        commits = [found[part]["commit"] for found in (results, before) if part in found]
        lines += ["", f"{part + ', lines covered / all':34}" + "   ".join(f"{commit:>24}" for commit in commits)]
        for kind, mark in (("folders", ""), ("totals", "all of ")):
            earlier = before.get(part, {}).get(kind, {})
            lines += [row(mark + name, count, earlier.get(name)) for name, count in results[part][kind].items()]
        lines += [f"failed: {test}" for test in results[part]["failed"]]
    return "\n".join(lines[1:])


def main() -> int:
    """Measures, writes the results and prints the table. Returns 1 if a test failed twice."""
    parser = options(__doc__, only=("native", "python"), seeds=300, table=True)
    parser.add_argument("--out", type=Path, default=OUT / "coverage.json", help="file of results")
    parser.add_argument("--before", type=Path, help="earlier file of results to compare with")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest instead of `tests`")
    arguments = parser.parse_args()

    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if not arguments.table:
        if not arguments.only or "native" in arguments.only:
            results["native"] = measure_native(arguments.seeds)
        if not arguments.only or "python" in arguments.only:
            results["python"] = measure_python(arguments.pytest)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results, json.loads(arguments.before.read_text()) if arguments.before else {}))
    return int(any(results[part]["failed"] for part in ("native", "python") if part in results))


if __name__ == "__main__":
    raise SystemExit(main())
