"""The `commlayer` command."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import json_output
from .bench.sizes import parse_size, sweep
from .bench.spec import BackendSpec, Spec, expand_tcp_cc
from .complaint import fail, note
from .emulate.command import OwnOptions
from .emulate.rate import parse_rate
from .headroom.options import headroom
from .job_key import SecretOption, job_key
from .json_output import JsonOption
from .probe.options import probe
from .settings import config
from .top.ctl import ctl
from .top.options import top
from .tune.options import tune

USAGE_ERROR: Any = typer.BadParameter.__base__
"""The base class of what Typer raises for a wrong command line: it exports no name of it."""


class Commands(TyperGroup):
    """Commands whose help fills its lines: of all paragraphs but the first, Typer keeps the ends of lines. An option
    that lacks its value says which one."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None and found.help:
            found.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in found.help.split("\n\n"))
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            for option in [] if command is None else command.params:
                if getattr(error, "option_name", None) in option.opts and option.metavar:
                    error.message = f"{error.message.rstrip('.')}: {option.metavar} ({option.help})"
            raise


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        names = " ".join(f"{name} {metadata.version(name)}," for name in ("commlayer", "torch"))
        print(f"{names} Python {platform.python_version()}, {platform.machine()}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and exit")
    ] = False,
) -> None:
    """commlayer: a communication layer for distributed training with PyTorch."""


app.command()(config)
app.command()(probe)
app.command()(top)
app.command()(tune)
app.command(cls=OwnOptions)(headroom)
app.command()(ctl)


@app.command()
def bench(
    collective: Annotated[
        str,
        typer.Argument(
            help="all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, gather, scatter, sendrecv, "
            "pingpong, window (of 8 sends), barrier, or gradients (an all-reduce as a DDP communication hook calls it)"
        ),
    ] = "all_reduce",
    backends: Annotated[
        str,
        typer.Option(help="Comma-separated names, each perhaps with settings, as above; ratios are over the first"),
    ] = "gloo,commlayer",
    ranks: Annotated[int | None, typer.Option(help="Processes to start (default 2, or one per host)")] = None,
    min_size: Annotated[str, typer.Option("--min", "-b", help="Smallest size of the whole array")] = "4K",
    max_size: Annotated[str, typer.Option("--max", "-e", help="Largest size of the whole array")] = "64M",
    factor: Annotated[float, typer.Option("--factor", "-f", help="Ratio of two sizes that follow each other")] = 2.0,
    step: Annotated[str, typer.Option("--step", help="Difference of two sizes in bytes, instead of a factor")] = "0",
    sizes: Annotated[
        str | None, typer.Option(help="Comma-separated sizes, instead of --min, --max and --factor")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="Element type, as torch names it")] = "float32",
    op: Annotated[str, typer.Option("--op", "-o", help="sum, product, min or max")] = "sum",
    iters: Annotated[int, typer.Option("--iters", "-n", help="Timed iterations per round")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", "-w", help="Untimed iterations per round")] = 2,
    rounds: Annotated[int, typer.Option(help="How often the backends take turns")] = 5,
    apart_ms: Annotated[float, typer.Option("--apart", help="Milliseconds that each rank sleeps before a call")] = 0,
    barrier: Annotated[bool, typer.Option("--barrier", help="A barrier, which is not timed, before each call")] = False,
    json_path: JsonOption = None,
    imports: Annotated[
        str | None, typer.Option("--import", help="Comma-separated modules that register further backends")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds after which a collective has failed")] = 300,
    netns: Annotated[int | None, typer.Option(help="Number of hosts to emulate as network namespaces (root)")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Link rate of each host in bit/s, such as 200M, 1G or 200mbit")
    ] = None,
    loss: Annotated[float | None, typer.Option(help="Share of packets that a link loses: 0.01 is 1 %")] = None,
    buffer_packets: Annotated[
        int | None, typer.Option(help="Packets that fit into the buffer of a switch port (default 256)")
    ] = None,
    nics: Annotated[int | None, typer.Option(help="NICs per host (default 1)")] = None,
    offloads: Annotated[bool, typer.Option("--offloads", help="Keep segmentation offloads on")] = False,
    tcp_cc: Annotated[
        str | None, typer.Option(help="Comma-separated TCP congestion controls; gloo runs once with each")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="Network to emulate, instead of --netns: a file, or a name as loss1")
    ] = None,
) -> None:
    """Measure collectives of several torch.distributed backends side by side, as nccl-tests does.

    The command starts the ranks, unless torchrun has.

    Example: commlayer bench all_gather --ranks 4 --sizes 64K,16M --json found.json

    With the collective gradients, backends take settings: gloo:cast=float16:chunks=4,
    commlayer:loss_bound=0.01:treatment=rescale, commlayer:priority=0:beside=64M. In an emulated network, gloo takes a
    congestion control of TCP: gloo/bbr.

    Exit status: 0; 1 if a result was wrong; 2 if the run failed.
    """
    from .emulate.link import Link
    from .emulate.scenario import Scenario

    try:
        if netns is not None and scenario is not None:
            raise ValueError("--netns and --scenario both describe the network: use one of them")
        shaping = {"rate": rate, "loss": loss, "buffer-packets": buffer_packets, "nics": nics}
        given = [f"--{name}" for name, value in shaping.items() if value is not None] + ["--offloads"] * offloads
        if given and netns is None:
            instead = "add --netns HOSTS" if scenario is None else f"write them into {scenario}"
            raise ValueError(f"{', '.join(given)}: these describe the network of --netns: {instead}")
        if tcp_cc is not None and netns is None and scenario is None:
            raise ValueError("--tcp-cc: it is set in network namespaces: add --netns HOSTS, or --scenario")
        if ranks is not None and ranks < 1:
            raise ValueError(f"--ranks {ranks}: use at least 1")
        network = None
        if scenario is not None:
            network = Scenario.read(scenario)
        elif netns is not None:
            nic = Link(None if rate is None else parse_rate(rate), loss or 0.0, offloads=offloads)
            if buffer_packets is not None:
                nic = dataclasses.replace(nic, buffer_packets=buffer_packets)
            network = Scenario(hosts=netns, nics=(nic,) * (1 if nics is None else nics))
        names = [BackendSpec.parse(name) for name in backends.split(",")]
        spec = Spec(
            backends=tuple(expand_tcp_cc(names, [] if tcp_cc is None else tcp_cc.split(","))),
            sizes=tuple(
                sweep(parse_size(min_size), parse_size(max_size), factor=factor, step_bytes=parse_size(step))
                if sizes is None
                else [parse_size(size) for size in sizes.split(",")]
            ),
            collective=collective,
            dtype=dtype,
            op=op,
            iters=iters,
            warmup=warmup,
            rounds=rounds,
            apart_ms=apart_ms,
            barrier=barrier,
            timeout_s=timeout_s,
            imports=() if imports is None else tuple(imports.split(",")),
            json_path=None if json_path is None else str(json_path),
            scenario=network,
            command=("commlayer", *sys.argv[1:]),
        )
        status = _start(spec, ranks)
    except (ValueError, RuntimeError) as error:
        fail("bench", error)
    raise typer.Exit(status)


