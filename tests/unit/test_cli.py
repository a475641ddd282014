from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from commlayer.tools import cli, json_output
from commlayer.tools.bench import launch
from commlayer.tools.bench.spec import Spec
from commlayer.tools.complaint import EXIT_FAILED
from commlayer.tools.emulate import namespace, tcp
from commlayer.tools.emulate.check import Figure
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario
from tests.unit.test_json_output import commands

RUNNER = CliRunner()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, int]]:
    """The command that would have been started."""
    calls: list[tuple[Spec, int]] = []

    def record(spec: Spec, ranks: int) -> int:
        calls.append((spec, ranks))
        return 0

    monkeypatch.setattr(launch, "launch", record)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def bench(*arguments: str) -> Any:
    return RUNNER.invoke(cli.app, ["bench", *arguments])


def test_version_names_the_packages_and_python() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    torch = metadata.version("torch")
    assert result.output.startswith(f"commlayer {metadata.version('commlayer')}, torch {torch}, Python 3.")
    assert result.exit_code == 0


def test_every_command_says_what_it_does() -> None:
    group: Any = get_command(cli.app)
    assert "bench" in group.commands
    assert [name for name, command in group.commands.items() if not command.get_short_help_str()] == []


@pytest.mark.parametrize(("name", "command"), commands().items())
def test_help_has_every_word_of_its_text(name: str, command: Any) -> None:
    """Words in square brackets vanish where Rich takes them for markup."""
    shown = RUNNER.invoke(cli.app, [*name.split(), "--help"]).output.split()
    assert [word for word in (command.help or "").split() if word not in shown] == []


