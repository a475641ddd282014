"""An installed commlayer, tried as by a user: the command, every module, an all-reduce of two ranks.

The Python of an environment with the wheel runs this file. It must not import anything of the checkout.
"""

import importlib
import importlib.util
import os
import pkgutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

OPTIONAL = {
    "commlayer.tools.dissect": "scapy",
    "commlayer.tools.listing": "scapy",
    "commlayer.tools.wireshark": "scapy",
    "commlayer.torchft": "torchft",
    "commlayer.torchtitan": "torchtitan",
    "commlayer.verl": "verl",
    "commlayer.vllm": "vllm",
}
RANKS = 2


def check_modules() -> None:
    """Imports every module of the package, from the environment and not from the checkout."""
    import commlayer

    root = Path(commlayer.__file__).parent
    assert root.is_relative_to(sys.prefix), f"{root} is not in {sys.prefix}"
    for module in pkgutil.walk_packages(commlayer.__path__, "commlayer."):
        needed = OPTIONAL.get(module.name)
        if module.name != "commlayer.__main__" and (needed is None or importlib.util.find_spec(needed)):
            importlib.import_module(module.name)
    foreign = sorted(name for name in sys.modules if name.partition(".")[0] in ("bench", "tests", "native"))
    assert not foreign, f"the package imports {foreign}"
    for name in ("py.typed", "_native.pyi", "_native.abi3.so"):
        assert (root / name).exists(), name
    from commlayer.tools.emulate.scenario import Scenario

    assert Scenario.read("loss1").hosts == 4


def check_metadata() -> None:
    """The licence is in the wheel, and `pip install commlayer[tp]` finds its extra."""
    files = [str(path) for path in metadata.files("commlayer") or ()]
    assert any(name.endswith("licenses/LICENSE") for name in files), files
    assert {"tp", "dissect"} <= set(metadata.metadata("commlayer").get_all("Provides-Extra", []))


def check_command() -> None:
    """`commlayer --version`, the script that pip has made."""
    script = Path(sys.prefix, "bin", "commlayer")
    shown = subprocess.run([script, "--version"], check=True, capture_output=True, text=True).stdout
    assert shown.startswith(f"commlayer {metadata.version('commlayer')}, torch "), shown
    print(shown.strip())


def rank() -> None:
    """One of the ranks: `init_process_group` and an all-reduce, as in the README."""
    import torch
    import torch.distributed as dist

    import commlayer  # noqa: F401  # registers the backend

    dist.init_process_group("commlayer")
    values = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(values)
    assert values.unique().tolist() == [sum(range(1, RANKS + 1))], values
    dist.destroy_process_group()


def check_ranks() -> None:
    """Starts the ranks, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, __file__, "rank"]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(number)}) for number in range(RANKS)]
    assert [process.wait(180) for process in ranks] == [0] * RANKS  # importing torch takes a minute on a busy machine
    print(f"an all-reduce of {RANKS} ranks is right")


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        check_modules()
        check_metadata()
        check_command()
        check_ranks()