def _start(spec: Spec, ranks: int | None) -> int:
    from .bench.launch import launch, under_torchrun

    if spec.json_path is not None and os.environ.get("RANK", "0") == "0":  # rank 0 writes
        json_output.check(Path(spec.json_path))
    if not under_torchrun():
        hosts = 0 if spec.scenario is None else spec.scenario.hosts * spec.scenario.ranks_per_host
        return launch(spec, ranks or hosts or 2)
    if ranks is not None or spec.scenario is not None:
        raise ValueError(
            "--ranks, --netns and --scenario start processes: leave them out, torchrun has started the processes"
        )
    from .bench import worker

    return worker.run(spec)


@app.command()
def check(
    size: Annotated[str, typer.Option(help="Size of the tensors")] = "16M",
    rounds: Annotated[int, typer.Option(min=1, help="All-reduces")] = 5,
) -> None:
    """Check a job: do all ranks reach each other, how fast, and which compute slowly? For torchrun.

    Example, on each host: torchrun --nnodes=2 --nproc-per-node=4 ... -m commlayer check

    Exit status: 0, also with slow ranks; 1 if a sum was wrong; 2 if the ranks do not reach each other.
    """
    from ..errors import CommError

    try:
        if "RANK" not in os.environ:
            raise ValueError("start it on every host by torchrun: torchrun --nnodes=2 ... -m commlayer check")
        nbytes = parse_size(size)
        if nbytes < 4:
            raise ValueError(f"--size {size}: use at least 4 bytes")
        from .check import check as check_hosts

        check_hosts(nbytes, rounds)
    except (ValueError, CommError) as error:
        fail("check", error)


