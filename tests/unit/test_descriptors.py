"""The limit of file descriptors, in a process of its own."""

import resource

import pytest

from commlayer.transport import descriptors


class Limits:
    """Stands for the system's: the soft and the hard limit."""

    def __init__(self, soft: int, hard: int) -> None:
        self.found = soft, hard
        self.refuses = False

    def getrlimit(self, _kind: int) -> tuple[int, int]:
        return self.found

    def setrlimit(self, _kind: int, limits: tuple[int, int]) -> None:
        if self.refuses:
            raise ValueError("not allowed to raise maximum limit")
        self.found = limits


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 1 << 20, 65536),
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 65536),
        (1 << 17, 1 << 20, 1 << 17),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int
) -> None:
    limits = Limits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    descriptors.raise_descriptor_limit()
    assert limits.found == (expected, hard)


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(1024, 4096)
    limits.refuses = True
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    descriptors.raise_descriptor_limit()
    assert limits.found == (1024, 4096)
    assert "cannot raise the limit of 1024 file descriptors" in caplog.text
