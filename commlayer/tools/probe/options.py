"""The command line of `commlayer probe`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..bench.sizes import parse_size
from ..complaint import fail, note
from ..json_output import JsonOption


def probe(
    partners: Annotated[int, typer.Option(help="Hosts that each host is measured with, in larger jobs")] = 8,
    burst: Annotated[str, typer.Option(help="Most bytes of a burst; each path gets two in each direction")] = "8M",
    packets: Annotated[int, typer.Option(help="Packets by which losses are counted, per path and direction")] = 2000,
    ports: Annotated[int, typer.Option(help="Source ports by which parallel links are looked for; 1: none")] = 8,
    json_path: JsonOption = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="File for a heat map (matplotlib)")] = None,
    hosts: Annotated[str | None, typer.Option(help="Comma-separated hosts, on which ssh starts the ranks")] = None,
    ssh: Annotated[str, typer.Option(help="With --hosts: ssh and its options")] = "ssh -o BatchMode=yes",
    python: Annotated[str, typer.Option(help="With --hosts: Python there, with commlayer")] = sys.executable,
    port: Annotated[int, typer.Option(help="With --hosts: TCP port of the first host for the ranks' Store")] = 29500,
) -> None:
    """Measure the network between the hosts of a job, and say what is wrong with it and what helps.

    Start it as the job is started, on every host; one rank per host measures:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint hosta:29400 -m commlayer probe

    Or from one machine, by ssh: commlayer probe --hosts hosta,hostb,hostc

    Try it: commlayer emulate uneven3 -- commlayer probe --json probe.json

    Exit status of rank 0: 0 if nothing was found, 3 if something was, 2 on errors. Under torchrun, which takes every
    other status for a crash, findings are 0, too; the file of --json has them.
    """
    from . import command, heat, report
    from . import ssh as remote
    from .path import PORTS_MAX, Effort

    out = Console(highlight=False, markup=False)
    try:
        for name, number, least in (("--partners", partners, 1), ("--packets", packets, 20), ("--ports", ports, 1)):
            if number < least:
                raise ValueError(f"{name} {number}: use at least {least}")
        if ports > PORTS_MAX:
            raise ValueError(f"--ports {ports}: use at most {PORTS_MAX}")
        if png_path is not None:
            heat.check()
        effort = Effort(burst_bytes=parse_size(burst), train_packets=packets, flows=ports)
        spec = command.Spec(partners, effort, json_path, png_path, ("commlayer", *sys.argv[1:]))
        if hosts is None:
            status = command.run(spec, lambda found: report.show(found, out), functools.partial(note, "probe"))
        else:
            command.check_files(spec)
            names = [name.strip() for name in hosts.split(",")]
            found = remote.run(remote.Remote(names, ssh.split(), python, port), spec)
            status = command.write(found, spec, lambda found: report.show(found, out))
    except (ValueError, RuntimeError, OSError) as error:
        fail("probe", error)
    raise typer.Exit(0 if status == command.EXIT_FINDINGS and command.under_torchrun() else status)
