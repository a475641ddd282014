"""Settings and policies."""

import dataclasses
import math
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlayer import config
from commlayer.config import PRIORITIES, Config, Ddp, Policy
from commlayer.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()
    assert Config.from_environment({"COMMLAYER_SHM": " ", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize("narrow", ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"])
def test_streams_wait_but_in_modes_that_have_hardly_run_on_a_gpu(narrow: str) -> None:
    assert Config().streams_wait({narrow: "8"})
    assert not Config().streams_wait({narrow: "1"})
    assert Config(stream_wait="1").streams_wait({narrow: "1"})
    assert not Config(stream_wait="0").streams_wait({})


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("IFNAME", "eth0, ib*,^ib3", ("eth0", "ib*", "^ib3")),
        ("WIRE", "OFI", "ofi"),
        ("PORTS", "4", 4),
        ("PORT_RANGE", "20000-20100", (20000, 20100)),
        ("SHM", "0", False),
        ("PEER_TIMEOUT_S", "2.5", 2.5),
        ("AUTH", "full", "full"),
        ("SECRET_FILE", "/etc/My Job/Secret", "/etc/My Job/Secret"),
        ("DSCP", "1", True),
        ("MTU", "9000", 9000),
        ("DISABLE", "1", True),
        ("DETERMINISTIC", "1", True),
    ],
)
def test_each_variable_sets_its_field(variable: str, text: str, value: object) -> None:
    found = Config.from_environment({f"COMMLAYER_{variable}": text})
    changes: dict[str, Any] = {variable.lower(): value}
    assert found == dataclasses.replace(Config(), **changes)


def test_disable_is_read_alone() -> None:
    assert Config.is_disabled({"COMMLAYER_DISABLE": " 1", "COMMLAYER_MTU": "nonsense"})
    assert not Config.is_disabled({"COMMLAYER_DISABLE": "0"})
    assert not Config.is_disabled({"COMMLAYER_DISABLE": ""})
    with pytest.raises(ConfigError, match="COMMLAYER_DISABLE=yes: use 0 or 1"):
        Config.is_disabled({"COMMLAYER_DISABLE": "yes"})


def test_a_provider_takes_two_variables() -> None:
    found = Config.from_environment({"COMMLAYER_WIRE": "ofi", "COMMLAYER_OFI_PROVIDER": "Verbs"})
    assert (found.wire, found.ofi_provider) == ("ofi", "verbs")


@pytest.mark.parametrize(
    ("variable", "text", "remedy"),
    [
        ("SHM", "yes", "use 0 or 1"),
        ("PORTS", "0", "1 to 8 (sockets)"),
        ("PORTS", "9", "1 to 8 (sockets)"),
        ("PORTS", "9" * 5000, "1 to 8 (sockets)"),
        ("WIRE", "rdma", "use one of udp, ofi"),
        ("OFI_PROVIDER", "verbs", "set COMMLAYER_WIRE=ofi"),
        ("AUTH", "none", "full, header, off"),
        ("PEER_TIMEOUT_S", "soon", "use a number, 0.1 to 86400 (seconds)"),
        ("PEER_TIMEOUT_S", "nan", "0.1 to 86400"),
        ("PEER_TIMEOUT_S", "0", "0.1 to 86400"),
        ("MTU", "100", "use a whole number, 0 (automatic), or 576 to 65535 (bytes)"),
        ("MTU", "1K", "use a whole number"),
        ("IFNAME", "eth0,,eth1", "comma list"),
        *(
            ("PORT_RANGE", text, "use a range of UDP ports between 1024 and 65535, as 20000-20100")
            for text in ("20000", "20100-20000", "80-2000", "60000-65536", "20000-", "a-b", "1-2-3", "9" * 5000)
        ),
        ("IFNAME", "^", "comma list"),
    ],
)
def test_a_bad_value_is_refused_with_variable_value_and_remedy(variable: str, text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({f"COMMLAYER_{variable}": text})
    assert str(caught.value).startswith(f"COMMLAYER_{variable}={text}: ")
    assert remedy in str(caught.value)


def test_several_sockets_are_refused_without_udp() -> None:
    with pytest.raises(ConfigError, match=r"^COMMLAYER_PORTS=2: libfabric has no ports; set COMMLAYER_WIRE=udp"):
        Config(wire="ofi", ports=2)
    with pytest.raises(ConfigError, match=r"^COMMLAYER_PORT_RANGE=2000-2001: libfabric chooses its ports; set COMMLA"):
        Config(wire="ofi", port_range=(2000, 2001))


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"COMMLAYER_IFNAMES=eth0: .*known: COMMLAYER_IFNAME, COMMLAYER_WIRE"):
        Config.from_environment({"COMMLAYER_IFNAMES": "eth0"})


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("ifname", "eth0", "use a comma list of names"),
        ("ifname", (1,), "use a comma list of names"),
        ("ifname", ("eth0", "^"), "use a comma list of names"),
        ("ifname", None, "use a comma list of names"),
        ("ofi_provider", None, "use a name"),
        ("secret_file", None, "use the path of a file"),
        ("ports", 1.5, "use a whole number"),
        ("port_range", "20000-20100", "use a range of UDP ports"),
        ("port_range", (20000.0, 20100), "use a range of UDP ports"),
        ("port_range", (20000,), "use a range of UDP ports"),
        ("ports", True, "use a whole number"),
        ("shm", "no", "use 0 or 1 (in Python: False or True)"),
        ("shm", 0, "use 0 or 1 (in Python: False or True)"),
        ("dscp", 2, "use 0 or 1 (in Python: False or True)"),
        ("peer_timeout_s", "x", "use a number"),
        ("peer_timeout_s", True, "use a number"),
        ("mtu", "9000", "use a whole number"),
        ("mtu", False, "use a whole number"),
        *((word, value, "use one of") for word in ("wire", "auth") for value in (None, 1, ["udp"])),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert str(caught.value).startswith(f"COMMLAYER_{field.upper()}={value}: {remedy}")


@pytest.mark.parametrize("kind", [Config, Policy, Ddp])
def test_every_field_has_its_type_checked(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        with pytest.raises(ConfigError, match=rf"(?i){field.name}=<object object at .*>\)?: use "):
            kind(**{field.name: object()})


def test_fields_of_a_config_become_plain_ones() -> None:
    given: dict[str, Any] = {"ifname": ["eth0"], "ports": np.int64(2), "mtu": np.int32(1500), "peer_timeout_s": 2}
    made = Config(**given)
    assert made == Config(ifname=("eth0",), ports=2, mtu=1500, peer_timeout_s=2.0)
    assert [type(getattr(made, name)) for name in given] == [tuple, int, int, float]


@pytest.mark.parametrize("ifname", [("eth",), ("^*",)])
def test_no_matching_interface_is_an_error_that_lists_the_interfaces(ifname: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="has eth0, eth1, ib0, docker0"):
        Config(ifname=ifname).choose_interfaces(["eth0", "eth1", "ib0", "docker0"])


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 8},
        {"priority": -1},
        {"priority": "high"},
        {"priority": True},
        {"yields": 1},
        {"yields": "no"},
        {"deterministic": "yes"},
        {"deterministic": 1},
        {"algorithm": "tree"},
        {"loss_bound": -0.1},
        {"loss_bound": 0.51},
        {"loss_bound": "1%"},
        {"loss_bound": False},
        {"loss_bound": 5e-324},
        {"loss_bound": 1e-7},
        {"loss_bound": 10**400},
        {"treatment": "forget"},
        {"codec": "int3"},
        {"residual": "f64"},
        {"exact_steps": -1},
        {"exact_steps": 0.5},
        {"loss_bound": math.nan},
        {"loss_bound": Decimal("sNaN")},
    ],
)
def test_a_bad_policy_is_refused(bad: dict[str, Any]) -> None:
    ((field, value),) = bad.items()
    with pytest.raises(ConfigError, match=re.escape(f"Policy({field}={value!r}): use")):
        Policy(**bad)


