"""A bench run as a table for people (as in nccl-tests) and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import Measurement
from .spec import Spec

SCHEMA = 1

# heading, unit, width
_COLUMNS = (
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 8),
    ("redop", "", 7),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 6),
    ("p50", "(us)", 10),
    ("p99", "(us)", 10),
    ("cpu", "(s/GB)", 7),
    ("machine", "(s/GB)", 7),
    ("link", "(%)", 6),
    ("speedup", "(x)", 7),
)
_NOT_COUNTED = ("not-counted", "(%)", 11)  # share of the contributions, if a backend may lose some


def _columns(spec: Spec) -> tuple[tuple[str, str, int], ...]:
    return (*_COLUMNS, _NOT_COUNTED) if spec.may_lose else _COLUMNS


def _line(spec: Spec, cells: Sequence[str], backend: str, lead: str = " ") -> str:
    # the space separates a number that is longer than its column
    padded = (f" {cell:>{width}}" for cell, (_, _, width) in zip(cells, _columns(spec), strict=True))
    return f"{lead}{''.join(padded)}  {backend}"


def _ideal_gb_s(spec: Spec, world: int) -> float | None:
    # with several ranks on a host, busbw is not the rate of the host's link
    return spec.scenario.payload_gb_s if spec.scenario is not None and spec.scenario.hosts == world else None


def _has_events(spec: Spec) -> bool:
    return spec.scenario is not None and bool(spec.scenario.events)


def header(spec: Spec, world: int, facts: dict[str, Any]) -> list[str]:
    """The lines above the table, all starting with '#'."""
    machine = "{cores} cores, {cpu}, {kernel}, torch {torch}, commlayer {commlayer}".format(**facts)
    names = ", ".join(map(str, spec.backends))
    lines = [
        f"# commlayer bench {spec.collective}: {world} ranks, {machine}",
        f"# backends         : {names}; speedup is over {spec.backends[0]}",
        f"# taking turns     : {spec.rounds} rounds of {spec.iters} iterations after {spec.warmup} warm-up iterations",
    ]
    if spec.apart_ms or spec.barrier:
        before = [f"{spec.apart_ms:g} ms of sleep"] * (spec.apart_ms > 0) + ["a barrier"] * spec.barrier
        lines.append(f"# before each call : {' and '.join(before)}, not timed")
    if spec.scenario is not None:
        lines.append(f"# network          : {spec.scenario}")
        ideal_gb_s = _ideal_gb_s(spec, world)
        if ideal_gb_s is not None:
            mtu = spec.scenario.nics[0].mtu
            lines.append(f"# ideal busbw      : {ideal_gb_s:.5f} GB/s (UDP payload at MTU {mtu})")
    return [
        *lines,
        _line(spec, [name for name, _, _ in _columns(spec)], "backend", "#"),
        _line(spec, [unit for _, unit, _ in _columns(spec)], "", "#").rstrip(),
    ]


def row(spec: Spec, measurement: Measurement, baseline: Measurement) -> dict[str, Any]:
    """One line of the table, as JSON. Times in microseconds, rates in GB/s (1e9 bytes), CPU in seconds per GB."""
    summary = measurement.summary
    ideal_gb_s = _ideal_gb_s(spec, measurement.collective.world)
    return {
        "collective": spec.collective,
        "size_bytes": measurement.collective.size_bytes,
        "count": measurement.collective.count,
        "dtype": spec.dtype,
        "op": spec.op if measurement.collective.reduces else None,
        "backend": str(measurement.backend.spec),
        "tcp_congestion_control": list(measurement.backend.tcp_cc),
        **dataclasses.asdict(summary),
        "algbw_gb_s": measurement.algbw_gb_s,
        "busbw_gb_s": measurement.busbw_gb_s,
        "wrong": measurement.wrong,
        "not_counted": measurement.not_counted,
        "packets": measurement.packets,
        "cpu_process_s_per_gb": measurement.cpu_s_per_gb(measurement.process_cpu_s),
        "cpu_machine_s_per_gb": measurement.cpu_s_per_gb(measurement.machine_cpu_s),
        "cpu_softirq_s_per_gb": measurement.cpu_s_per_gb(measurement.softirq_cpu_s),
        "link_share": measurement.busbw_gb_s / ideal_gb_s if ideal_gb_s and measurement.busbw_gb_s else None,
        "speedup": baseline.summary.time_us / summary.time_us,
        # each iteration, if events make their times matter
        **({"iterations_us": measurement.rounds, "began_s": measurement.began_s} if _has_events(spec) else {}),
    }


def format_row(spec: Spec, result: dict[str, Any]) -> str:
    """The table line of a `row`; "-" in columns that do not apply."""

    def number(key: str, digits: int, scale: float = 1.0) -> str:
        value = result[key]
        return "-" if value is None else f"{value * scale:.{digits}f}"

    cells = [
        str(result["size_bytes"]),
        str(result["count"]),
        result["dtype"],
        result["op"] or "none",
        number("time_us", 1),
        number("algbw_gb_s", 3),
        number("busbw_gb_s", 3),
        str(result["wrong"]),
        number("p50_us", 1),
        number("p99_us", 1),
        number("cpu_process_s_per_gb", 2),
        number("cpu_machine_s_per_gb", 2),
        number("link_share", 1, 100),
        number("speedup", 2),
    ]
    cells += [number("not_counted", 3, 100)] * spec.may_lose
    return _line(spec, cells, result["backend"])


def footer(results: Sequence[dict[str, Any]]) -> list[str]:
    """The check and the averages, as nccl-tests prints them."""
    wrong = sum(result["wrong"] for result in results)
    lines = [f"# Wrong elements    : {wrong} {'OK' if wrong == 0 else 'FAILED'}"]
    for backend in dict.fromkeys(result["backend"] for result in results):
        rates = [result["busbw_gb_s"] for result in results if result["backend"] == backend]
        lines.append(f"# Avg bus bandwidth : {sum(rates) / len(rates):.4f} {backend}")
    return lines


def document(spec: Spec, world: int, facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole run as JSON: the command, the machine, the conditions, the results."""
    link = scenario = None
    if spec.scenario is not None:
        first, hosts = spec.scenario.nics[0], spec.scenario.hosts
        link = {**dataclasses.asdict(first), "hosts": hosts, "payload_gb_s": spec.scenario.payload_gb_s}
        scenario = spec.scenario.table
    return {
        "schema": SCHEMA,
        "command": list(spec.command),
        "machine": facts,
        "ranks": world,
        "iters": spec.iters,
        "warmup": spec.warmup,
        "rounds": spec.rounds,
        "apart_ms": spec.apart_ms,
        "barrier": spec.barrier,
        "link": link,
        "scenario": scenario,
        "baseline": str(spec.backends[0]),
        "wrong": sum(result["wrong"] for result in results),
        "results": list(results),
    }


def add_network(path: Path, events: Sequence[tuple[float, str]], shortfall: str | None) -> None:
    """Adds the events of the network to the JSON of a run, with their times by the clock of `began_s`, and in how far
    the machine did not keep up with the network (`Meter.shortfall`).
    """
    content = json.loads(path.read_text())
    if events:
        content["events"] = [{"at_s": at_s, "event": event} for at_s, event in events]
    if shortfall is not None:
        content["shortfall"] = shortfall
    path.write_text(json.dumps(content, indent=2) + "\n")