@app.command()
def dissect(
    capture: Annotated[
        Path | None, typer.Argument(help="Capture file of tcpdump or Wireshark", exists=True, dir_okay=False)
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of the job, 32 hex digits, to verify the packets' tags")] = None,
    store: Annotated[
        str | None, typer.Option(help="MASTER_ADDR:MASTER_PORT of the running job: its Store has the key")
    ] = None,
    secret_file: SecretOption = None,
    limit: Annotated[int, typer.Option(help="Number of packets to print; 0: all")] = 0,
    json_path: JsonOption = None,
    lua: Annotated[Path | None, typer.Option(help="File for a dissector that Wireshark and tshark load")] = None,
) -> None:
    """Print the packets of a capture, in 80 columns of plain text. It needs scapy.

    The key lives in the job's Store: let --store fetch it while the job runs, with --limit 1 if need be. A job with
    COMMLAYER_SECRET_FILE mixes that file into it.

    Example: commlayer dissect job.pcap --store 10.0.0.1:29500 --limit 20

    In Wireshark: commlayer dissect --lua dlcp.lua && tshark -X lua_script:dlcp.lua -r job.pcap

    Exit status: 0; 2 if a file or the Store cannot be read.
    """
    try:
        from scapy.error import Scapy_Exception
        from scapy.utils import rdpcap

        from .dissect import captured
        from .listing import listing, objects
        from .wireshark import dissector
    except ImportError as error:
        fail("dissect", f"{error}; install scapy: pip install scapy")
    try:
        if lua is not None:
            try:
                lua.write_text(dissector(), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"--lua {lua}: {error}") from error
        if capture is None:
            if lua is None:
                raise ValueError("name a capture file of tcpdump or Wireshark, or --lua FILE for Wireshark's dissector")
            return
        json_output.check(json_path, is_new=True)
        if key is not None and store is not None:
            raise ValueError("--key and --store both give the key: use one of them")
        if store is not None:
            key = _fetch_key(store)
            print(f"commlayer dissect: --key {key}", file=sys.stderr)
        secret = None if key is None else job_key(key, secret_file)
        try:
            found = list(captured(rdpcap(str(capture))))
        except (OSError, Scapy_Exception) as error:
            raise ValueError(f"{capture}: {error}; name a capture file of tcpdump or Wireshark") from error
    except ValueError as error:
        fail("dissect", error)

    def show() -> None:
        none = [f"{capture}: it has no packet of commlayer"]
        for line in listing(found, secret, limit) if found else none:
            print(line)

    json_output.deliver([] if json_path is None else objects(found, secret, limit), json_path, show)


def _fetch_key(address: str) -> str:
    """The key of a running job, from its Store. Raises ValueError if it cannot be had."""
    from ..transport.bootstrap import stored_key

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--store {address!r}: use HOST:PORT, the job's MASTER_ADDR and MASTER_PORT")
    return stored_key(host.strip("[]"), int(port))


@app.command(cls=OwnOptions)
def emulate(
    scenario: Annotated[
        str | None, typer.Argument(help="TOML file of the network, or a name that --list shows: clean200, loss1, ...")
    ] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The command that each rank runs")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the emulated links and compare them with the file")
    ] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the namespaces of crashed emulations")] = False,
    list_shipped: Annotated[bool, typer.Option("--list", help="Show the scenarios that come with commlayer")] = False,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks per host, instead of the number in the file")
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", help="Seconds that the other ranks get after one has failed")
    ] = 10.0,
) -> None:
    """Run a command in an emulated network (root). Hosts are network namespaces; a TOML file describes the links.

    Every rank gets the environment that torchrun sets.

    Example: commlayer emulate loss1 -- python train.py

    Exit status: 0; that of the first rank that failed; 2 if the network could not be emulated; 1 if --check found a
    link unlike its description.
    """
    from .emulate import command as emulation
    from .emulate.scenario import Scenario, shipped

    say = functools.partial(note, "emulate")
    try:
        if list_shipped:
            print("\n".join(f"{name:<16}  {Scenario.read(name)}" for name in shipped()))
            return
        if clean:
            emulation.clean(say)
            if not command and not check:
                return
        if not 0 <= grace_s < math.inf:
            raise ValueError(f"--grace {grace_s:g}: use a number of seconds, 0 or more")
        if scenario is None or (not command and not check):
            raise ValueError("name a scenario and a command: commlayer emulate scenario.toml -- python train.py")
        network = Scenario.read(scenario)
        if ranks_per_host is not None:
            network = dataclasses.replace(network, ranks_per_host=ranks_per_host)
        status = emulation.emulate(network, command or [], check=check, grace_s=grace_s, note=say)
    except (ValueError, RuntimeError) as error:
        fail("emulate", error)
    raise typer.Exit(status)


@app.command()
def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Flight records, traces of torch.profiler, or folders of them", exists=True)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, help="The trace to write; with .gz: compressed")
    ] = Path("trace.json"),
    show: Annotated[bool, typer.Option("--open", help="Open the trace at ui.perfetto.dev in a browser")] = False,
    pickles: Annotated[
        bool, typer.Option("--pickles", help="Read pickles, too: only where nobody else can write the files")
    ] = False,
    for_analyzer: Annotated[
        Path | None,
        typer.Option("--analyzer", help="Folder to make, with the flight records as torch's torchfrtrace reads them"),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Merge the files of all ranks into one trace for Perfetto, with aligned clocks.

    Example: commlayer trace /shared/flight profiles/*.json.gz -o trace.json --open

    --json has how far each clock was moved, and how sure that is.

    Exit status: 0; 2 if a file cannot be read or written.
    """
    from .trace import command, serve

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        json_output.check(output, "--output")
        json_output.check(json_path, is_new=True)
        found = command.run(files, output, say, pickles=pickles, for_analyzer=for_analyzer)
        json_output.deliver(found, json_path, lambda: None)
        if show:
            serve.serve(output, say)
    except ValueError as error:
        fail("trace", error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
