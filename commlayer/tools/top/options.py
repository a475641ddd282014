"""The command line of `commlayer top`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from ..complaint import fail
from ..job_key import SecretOption, job_key
from ..json_output import JsonOption, check, stream
from .summary import summarize
from .table import lines

INTERRUPTED = 130

StoreOption = Annotated[
    str | None, typer.Option(help="MASTER_ADDR:MASTER_PORT of the running job: its Store has the key and the address")
]
AddressOption = Annotated[str | None, typer.Option(help="HOST:PORT of rank 0's samples, beside --key")]
KeyOption = Annotated[str | None, typer.Option(help="Key of the job, 32 hex digits, instead of --store")]


def connect(store: str | None, address: str | None, key: str | None, secret_file: Path | None) -> Any:
    """A connection to the samples of a job. Raises ValueError or ConfigError."""
    from .client import Client, Door

    if store is not None and key is not None:
        raise ValueError("--store and --key both give the key: use one of them")
    if store is not None:
        from ...telemetry.curve import split
        from ...transport.bootstrap import stored_top

        where = split(store)

        def find() -> Door:
            key, found = stored_top(*where)
            return address or found, job_key(key, secret_file)

        return Client(find(), find)
    if key is None or address is None:
        raise ValueError(
            "name the job: --store HOST:PORT (its MASTER_ADDR and MASTER_PORT), or --key and --address; a job that was "
            "started with COMMLAYER_TOP says the command on stderr of rank 0"
        )
    return Client((address, job_key(key, secret_file)))


def top(
    store: StoreOption = None,
    address: AddressOption = None,
    key: KeyOption = None,
    secret_file: SecretOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table, and end")] = False,
    json_path: JsonOption = None,
    paths: Annotated[bool, typer.Option("--paths", help="Interfaces and paths of each rank, too")] = False,
    rows: Annotated[
        int | None, typer.Option(min=0, help="Most lines of a table; 0: all (default: the terminal's)")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard scalars, too", file_okay=False)
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page with the table and curves, on this machine")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web: TCP port (default: any free one)")] = 0,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two tables")] = 1.0,
) -> None:
    """Watch a running job: rate, loss, queues and exposed communication of each rank, and the slowest peer.

    Start the job with COMMLAYER_TOP=PORT on every rank. It needs pyzmq, as this command does.

    Example: commlayer top --store 10.0.0.1:29500

    For scripts: commlayer top --store 10.0.0.1:29500 --json - prints an object per line, with all ranks.

    Exit status: 0; 2 if the job gives no samples.
    """
    from ...errors import CommError
    from .client import NoAnswerError
    from .scalars import Scalars
    from .web import serve

    try:
        check(json_path)
        _check(
            web,
            port,
            {
                "--once": once,
                "--json": json_path is not None,
                "--paths": paths,
                "--rows": rows is not None,
                "--tensorboard": tensorboard is not None,
            },
        )
        scalars = None if tensorboard is None else Scalars(tensorboard)
        client = connect(store, address, key, secret_file)
        found = first(client)
        if web:
            serve(client, port, interval_s, lambda text: print(f"commlayer top: {text}", file=sys.stderr))
        with stream(json_path) as json_file:
            while True:
                show(found, json_file, once=once, rows=rows, paths=paths)
                if scalars is not None:
                    scalars.write(found)
                if once:
                    return
                time.sleep(interval_s)
                found = summarize(client.view())
                if found["job"]["live"] == 0 and client.follow():
                    found = first(client)
                if found["job"]["live"] == 0:
                    print("commlayer top: the job has ended", file=sys.stderr)
                    return
    except (ValueError, CommError, NoAnswerError) as error:
        fail("top", error)
    except BrokenPipeError:
        sys.stdout = None  # its reader has gone, and Python would complain at the end
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _check(web: bool, port: int, others: Mapping[str, bool]) -> None:
    """Raises ValueError for options that would have no effect."""
    given = [name for name, is_given in others.items() if is_given]
    if web and given:
        raise ValueError(f"--web shows a page, and {', '.join(given)} has no effect there: leave one of them out")
    if port and not web:
        raise ValueError(f"--port {port} is the port of a page: add --web")


def first(client: Any, patience_s: float = 5.0) -> dict[str, Any]:
    """The first view that has a sample: ranks send the first a second after their start."""
    end_s = time.monotonic() + patience_s
    while True:
        found = summarize(client.view())
        if found["job"]["live"] or time.monotonic() > end_s:
            return found
        time.sleep(0.1)


def show(found: dict[str, Any], json_file: IO[str] | None, *, once: bool, rows: int | None, paths: bool) -> None:
    """Writes a view: a line of JSON, if there is a file for it; and a table, unless the file is stdout. A terminal gets
    it over the table before."""
    if json_file is not None:
        print(json.dumps(found), file=json_file, flush=True)
        if json_file is sys.stdout:
            return
    is_live = sys.stdout.isatty() and not once and os.environ.get("TERM", "dumb") != "dumb"
    limit = (shutil.get_terminal_size().lines - 1 if is_live else 0) if rows is None else rows
    text = "\n".join(lines(found, limit=limit, paths=paths))
    print(f"\x1b[H\x1b[2J{text}" if is_live else f"{text}\n", flush=True)
