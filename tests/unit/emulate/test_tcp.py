"""The machine's list of congestion controls, here in a file: the kernel's own is other emulations', too."""

import threading
from pathlib import Path

import pytest

from commlayer.tools.emulate import namespace, tcp
from commlayer.tools.emulate.namespace import EmulationError


class Machine:
    """One whose emulations come and go without an end to any process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.emulations: list[str] = []
        self._list = folder / "allowed"
        self._list.write_text("reno cubic\n")
        monkeypatch.setattr(tcp, "_ALLOWED", self._list)
        monkeypatch.setattr(tcp, "_ADDED", folder / "added")
        monkeypatch.setattr(namespace, "owned", lambda: list(self.emulations))

    @property
    def allowed(self) -> set[str]:
        return set(self._list.read_text().split())

    def choose(self, text: str) -> None:
        """An administrator chooses."""
        self._list.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_entries_of_a_killed_emulation_are_removed_by_the_next(machine: Machine) -> None:
    machine.emulations.append("one")
    tcp.allow(["bbr", "cubic"])
    assert machine.allowed == {"reno", "cubic", "bbr"}
    machine.emulations.remove("one")  # killed: it does not call put_back
    tcp.put_back()
    assert machine.allowed == {"reno", "cubic"}


def test_the_last_of_several_emulations_removes_the_entries_of_all(machine: Machine) -> None:
    machine.emulations += ["one", "other"]
    tcp.allow(["bbr"])
    tcp.allow(["dctcp", "bbr"])
    for name in ("one", "other"):
        assert machine.allowed == {"reno", "cubic", "bbr", "dctcp"}
        machine.emulations.remove(name)
        tcp.put_back()
    assert machine.allowed == {"reno", "cubic"}


def test_entries_of_other_programs_stay(machine: Machine) -> None:
    tcp.put_back()
    tcp.allow(["bbr"])
    machine.choose("reno bbr vegas")
    tcp.put_back()
    assert machine.allowed == {"reno", "vegas"}
    machine.choose("reno bbr")
    tcp.put_back()  # the added entry has been taken off
    assert machine.allowed == {"reno", "bbr"}


def test_an_algorithm_that_the_kernel_lacks_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if "nonesuch" in text:
            raise FileNotFoundError(2, "No such file or directory")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(EmulationError, match="nonesuch: not in this kernel"):
        tcp.allow(["nonesuch"])
    tcp.put_back()
    assert machine.allowed == {"reno", "cubic"}
    assert not (tmp_path / "added").exists()


def test_nothing_is_left_when_nothing_is_added(machine: Machine, tmp_path: Path) -> None:
    tcp.allow(["bbr"])
    assert (tmp_path / "added").exists()
    tcp.put_back()
    assert not (tmp_path / "added").exists()
    (tmp_path / "added").touch()  # as killed emulations of former versions leave it
    tcp.put_back()
    assert not (tmp_path / "added").exists()
    assert machine.allowed == {"reno", "cubic"}


def test_a_waiter_for_the_lock_of_a_removed_file_takes_the_next(machine: Machine, tmp_path: Path) -> None:
    with tcp._noted():
        waiting = threading.Thread(target=tcp.allow, args=(["bbr"],))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        (tmp_path / "added").unlink()
    waiting.join(10)
    assert (tmp_path / "added").read_text() == "bbr\n"
    tcp.put_back()
    assert machine.allowed == {"reno", "cubic"}


@pytest.mark.parametrize(("name", "good"), [("cubic", True), ("cdg-2", True), ("cubic bbr", False), ("", False)])
def test_names(name: str, good: bool) -> None:
    assert tcp.is_name(name) == good
