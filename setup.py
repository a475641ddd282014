"""Builds the native engine into `commlayer._native`; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "native"))  # PEP 517 front ends do not put the project on the path
from build import BuildNative

setup(
    cffi_modules=["native/build.py:ffibuilder"],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # cffi uses the stable ABI: one wheel serves every Python
)
