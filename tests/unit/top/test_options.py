"""The command lines of `commlayer top` and `ctl`: mistakes are said before anything else happens."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("top", "name the job: --store HOST:PORT"),
        ("top --store nonsense", "'nonsense': use HOST:PORT"),
        ("top --key zz --address 127.0.0.1:5", "--key 'zz': use 32 hex digits"),
        ("top --store 127.0.0.1:5 --key 00", "--store and --key both give the key"),
        ("top --web --once --json -", "--once, --json has no effect there"),
        ("top --web --tensorboard board", "--tensorboard has no effect there"),
        ("top --port 8000", "--port 8000 is the port of a page: add --web"),
        ("ctl loss-bound much --store 127.0.0.1:5", "loss-bound much: use a number"),
        ("ctl treatment zero --store 127.0.0.1:5", "treatment cannot change in a running job: "),
        ("ctl speed 3 --store 127.0.0.1:5", "speed: there is no such change; use one of loss-bound, codec"),
    ],
)
def test_a_mistake_is_named(words: str, said: str) -> None:
    ended = CliRunner().invoke(cli.app, words.split())
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert ended.stdout == ""


def close_all(server: socket.socket) -> None:
    """Accepts connections and closes them, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


@pytest.mark.parametrize(("listens", "why"), [(False, " (Connection refused)"), (True, "")])
def test_a_store_that_is_not_there_is_one_line(*, listens: bool, why: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:  # and closes each connection: no Store
            taken.listen()
            threading.Thread(target=close_all, args=(taken,), daemon=True).start()
        store = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "commlayer", "top", "--store", store]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # torch writes to the descriptor
    assert ended.returncode == 2
    said = f"no Store answers at {store}{why}; name the MASTER_ADDR and MASTER_PORT of a job that runs"
    assert ended.stderr == f"commlayer top: {said}\n"
