"""An arm gives the job its settings, by variables and by a file alike."""

from pathlib import Path

import pytest

from commlayer import config
from commlayer.config import Config, Ddp, Policy
from commlayer.tools.tune.arm import Arm, toml
from commlayer.tools.tune.space import Space

ARMS = Space.of(("lossy", "compressed", "stale"), 40 << 20, on_gloo=True, has_network=True, takes_hook=True).arms()


def test_the_default_changes_nothing() -> None:
    assert Arm().is_default
    assert (Arm().settings, Arm().environment, str(Arm())) == ({}, {}, "the job as it is")


def test_an_arm_has_only_the_settings_that_differ() -> None:
    arm = Arm(codec="int8", bucket_mb=3.5, ports=4, replaces_gloo=True)
    assert arm.settings == {
        "process": {"instead_of": "gloo", "ports": 4},
        "policy": {"codec": "int8"},
        "ddp": {"hook": True, "bucket_mb": 3.5},
    }
    assert arm.environment == {
        "COMMLAYER_INSTEAD_OF": "gloo",
        "COMMLAYER_PORTS": "4",
        "COMMLAYER_POLICY_CODEC": "int8",
        "COMMLAYER_DDP_HOOK": "1",
        "COMMLAYER_DDP_BUCKET_MB": "3.5",
    }
    assert str(arm) == "codec int8; buckets of 3.5 MiB; 4 sockets per NIC"


def test_the_overlap_brings_its_own_hook() -> None:
    assert Arm(codec="int8", overlap=True).settings["ddp"] == {"overlap": True}


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_variables_and_file_give_the_job_the_same_settings(arm: Arm, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(toml(arm.settings, {"codec": "a comment\nof two lines"}))
    expected = {
        "process": Config(instead_of="gloo" if arm.replaces_gloo else "", ports=arm.ports),
        "policy": Policy(codec=arm.codec, loss_bound=arm.loss_bound),
        "ddp": Ddp(
            hook=not arm.overlap and bool(arm.needs),
            overlap=arm.overlap,
            staleness=arm.staleness,
            bucket_mb=arm.bucket_mb,
        ),
    }
    assert config.of_job(arm.environment) == expected
    assert config.of_job({"COMMLAYER_CONFIG": str(path)}) == expected


def test_toml_keeps_other_values_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(toml({"process": {"ifname": ["eth0", 'a"b'], "shm": False, "stall_s": 2.5}}, {"shm": "why"}))
    assert "# why\nshm = false\n" in path.read_text()
    found = config.of_job({"COMMLAYER_CONFIG": str(path)})["process"]
    assert found == Config(ifname=("eth0", 'a"b'), shm=False, stall_s=2.5)