def test_a_policy_that_yields_has_a_class_after_the_last() -> None:
    assert Policy(priority=0, yields=True).service_class == PRIORITIES
    assert Policy(priority=7).service_class == 7


def test_the_variable_of_a_trial_is_no_setting_and_no_error() -> None:
    assert Config.from_environment({"COMMLAYER_TRIAL": "/trial"}) == Config()


def test_numbers_of_any_type_become_plain_ones() -> None:
    numbers: dict[str, Any] = {
        "priority": np.uint8(3),
        "loss_bound": Fraction(1, 4),
        "exact_steps": np.int64(7),
    }
    policy = Policy(**numbers)
    assert policy == Policy(priority=3, loss_bound=0.25, exact_steps=7)
    assert [type(value) for value in dataclasses.asdict(policy).values() if type(value) not in (str, type(None))] == [
        *(int, bool, float, int, bool, bool)
    ]
    decimal: Any = Decimal("0.01")
    assert Policy(loss_bound=decimal).loss_bound == 0.01


@pytest.mark.parametrize("other", [{"deterministic": True}, {"algorithm": "ring"}])
def test_a_bound_that_contradicts_the_rest_is_refused(other: dict[str, Any]) -> None:
    Policy(**other)
    with pytest.raises(ConfigError, match="loss_bound"):
        Policy(loss_bound=0.01, **other)


