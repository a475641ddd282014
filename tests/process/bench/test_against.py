"""bench.against on real ranks: a package beside itself, and beside a slower copy."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from bench.against import CASES, ROUNDS, compare
from bench.harness.tree import CannotRunError, Tree, checkout
from tests import ROOT

SLOW = """
import time
import torch.distributed


def slow_all_reduce(*args, fast=torch.distributed.all_reduce, **kwargs):
    time.sleep(0.05)
    return fast(*args, **kwargs)


torch.distributed.all_reduce = slow_all_reduce
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (("size_bytes", 4096), ("iters", 3), ("warmup", 1))
    monkeypatch.setitem(CASES, "shm-4K-loop", dataclasses.replace(CASES["shm-4K-loop"], arguments=arguments))


def test_a_package_beside_itself() -> None:
    with Tree(ROOT, "one") as one, Tree(ROOT, "two") as two:
        row = compare("shm-4K-loop", one, two, 1)
    assert not row.failure
    assert row.before > 0
    assert row.after > 0
    assert row.cpu is not None


@pytest.mark.slow
def test_a_slower_package_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "commlayer", tmp_path / "commlayer", ignore=shutil.ignore_patterns("__pycache__"))
    for module in ROOT.glob("commlayer_*.py"):
        shutil.copy(module, tmp_path)
    with (tmp_path / "commlayer/__init__.py").open("a") as package:
        package.write(SLOW)
    with Tree(ROOT, "this checkout") as own, Tree(tmp_path, "slow") as slow:
        row = compare("shm-4K-loop", own, slow, ROUNDS)
        assert (row.verdict, row.is_bad) == ("**slower**", True), row
        assert compare("shm-4K-loop", slow, own, ROUNDS).verdict == "faster"


def test_a_tree_without_the_package_does_not_borrow_another(tmp_path: Path) -> None:
    with Tree(tmp_path, "empty") as empty, pytest.raises(CannotRunError, match=r"empty: .* ended with status 1"):
        empty.take(CASES["shm-4K-loop"], None)


def test_the_worktree_goes_away() -> None:
    with checkout("HEAD") as path:
        assert (path / "setup.py").exists()
    assert not path.exists()
