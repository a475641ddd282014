"""Settings and policies."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from commlayer.config import Config, Policy
from commlayer.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()
    assert Config.from_environment({"COMMLAYER_SHM": " ", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("IFNAME", "eth0, ib*,^ib3", ("eth0", "ib*", "^ib3")),
        ("PORTS", "4", 4),
        ("SHM", "0", False),
        ("WIRE", "ofi", "ofi"),
        ("ALGORITHM", "Ring", "ring"),
        ("SEGMENT_BYTES", "64K", 64 << 10),
        ("SEGMENT_BYTES", "1048576", 1 << 20),
        ("CONGESTION", "delay", "delay"),
        ("PEER_TIMEOUT_S", "2.5", 2.5),
        ("AUTH", "full", "full"),
        ("MTU", "9000", 9000),
        ("LOG", "debug", "debug"),
    ],
)
def test_each_variable_sets_its_field(variable: str, text: str, value: object) -> None:
    config = Config.from_environment({f"COMMLAYER_{variable}": text})
    changes: dict[str, Any] = {variable.lower(): value}
    assert config == dataclasses.replace(Config(), **changes)


def test_a_fixed_rate_takes_two_variables() -> None:
    config = Config.from_environment({"COMMLAYER_CONGESTION": "fixed", "COMMLAYER_RATE_BPS": "200M"})
    assert (config.congestion, config.rate_bps) == ("fixed", 200_000_000)
    with pytest.raises(ConfigError, match="COMMLAYER_RATE_BPS=0"):
        Config.from_environment({"COMMLAYER_CONGESTION": "fixed"})
    for rate in ("999", "1001G", "99999999999999G", "9" * 5000):
        with pytest.raises(ConfigError, match=r"^COMMLAYER_RATE_BPS=\d+G?: .*(use 1K to 1000G|of up to 18 digits)"):
            Config.from_environment({"COMMLAYER_CONGESTION": "fixed", "COMMLAYER_RATE_BPS": rate})
    with pytest.raises(ConfigError, match="COMMLAYER_RATE_BPS=5: only the fixed"):
        Config.from_environment({"COMMLAYER_RATE_BPS": "5"})


@pytest.mark.parametrize(
    ("variable", "text", "remedy"),
    [
        ("SHM", "yes", "use 0 or 1"),
        ("PORTS", "0", "1 to 8"),
        ("PORTS", "9", "1 to 8"),
        ("WIRE", "rdma", "udp, ofi"),
        ("OFI_PROVIDER", "verbs", "set COMMLAYER_WIRE=ofi"),
        ("ALGORITHM", "tree", "auto, direct, ring"),
        ("SEGMENT_BYTES", "-1", "use a whole number"),
        ("SEGMENT_BYTES", "64Q", "use a whole number"),
        ("SEGMENT_BYTES", "K", "use a whole number"),
        ("SEGMENT_BYTES", "100", "from 4K to 1G"),
        ("SEGMENT_BYTES", "4100", "multiple of 64"),
        ("CONGESTION", "cubic", "delay, fixed"),
        ("AUTH", "none", "header, full, off"),
        ("PEER_TIMEOUT_S", "soon", "number of seconds"),
        ("PEER_TIMEOUT_S", "nan", "0.1 to 86400"),
        ("PEER_TIMEOUT_S", "0", "0.1 to 86400"),
        ("MTU", "100", "576 to 65535"),
        ("MTU", "1K", "use a whole number"),
        ("LOG", "all", "debug, info, warning, error"),
        ("IFNAME", "eth0,,eth1", "comma list"),
        ("IFNAME", "^", "comma list"),
    ],
)
def test_a_bad_value_is_refused_with_variable_value_and_remedy(variable: str, text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        Config.from_environment({f"COMMLAYER_{variable}": text})
    assert str(caught.value).startswith(f"COMMLAYER_{variable}=")
    assert variable in ("SEGMENT_BYTES", "PEER_TIMEOUT_S", "MTU", "RATE_BPS") or text.lower() in str(caught.value)


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"COMMLAYER_IFNAMES=eth0: .*known: COMMLAYER_IFNAME, COMMLAYER_WIRE"):
        Config.from_environment({"COMMLAYER_IFNAMES": "eth0"})


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("ifname", "eth0", "a tuple of names"),
        ("ifname", (1,), "a tuple of names"),
        ("ifname", ("eth0", "^"), "a tuple of names"),
        ("ifname", None, "a tuple of names"),
        ("ofi_provider", None, "a name"),
        ("ports", 1.5, "a whole number of sockets"),
        ("ports", True, "a whole number of sockets"),
        ("shm", "no", "True or False"),
        ("shm", 0, "True or False"),
        ("mark", 2, "True or False"),
        ("segment_bytes", "64K", "a whole number of bytes"),
        ("rate_bps", 1e9, "a whole number of bits per second"),
        ("peer_timeout_s", "x", "a number of seconds"),
        ("peer_timeout_s", True, "a number of seconds"),
        ("mtu", "9000", "a whole number of bytes"),
        ("mtu", False, "a whole number of bytes"),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert str(caught.value).startswith(f"Config({field}={value!r}): use {remedy}")


@pytest.mark.parametrize("field", ["wire", "algorithm", "congestion", "auth", "log"])
def test_a_word_that_is_none_is_refused(field: str) -> None:
    for value in (None, 1, ["udp"]):
        with pytest.raises(ConfigError, match=f"COMMLAYER_{field.upper()}=.*: use one of"):
            Config(**{field: value})  # type: ignore[arg-type]


def test_every_field_of_a_config_has_its_type_checked() -> None:
    words = {"wire", "algorithm", "congestion", "auth", "log"}
    for name in {field.name for field in dataclasses.fields(Config)} - words:
        with pytest.raises(ConfigError, match=rf"Config\({name}=<object"):
            Config(**{name: object()})  # type: ignore[arg-type]


def test_fields_of_a_config_become_plain_ones() -> None:
    given: dict[str, Any] = {"ifname": ["eth0"], "ports": np.int64(2), "mtu": np.int32(1500), "peer_timeout_s": 2}
    config = Config(**given)
    assert config == Config(ifname=("eth0",), ports=2, mtu=1500, peer_timeout_s=2.0)
    assert [type(getattr(config, name)) for name in given] == [tuple, int, int, float]


EXISTING = ["eth0", "eth1", "ib0", "docker0"]


@pytest.mark.parametrize(
    ("ifname", "chosen"),
    [
        ((), EXISTING),
        (("eth1",), ["eth1"]),
        (("ib0", "eth0"), ["eth0", "ib0"]),
        (("eth*",), ["eth0", "eth1"]),
        (("^docker0",), ["eth0", "eth1", "ib0"]),
        (("eth*", "^eth0"), ["eth1"]),
    ],
)
def test_interfaces_are_chosen_by_name(ifname: tuple[str, ...], chosen: list[str]) -> None:
    assert Config(ifname=ifname).choose_interfaces(EXISTING) == chosen


@pytest.mark.parametrize("ifname", [("eth",), ("^*",)])
def test_no_matching_interface_is_an_error_that_lists_what_exists(ifname: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="has eth0, eth1, ib0, docker0"):
        Config(ifname=ifname).choose_interfaces(EXISTING)


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 8},
        {"priority": -1},
        {"priority": "high"},
        {"priority": True},
        {"deterministic": "yes"},
        {"deterministic": 1},
        {"algorithm": "tree"},
    ],
)
def test_a_bad_policy_is_refused(bad: dict[str, Any]) -> None:
    ((field, value),) = bad.items()
    with pytest.raises(ConfigError, match=rf"Policy\({field}={value!r}\): use"):
        Policy(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"loss_bound": -0.1},
        {"loss_bound": 0.51},
        {"loss_bound": "1%"},
        {"loss_bound": False},
        {"loss_bound": 5e-324},
        {"loss_bound": 1e-7},
        {"loss_bound": 10**400},
        {"treatment": "forget"},
        {"protect_share": 1.0},
        {"protect_share": -0.1},
        {"deadline_s": 0.0},
        {"deadline_s": "soon"},
        {"deadline_s": True},
        {"deadline_s": math.nan},
        {"deadline_s": 10**9},
        {"deadline_s": 10**400},
        {"deadline_s": 86401},
    ],
)
def test_a_bad_bound_is_refused(bad: dict[str, Any]) -> None:
    ((field, value),) = bad.items()
    with pytest.raises(ConfigError, match=rf"Policy\({field}={value!r}\): use"):
        Policy(**bad)


def test_numbers_of_any_type_become_plain_ones() -> None:
    numbers: dict[str, Any] = {
        "priority": np.uint8(3),
        "loss_bound": np.float32(0.25),
        "protect_share": Fraction(1, 4),
        "deadline_s": 2,
    }
    policy = Policy(**numbers)
    assert policy == Policy(priority=3, loss_bound=0.25, protect_share=0.25, deadline_s=2.0)
    assert [type(value) for value in dataclasses.asdict(policy).values() if type(value) not in (str, type(None))] == [
        *(int, bool, float, float, float)
    ]
    assert Policy(loss_bound=1e-6, deadline_s=math.inf).deadline_s == math.inf


def test_a_bound_of_a_strange_type_is_not_refused_for_its_range() -> None:
    strange: Any = Decimal("0.01")
    with pytest.raises(ConfigError, match=r"use a number, not a Decimal: 0 \(nothing is lost\) to 0.5"):
        Policy(loss_bound=strange)


@pytest.mark.parametrize("other", [{"deterministic": True}, {"algorithm": "ring"}])
def test_a_bound_that_contradicts_the_rest_is_refused(other: dict[str, Any]) -> None:
    Policy(**other)
    with pytest.raises(ConfigError, match="loss_bound"):
        Policy(loss_bound=0.01, **other)
