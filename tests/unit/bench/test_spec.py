from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.bench.papers import PapersPolicy
from commlayer.tools.bench.spec import BackendSpec, Spec, expand_tcp_cc
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

GLOO = BackendSpec("gloo")


def make(**fields: Any) -> Spec:
    return Spec(**{"backends": (GLOO,), "sizes": (4096,), **fields})


def test_backend_with_and_without_a_congestion_control() -> None:
    assert BackendSpec.parse("gloo") == GLOO
    assert BackendSpec.parse("gloo/cubic") == BackendSpec("gloo", "cubic")
    assert str(BackendSpec.parse("gloo/cubic")) == "gloo/cubic"


@pytest.mark.parametrize("text", ["", "/cubic", "gloo/"])
def test_backend_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="backend"):
        BackendSpec.parse(text)


def test_congestion_controls_multiply_gloo_only() -> None:
    backends = [BackendSpec.parse(text) for text in ("commlayer", "gloo", "gloo/reno")]
    expanded = [str(backend) for backend in expand_tcp_cc(backends, ["cubic", "bbr"])]
    assert expanded == ["commlayer", "gloo/cubic", "gloo/bbr", "gloo/reno"]
    assert expand_tcp_cc(backends, []) == backends


SETTINGS = "commlayer:cast=float16:chunks=4:beside=64M:priority=0:loss_bound=0.01:treatment=zero:partial_results=True"


@pytest.mark.parametrize("text", ["gloo/bbr:cast=bfloat16:chunks=4", SETTINGS, "commlayer:priority=2:loss_bound=0.1"])
def test_settings_of_a_backend_are_read_back(text: str) -> None:
    backend = BackendSpec.parse(text)
    assert str(backend) == text
    assert not backend.is_plain
    assert BackendSpec.parse(str(backend)) == backend


def test_settings_of_a_backend_are_read() -> None:
    backend = BackendSpec.parse(SETTINGS)
    assert (backend.cast, backend.chunks, backend.beside_bytes) == ("float16", 4, 64 << 20)
    assert backend.policy == PapersPolicy(priority=0, loss_bound=0.01)
    assert BackendSpec.parse("commlayer:priority=0:beside=1M").is_plain  # any collective can be urgent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gloo:chunk=4", "chunk=4.*known: cast, chunks"),
        ("gloo:chunks=many", "chunks=many"),
        ("gloo:chunks=0", "chunks=0"),
        ("gloo:chunks=2:chunks=2", "'chunks=2': chunks is there already"),
        ("commlayer:loss_bound=0.01:loss_bound=0.02", "'loss_bound=0.02': loss_bound is there already"),
        ("gloo/cubic bbr", "'cubic bbr': expected a congestion control"),
        ("gloo:cast=int8", "cast=int8"),
        ("gloo:beside=big", "beside=big"),
        ("gloo:priority=0", "only commlayer has a policy"),
        ("commlayer:loss_bound=0.9", "loss_bound=0.9"),
        ("commlayer:treatment=none", "treatment='none'"),
    ],
)
def test_bad_settings_are_named(text: str, message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        BackendSpec.parse(text)


def test_congestion_control_keeps_the_settings() -> None:
    backends = [BackendSpec.parse("gloo:chunks=2")]
    assert [str(backend) for backend in expand_tcp_cc(backends, ["bbr"])] == ["gloo/bbr:chunks=2"]


def test_json_round_trip() -> None:
    spec = make(
        backends=(GLOO, BackendSpec("gloo", "bbr"), BackendSpec.parse(SETTINGS)),
        collective="gradients",
        sizes=(1, 2),
        imports=("some.module",),
        scenario=Scenario(hosts=2, nics=(Link(rate_bps=1e6, loss=0.5),)),
        command=("commlayer", "bench"),
    )
    assert Spec.from_json(spec.to_json()) == spec
    assert Spec.from_json(make().to_json()) == make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "all_to_nothing"}, "all_to_nothing"),
        ({"dtype": "float8"}, "float8"),
        ({"op": "xor"}, "xor"),
        ({"backends": ()}, "backends"),
        ({"backends": (GLOO, GLOO)}, "each once"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (4, 0)}, "sizes"),
        ({"backends": (BackendSpec.parse("gloo:chunks=2"),)}, "are for the collective gradients"),
        ({"collective": "gradients", "dtype": "int32"}, "sum of int32"),
        ({"collective": "gradients", "op": "max"}, "max of float32"),
        ({"iters": 0}, "iters 0"),
        ({"warmup": 0}, "warmup 0"),
        ({"rounds": 0}, "rounds 0"),
        ({"backends": (BackendSpec("gloo", "bbr"),)}, "--netns"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)