def job(text: str, tmp_path: Path, **environ: str) -> dict[str, Any]:
    """The settings of a job with this file and these variables."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    return config.of_job({"COMMLAYER_CONFIG": str(path), **environ})


def test_the_file_has_a_section_for_each_class(tmp_path: Path) -> None:
    text = """
        [process]
        ports = 2
        port_range = "20000-20100"
        [policy]
        codec = "int8"
        loss_bound = 0.01
        [ddp]
        overlap = true
        bucket_mb = 12.5
    """
    found = job(text, tmp_path, COMMLAYER_POLICY_CODEC="BF16", COMMLAYER_PORTS="3", COMMLAYER_DDP_STALENESS="1")
    assert found == {
        "process": Config(ports=3, port_range=(20000, 20100)),
        "policy": Policy(codec="bf16", loss_bound=0.01),
        "ddp": Ddp(overlap=True, staleness=1, bucket_mb=12.5),
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[proces]\nports = 2", r"\[proces\]: there is no such section; use \[process\], \[policy\], \[ddp\]"),
        ("[process]\nport = 2", r"\[process\] port: there is no such setting; did you mean ports\? known: ifname"),
        ("[process]\ntrial = '/tmp'", r"\[process\] trial: there is no such setting"),
        ("[process]\ncodec = 'int8'", r"\[process\] codec: there is no such setting; it belongs into \[policy\]"),
        ("[policy]\ncodec = 'int9'", r"\[policy\] codec = 'int9': use one of none, f16"),
        ("[policy]\nloss_bound = 0.1\ndeterministic = true", r"losses are random; .* sets deterministic, loss_bound"),
        ("[ddp]\nstaleness = 1", r"staleness=1 needs overlap: set both, or staleness=0"),
    ],
)
def test_faults_name_the_file_the_key_and_the_remedy(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"job.toml: .*{told}"):
        job(text, tmp_path)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("COMMLAYER_PROTS", "COMMLAYER_PORTS"),
        ("COMMLAYER_CODEC", "COMMLAYER_POLICY_CODEC"),
        ("COMMLAYER_LOSS_BOND", "COMMLAYER_POLICY_LOSS_BOUND"),
        ("COMMLAYER_DDP_BUCKET", "COMMLAYER_DDP_BUCKET_MB"),
    ],
)
def test_a_variable_that_does_not_exist_reminds_of_one_that_does(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{given}=1: there is no such setting; did you mean {meant}\? known: "):
        config.of_job({given: "1"})


def test_disable_may_be_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "off.toml"
    path.write_text("[process]\ndisable = true\n[policy]\ncodec = 'nonsense'\n")
    assert Config.is_disabled({"COMMLAYER_CONFIG": str(path)})
    assert not Config.is_disabled({"COMMLAYER_CONFIG": str(path), "COMMLAYER_DISABLE": "0"})


def test_groups_take_no_codec_and_no_losses_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("[policy]\npriority = 2\ncodec = 'int8'\nloss_bound = 0.1\ntreatment = 'zero'\nyields = true\n")
    monkeypatch.setenv("COMMLAYER_CONFIG", str(path))
    assert config.policy_of_groups(Config()) == Policy(priority=2, yields=True)
    deterministic = Policy(priority=2, deterministic=True, yields=True)
    assert config.policy_of_groups(Config(deterministic=True)) == deterministic
    assert config.policy_of_job() == Policy(priority=2, codec="int8", loss_bound=0.1, treatment="zero", yields=True)


def test_settings_of_models_are_shared_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.shared() == {}
    monkeypatch.setenv("COMMLAYER_POLICY_CODEC", "int8")
    monkeypatch.setenv("COMMLAYER_DDP_HOOK", "1")
    monkeypatch.setenv("COMMLAYER_PORTS", "2")
    assert config.shared() == {
        "[policy] (commlayer.toml or COMMLAYER_POLICY_*)": "codec='int8'",
        "[ddp] (commlayer.toml or COMMLAYER_DDP_*)": "hook=True",
    }
