"""The `commlayer` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from .bench.sizes import parse_rate, parse_size, sweep
from .bench.spec import BackendSpec, Spec, expand_tcp_cc

EXIT_FAILED = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """The communication layer of distributed training, on any network."""


@app.command()
def bench(
    collective: Annotated[
        str,
        typer.Argument(
            help="all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, gather, scatter, sendrecv or "
            "barrier"
        ),
    ] = "all_reduce",
    backends: Annotated[str, typer.Option(help="Comma-separated; the first is the baseline")] = "gloo,commlayer",
    ranks: Annotated[int | None, typer.Option(help="Processes to start (default 2, or one per host)")] = None,
    min_size: Annotated[str, typer.Option("--min", "-b", help="Smallest size of the whole array")] = "4K",
    max_size: Annotated[str, typer.Option("--max", "-e", help="Largest size of the whole array")] = "64M",
    factor: Annotated[float, typer.Option("--factor", "-f", help="Size growth")] = 2.0,
    step: Annotated[str, typer.Option("--step", help="Size growth in bytes, instead of a factor")] = "0",
    sizes: Annotated[str | None, typer.Option(help="Comma-separated sizes, instead of min, max and growth")] = None,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="Element type, as torch names it")] = "float32",
    op: Annotated[str, typer.Option("--op", "-o", help="sum, product, min or max")] = "sum",
    iters: Annotated[int, typer.Option("--iters", "-n", help="Timed iterations per round")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", "-w", help="Untimed iterations per round")] = 2,
    rounds: Annotated[int, typer.Option(help="How often the backends take turns")] = 5,
    json_path: Annotated[str | None, typer.Option("--json", "-J", help="Write the results here")] = None,
    imports: Annotated[
        str | None, typer.Option("--import", help="Comma-separated modules that register further backends")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds until a collective counts as failed")] = 300,
    netns: Annotated[int | None, typer.Option(help="Emulate this many hosts as network namespaces (root)")] = None,
    rate: Annotated[str | None, typer.Option(help="Link rate of each host, such as 200M (bit/s)")] = None,
    loss: Annotated[float, typer.Option(help="Probability of losing a packet: 0.01 is 1 %")] = 0.0,
    buffer_packets: Annotated[int, typer.Option(help="Switch buffer per port")] = 256,
    nics: Annotated[int, typer.Option(help="NICs per host")] = 1,
    offloads: Annotated[bool, typer.Option(help="Leave segmentation offloads on")] = False,
    tcp_cc: Annotated[
        str | None, typer.Option(help="Comma-separated: run gloo once with each TCP congestion control")
    ] = None,
) -> None:
    """Measure collectives of several torch.distributed backends side by side, in the way of nccl-tests.

    Starts the ranks itself, or measures among those of torchrun. Exits with 1 when a result was wrong, with 2 when
    the run could not be done.
    """
    from .bench.link import Link

    try:
        if netns is None and (rate is not None or loss or tcp_cc):
            raise ValueError("--rate, --loss and --tcp-cc shape an emulated network: add --netns HOSTS")
        link = None
        if netns is not None:
            link = Link(parse_rate(rate) if rate else None, loss, buffer_packets, offloads, nics)
        names = [BackendSpec.parse(name) for name in backends.split(",")]
        spec = Spec(
            backends=tuple(expand_tcp_cc(names, tcp_cc.split(",") if tcp_cc else [])),
            sizes=tuple(
                [parse_size(size) for size in sizes.split(",")]
                if sizes
                else sweep(parse_size(min_size), parse_size(max_size), factor=factor, step_bytes=parse_size(step))
            ),
            collective=collective,
            dtype=dtype,
            op=op,
            iters=iters,
            warmup=warmup,
            rounds=rounds,
            timeout_s=timeout_s,
            imports=tuple(imports.split(",")) if imports else (),
            json_path=json_path,
            link=link,
            hosts=netns,
            command=("commlayer", *sys.argv[1:]),
        )
        status = _start(spec, ranks)
    except (ValueError, RuntimeError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]commlayer bench:[/red] {error}")
        raise typer.Exit(EXIT_FAILED) from error
    raise typer.Exit(status)


def _start(spec: Spec, ranks: int | None) -> int:
    from .bench.launch import launch, under_torchrun

    if not under_torchrun():
        return launch(spec, ranks or spec.hosts or 2)
    if ranks is not None or spec.hosts is not None:
        raise ValueError("--ranks and --netns start processes: leave them out under torchrun, which has started them")
    from .bench import worker

    return worker.run(spec)