@pytest.mark.parametrize("command", ["", *commands()])
def test_every_command_has_both_flags_of_help(command: str) -> None:
    short, long = (RUNNER.invoke(cli.app, [*command.split(), flag]) for flag in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert re.search(r"--help +-h|-h, --help", short.output)


def test_check_outside_torchrun_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = RUNNER.invoke(cli.app, ["check"])
    assert result.exit_code == EXIT_FAILED
    assert "torchrun --nnodes=2 ... -m commlayer check" in result.output


def complete(*words: str) -> list[str]:
    """What the Tab key offers in bash behind these words."""
    environ = {
        "_COMMLAYER_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["commlayer", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return str(RUNNER.invoke(cli.app, [], env=environ, prog_name="commlayer").output).split()


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("em") == ["emulate"]
    assert complete("emulate", "--che") == ["--check"]
    assert complete("bench", "--tcp") == ["--tcp-cc"]


def test_arguments_become_the_spec(started: list[tuple[Spec, int]], tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    words = "all_gather --backends gloo,commlayer --ranks 3 --min 1K --max 4K --dtype int32 --iters 7 --warmup 3"
    assert bench(*words.split(), "--apart", "2", "--barrier", "--json", out).exit_code == 0
    spec, ranks = started[0]
    assert ranks == 3
    assert [str(backend) for backend in spec.backends] == ["gloo", "commlayer"]
    assert (spec.collective, spec.sizes, spec.dtype) == ("all_gather", (1024, 2048, 4096), "int32")
    assert (spec.iters, spec.warmup, spec.json_path, spec.scenario) == (7, 3, out, None)
    assert (spec.apart_ms, spec.barrier) == (2, True)


def test_network_arguments_become_the_link(started: list[tuple[Spec, int]]) -> None:
    words = "--netns 4 --rate 200M --loss 0.01 --buffer-packets 64 --nics 2 --backends gloo --tcp-cc cubic,bbr"
    assert bench(*words.split()).exit_code == 0
    spec, ranks = started[0]
    assert spec.scenario == Scenario(hosts=4, nics=(Link(rate_bps=200e6, loss=0.01, buffer_packets=64),) * 2)
    assert ranks == 4
    assert [str(backend) for backend in spec.backends] == ["gloo/cubic", "gloo/bbr"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--loss 0.1", "--netns"),
        ("--rate 1G", "--netns"),
        ("--loss 0", "--netns"),
        ("--offloads", "--offloads: these describe the network of --netns: add --netns"),
        ("--nics 4 --buffer-packets 5", "--buffer-packets, --nics: these describe the network"),
        (
            "--scenario some.toml --nics 4 --offloads",
            "--nics, --offloads: these describe the network of --netns: write",
        ),
        ("--tcp-cc bbr", "--tcp-cc: it is set in network namespaces"),
        ("--ranks 0", "--ranks 0: use at least 1"),
        ("--netns 2 --ranks -1", "--ranks -1: use at least 1"),
        ("--netns 2 --nics 0", "nic = 0: describe 1 to"),
        ("--netns 2 --buffer-packets 0", "buffer_packets = 0: use 1 to"),
        ("--netns 2 --rate 1", "rate_bps = 1.0: use 8000 to"),
        ("--netns 2 --backends gloo --tcp-cc reno,", "'': expected a congestion control"),
        ("--timeout -1", "timeout -1.0: expected more than 0"),
        ("--timeout inf", "timeout inf: expected more than 0"),
        ("--timeout nan", "timeout nan: expected more than 0"),
        ("--factor inf", "factor inf"),
        ("--backends commlayer:loss_bound=0.01:loss_bound=0.02", "loss_bound is there already"),
        ("--backends gloo/bbr", "--netns"),
        ("--min 4Q", "4Q"),
        ("--sizes=", "size '': expected a number of bytes"),
        ("--sizes 4K,", "size '': expected a number of bytes"),
        ("--tcp-cc= --netns 2 --backends gloo", "'': expected a congestion control"),
        ("--json /nonexistent/x.json", "--json '/nonexistent/x.json': there is no folder /nonexistent; name a file"),
        ("--json /", "--json '/': that is a folder"),
        ("--json [/x]/y.json", "--json '[/x]/y.json': there is no folder [/x]"),
        ("--json=", "--json '.': that is a folder"),
        ("--min 2K --max 1K", "min <= max"),
        ("--dtype float7", "float7"),
        ("--netns 2 --rate fast", "fast"),
        ("--netns 2 --loss 2", "loss = 2"),
        ("--netns 2 --scenario some.toml", "--scenario"),
        ("--scenario nowhere.toml", "nowhere.toml"),
    ],
)
def test_bad_arguments_are_named_and_nothing_starts(
    started: list[tuple[Spec, int]], arguments: str, message: str
) -> None:
    result = bench(*arguments.split())
    assert result.exit_code == 2
    assert message in result.output
    assert not started


def test_results_go_only_where_they_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    json_output.check(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.access", lambda *_: False)  # to root nothing is forbidden
    with pytest.raises(ValueError, match="no permission to write there"):
        json_output.check(tmp_path / "new.json")


def test_a_scenario_file_is_the_network(started: list[tuple[Spec, int]], tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("hosts = 3\nranks_per_host = 2\n[[nic]]\nrate_bps = 1e8\n")
    assert bench("--scenario", str(path), "--backends", "gloo", "--tcp-cc", "cubic").exit_code == 0
    spec, ranks = started[0]
    assert (spec.scenario, ranks) == (Scenario.read(path), 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a scenario"),
        (["--rate", "200M", "s.toml", "--", "true"], "No such option: --rate"),
        (["s.toml", "python", "train.py"], "'python train.py': put -- before the command"),
        (["s.toml", "python", "--", "train.py"], "'python': put -- before the command"),
        (["s.toml", "train.py", "--lr", "3"], "No such option: --lr"),
        (["loss2", "--", "true"], "scenario 'loss2': no such file here; shipped scenarios: "),
        (["s.toml"], "and a command"),
        (["nowhere.toml", "--", "true"], "nowhere.toml: No such file"),
        (["s.toml", "--", "true"], "s.toml: hosts = 0: use 1 to"),
        (["--clean"], "root"),
        (["good.toml", "--check"], "root"),
        (["good.toml", "--clean"], "root"),
        (["good.toml", "--grace", "-1", "--", "true"], "--grace -1: use a number of seconds, 0 or more"),
        (["good.toml", "--grace", "nan", "--", "true"], "--grace nan: use"),
    ],
)
def test_emulate_names_the_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(namespace, "missing", lambda: "network namespaces need root")
    Path("s.toml").write_text("hosts = 0")
    Path("good.toml").write_text("hosts = 2")
    result = RUNNER.invoke(cli.app, ["emulate", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_words_behind_the_dashes_are_the_command_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def record(scenario: Scenario, command: list[str], **options: Any) -> int:
        started.append((scenario, command, options["grace_s"]))
        return 3

    monkeypatch.setattr("commlayer.tools.emulate.command.emulate", record)
    words = ["loss1", "--grace", "4", "--", "train", "--grace", "5", "--help", "--", "-x"]
    assert RUNNER.invoke(cli.app, ["emulate", *words]).exit_code == 3
    assert started == [(Scenario.read("loss1"), words[4:], 4.0)]


def test_shipped_scenarios_are_listed() -> None:
    result = RUNNER.invoke(cli.app, ["emulate", "--list"])
    assert result.exit_code == 0
    assert re.search(r"^loss1 +4 hosts; NIC 0: 200 Mbit/s, loss 1.00%", result.output, re.MULTILINE)


def test_clean_needs_no_scenario_and_bears_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespace, "missing", lambda: None)
    monkeypatch.setattr(namespace, "remove_stale", lambda: ["cl1-1-0h0"])
    monkeypatch.setattr(tcp, "put_back", lambda: None)
    for arguments in ([], [str(tmp_path / "s.toml")]):
        result = RUNNER.invoke(cli.app, ["emulate", *arguments, "--clean"])
        assert (result.exit_code, result.output) == (0, "commlayer emulate: removed cl1-1-0h0\n")


def test_a_command_that_a_check_keeps_from_running_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Built:
        delayed_by = None

        def __init__(self, scenario: Scenario) -> None: ...

        def __enter__(self) -> Built:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("commlayer.tools.emulate.command.Network", Built)
    monkeypatch.setattr("commlayer.tools.emulate.command.measure", lambda _: [Figure("loss", "1%", "3%", good=False)])
    path = tmp_path / "s.toml"
    path.write_text("hosts = 2")
    result = RUNNER.invoke(cli.app, ["emulate", str(path), "--check", "--", "python", "train.py"])
    assert result.exit_code == 1
    assert "BAD  loss: declared 1%, measured 3%" in result.output
    assert "so the command was not run" in result.output


def test_failure_to_start_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Spec, ranks: int) -> int:
        raise RuntimeError(f"no room for {ranks} ranks")

    monkeypatch.setattr(launch, "launch", fail)
    result = bench("--ranks", "9")
    assert result.exit_code == 2
    assert "no room for 9 ranks" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", ["--ranks 2", "--netns 2"])
def test_torchrun_and_starting_ranks_exclude_each_other(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = bench(*arguments.split())
    assert result.exit_code == 2
    assert "torchrun" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--partners 0", "--partners 0: use at least 1"),
        ("--packets 3", "--packets 3: use at least 20"),
        ("--burst 5x", "5x"),
        ("", "torchrun --nnodes 2"),
    ],
)
def test_probe_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    result = RUNNER.invoke(cli.app, ["probe", *words.split()])
    assert result.exit_code == EXIT_FAILED
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name the job"),
        ("--steps 0 -- true", "--steps 0: use at least 1"),
        ("--timeout 0 -- true", "--timeout 0: use a number of seconds above 0"),
        ("--least 5 -- true", "--least 5: use a share from 0 to 1"),
        ("-- no-such-command", "is it installed on this host"),
        ("-- true", "no optimizer made a step after"),
    ],
)
def test_headroom_says_what_it_needs(words: str, said: str) -> None:
    result = RUNNER.invoke(cli.app, ["headroom", *words.split()])
    assert result.exit_code == EXIT_FAILED
    assert said in result.output
