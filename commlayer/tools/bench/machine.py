"""Facts about the machine and the software that a reader needs to judge a number."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _tcp_congestion_control() -> str | None:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None


def _version() -> str:
    try:
        return metadata.version("commlayer")
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str | None:
    """The checkout's commit, with "-dirty" if files differ from it; None outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def facts() -> dict[str, Any]:
    """The facts, without host names, addresses and paths.

    The load average (1 minute, at the start) shows whether the machine was busy with other work.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tcp_congestion_control": _tcp_congestion_control(),
        "commlayer": _version(),
        "git_commit": _git_commit(),
    }
