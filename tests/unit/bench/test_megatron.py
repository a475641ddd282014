"""The table of losses of the Megatron example."""

import pytest

from bench import megatron
from bench.megatron import Run


def test_losses_are_found_in_the_output_of_torchrun_and_of_emulate() -> None:
    assert megatron.LOSS.findall("loss 4.5\nnote: a loss of 3\n[rank 3] loss 0.25\n") == ["4.5", "0.25"]


def test_commands() -> None:
    run = Run("TP2 x DP2", "commlayer", "classes")
    assert run.command(None)[-9:] == [
        *("examples.megatron.job", "--tp", "2", "--backend", "commlayer", "--segments", "classes", "--clip", "1.0"),
    ]
    emulated = run.command("loss.toml")
    assert emulated[1] == "-c"  # the package has no __main__
    assert emulated[3:6] == ["emulate", "loss.toml", "--"]
    assert emulated[-9:] == run.command(None)[-9:]


def test_without_megatron_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.megatron"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: {"megatron": None}[name])
    with pytest.raises(SystemExit, match="megatron-core is missing: pip install -r requirements/megatron"):
        megatron.main()


def test_each_run_is_compared_with_the_one_on_gloo_before_it() -> None:
    first = [(Run("TP2 x DP2", "gloo"), [4.0, 3.0]), (Run("TP2 x DP2", "commlayer"), [4.0, 2.75])]
    second = [(Run("TP2 x DP2", "gloo", clip=0.0), [1.0, 1.0]), (Run("TP2 x DP2", "commlayer", clip=0.0), [1.0, 1.0])]
    assert megatron.differences([*first, *second]) == [0.0, 0.25, 0.0, 0.0]
    rows = megatron.table([*first, *second]).splitlines()
    assert rows[2] == "| TP2 x DP2 | gloo | none | 1 | 4.000000 | 3.000000 | - |"
    assert rows[3] == "| TP2 x DP2 | commlayer | none | 1 | 4.000000 | 2.750000 | 0.2 |"
    assert rows[5] == "| TP2 x DP2 | commlayer | none | 0 | 1.000000 | 1.000000 | 0 |"


@pytest.mark.parametrize(
    ("clip", "loss", "equal"), [(0.0, 3.0, True), (0.0, 3.000001, False), (1.0, 3.000001, True), (1.0, 3.1, False)]
)
def test_only_clipping_may_round(clip: float, loss: float, equal: bool) -> None:
    run = Run("TP2 x DP2", "gloo", clip=clip)
    assert megatron.are_equal([(run, [3.0]), (Run("TP2 x DP2", "commlayer", clip=clip), [loss])]) == equal


def test_a_run_without_all_losses_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        megatron.differences([(Run("TP2 x DP2", "gloo"), [4.0, 3.0]), (Run("TP2 x DP2", "commlayer"), [4.0])])


def test_a_run_without_losses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "command", lambda *_: ["echo", "no network"])
    with pytest.raises(RuntimeError, match="no network"):
        Run("TP2 x DP2", "gloo").losses(None)


def test_tokens_by_host_are_compared_with_megatrons_own_exchange() -> None:
    own, by_host = (Run(megatron.EXPERTS, "commlayer", by_host=by_host) for by_host in (False, True))
    assert by_host.command(None)[-9:] == [*own.command(None)[-8:], "--by_host"]
    found = megatron.differences([(Run("TP2 x DP2", "gloo"), [9.0]), (own, [4.0]), (by_host, [4.5])])
    assert found == [0.0, 0.0, 0.5]
    assert "| commlayer, by host |" in megatron.table([(own, [4.0]), (by_host, [4.0])])


def test_every_layout_runs_in_every_form_after_its_reference() -> None:
    runs = megatron.runs()
    assert [run.layout for run in runs if run.segments == "deferred"] == list(megatron.LAYOUTS)
    for run, before in zip(runs[1:], runs, strict=False):
        if not run.is_reference:
            assert (before.layout, before.clip) == (run.layout, run.clip)
