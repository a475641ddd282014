"""Optimizers that cannot train with the codec `sign`, by the names of their classes and of those they wrap."""

from typing import Any

import pytest
import torch

from commlayer.compress.optimizer import check_optimizer
from commlayer.config import Policy
from commlayer.errors import ConfigError

SIGN = Policy(codec="sign")


def named(name: str, kind: type = torch.optim.SGD) -> Any:
    """An optimizer whose class has this name."""
    return type(name, (kind,), {})([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize(
    "name",
    ["FusedAdam", "Adam8bit", "Lamb", "NVLAMB", "AdaBound", "Adahessian", "AdEMAMix", "SOAP", "SophiaG", "Prodigy"],
)
def test_optimizers_of_other_packages_with_second_moments_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"codec='sign'\) with {name}: .*; use SGD with momentum"):
        check_optimizer(SIGN, named(name))
    check_optimizer(Policy(codec="int4"), named(name))


def test_the_remedy_is_what_was_measured() -> None:
    """Lion is allowed, but was worse than any of these with top-k."""
    with pytest.raises(ConfigError, match=r"use SGD with momentum, or another codec \(int4 suits Adam\)$"):
        check_optimizer(Policy(codec="topk:0.01"), torch.optim.AdamW([torch.ones(1)]))


@pytest.mark.parametrize("name", ["SGD", "Lion", "Signum", "LARS", "LambdaSGD"])
def test_optimizers_without_them_are_taken(name: str) -> None:
    check_optimizer(SIGN, named(name))


def test_wrappers_are_looked_through() -> None:
    for attribute in ("optim", "optimizer"):
        wrapper = named("Wrapper")
        setattr(wrapper, attribute, named("AdamW", torch.optim.AdamW))
        with pytest.raises(ConfigError, match="with AdamW"):
            check_optimizer(SIGN, wrapper)
        setattr(wrapper, attribute, named("SGD"))
        check_optimizer(SIGN, wrapper)
        setattr(wrapper, attribute, wrapper)  # itself
        check_optimizer(SIGN, wrapper)


def test_a_missing_optimizer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"HookState\(optimizer=\.\.\.\)"):
        check_optimizer(SIGN, None)
    check_optimizer(Policy(), None)
