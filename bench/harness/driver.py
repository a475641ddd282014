"""The driver of a benchmark: measures case by case, keeps each result, and writes the page from all that is kept."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.harness.page import write_between
from bench.harness.results import read_results, write_results

Content = dict[str, Any]
Case = TypeVar("Case")

WHOLE = (None,)
"""The cases of a benchmark that measures everything at once."""


class BenchError(RuntimeError):
    """A case could not be measured."""


@dataclass(frozen=True)
class Benchmark:
    """The results that are kept, and their page."""

    results: Path
    page: Path
    tables: Callable[[Any], Mapping[str, str]]
    """The tables, by the names of their places in the page: only from the results."""
    empty: Mapping[str, Any] = field(default_factory=dict)
    """The results before the first measurement."""
    picture: Callable[[Any], None] | None = None
    """Draws the results into a file."""
    is_good: Callable[[Any], bool] = lambda _: True
    """Whether the results reach their targets."""

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes tables and pictures. Raises ValueError if the page lacks a marker."""
        write_between(self.page, **self.tables(content))
        if self.picture is not None:
            self.picture(content)

    def main(self, asked: argparse.Namespace, cases: Iterable[Case], measure: Callable[[Content, Case], None]) -> int:
        """The main function of a benchmark, after `options` were parsed.

        `measure` puts the results of a case into the content; a BenchError ends that case alone. Returns the exit
        status: 2 if a case could not be measured, 1 if a target is missed, but not in a quick run.
        """
        content = copy.deepcopy(dict(self.empty)) if asked.quick else read_results(self.results, self.empty)
        was_empty, has_failed = content == self.empty, False
        for case in () if asked.table else cases:
            try:
                measure(content, case)
            except BenchError as error:
                print(error, file=sys.stderr, flush=True)
                has_failed = True
            if not asked.quick:  # after each case: the next one may be interrupted
                write_results(self.results, content)
        if has_failed and was_empty and content == self.empty:
            return 2
        print(*self.tables(content).values(), sep="\n\n")
        if asked.quick:
            return 2 * has_failed
        self.write(content)
        return 2 if has_failed else int(not self.is_good(content))
