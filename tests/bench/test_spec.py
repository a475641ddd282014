from __future__ import annotations

from typing import Any

import pytest

from commlayer.bench.spec import BackendSpec, Spec, expand_tcp_cc
from commlayer.emulate.link import Link
from commlayer.emulate.scenario import Scenario

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


def test_json_round_trip() -> None:
    spec = make(
        backends=(GLOO, BackendSpec("gloo", "bbr")),
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
        ({"iters": 0}, "iters 0"),
        ({"warmup": 0}, "warmup 0"),
        ({"rounds": 0}, "rounds 0"),
        ({"backends": (BackendSpec("gloo", "bbr"),)}, "--netns"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)
