"""The page of `commlayer top --web` in Chromium, on a live job of 4 ranks: `python -m bench.top_page [--png FILE]`.

It needs Debian's packages chromium and chromium-driver. It checks the table, the curves, details and order of ranks, a
rank that dies, a name of a host that is markup, and that the page loads nothing from elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness.browser import Browser, request, until
from bench.harness.options import options
from commlayer.tools.bench.launch import free_port
from commlayer.tools.top.options import connect
from commlayer.tools.top.web import Feed, Server

RANKS = 4

TRAIN = """
import os, socket, time, torch, torch.distributed as dist, commlayer
if os.environ["RANK"] == "1":
    socket.gethostname = lambda: "<img src=x onerror=document.title='broken'>"
dist.init_process_group("commlayer")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
model.register_comm_hook(commlayer.HookState(commlayer.Policy(codec="int8")), commlayer.allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(0.06 if dist.get_rank() == 2 else 0.02)
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
"""


@contextlib.contextmanager
def job(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A job of RANKS processes: the address of its Store, and the processes."""
    script = folder / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    store, top = free_port(), free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store), "WORLD_SIZE": str(RANKS), "COMMLAYER_SHM": "0"}
    common |= {"COMMLAYER_TOP": str(top), "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **common}
    processes = [
        subprocess.Popen([sys.executable, str(script)], env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    try:
        yield f"127.0.0.1:{store}", processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_server(server: Server) -> None:
    """The server answers nothing to other names, and without the word of its address."""
    for path, headers, status in (
        (f"/{server.word}/view", {"Host": "evil.example"}, 403),
        ("/view", {}, 404),
        ("/wrong/view", {}, 404),
        (f"/{server.word}/../../etc/passwd", {}, 404),
        (f"/{server.word}/view", {}, 200),
    ):
        assert request(server.server_port, "GET", path, headers)[0] == status, path


def check_page(browser: Browser, kill: Callable[[], None], png: Path | None) -> None:
    """What a user sees, and does."""
    rows = "[...document.querySelectorAll('#ranks tr[data-rank]')]"
    until("all ranks", lambda: bool(browser.run(f"{rows}.length") == RANKS))
    until("steps", lambda: "step" in browser.run("document.querySelector('h1').textContent"))
    until("the slow rank", lambda: "rank 2" in (browser.run("document.querySelector('#slowest')?.textContent") or ""))
    until(
        "curves",
        lambda: browser.run("document.querySelector('#curve-rate path').getAttribute('d').split('L').length") > 5,
    )
    assert browser.run("document.querySelectorAll('#curves figure').length") == 6
    assert browser.run("document.querySelector('#curve-rate figcaption').textContent").endswith("bit/s")
    hosts = browser.run(f"{rows}.map((row) => row.cells[1].textContent)")
    assert hosts[1].startswith("<img src=x"), hosts
    assert browser.run("document.images.length") == 0
    until("its row", lambda: browser.run("document.querySelector('#ranks .slowest')?.dataset.rank") == "2")
    assert "broken" not in browser.run("document.title")
    assert browser.run(f"{rows}.map((row) => row.cells.length)") == [12] * RANKS

    browser.click("#ranks tr[data-rank='0'] button")
    until("paths", lambda: browser.run("document.querySelectorAll('#ranks .detail').length") == RANKS - 1)
    assert "rank 1" in browser.run("document.querySelector('#ranks .detail').textContent")
    browser.click("#head th:nth-child(4) button")
    times = f"{rows}.map((row) => row.cells[3].textContent)"
    assert len(browser.run(times)) == RANKS
    if png is not None:
        png.write_bytes(browser.screenshot())

    kill()
    until("the dead rank", lambda: bool(browser.run("document.querySelectorAll('#notices .bad').length") > 0))
    resources = browser.run("performance.getEntriesByType('resource').map((each) => new URL(each.name).host)")
    assert set(resources) == {browser.run("location.host")}, resources
    log = browser.complaints()
    assert log == [], log


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--png", type=Path, help="file for a picture of the page")
    png = parser.parse_args().png
    with tempfile.TemporaryDirectory() as name, job(Path(name)) as (store, processes):
        until("the Store", lambda: reaches(store))
        with contextlib.closing(connect(store, None, None, None)) as client, Server(Feed(client.view)) as server:
            ends = threading.Event()

            def feed() -> None:
                while not ends.wait(1.0):
                    server.feed.look()

            threads = [threading.Thread(target=feed), threading.Thread(target=server.serve_forever)]
            for thread in threads:
                thread.start()
            try:
                with contextlib.closing(Browser(Path(name) / "profile")) as browser:
                    check_server(server)
                    browser.call("POST", "/url", {"url": server.url})
                    check_page(browser, processes[3].kill, png)
            finally:
                ends.set()
                server.shutdown()
                for thread in threads:
                    thread.join()
    print("the page works")


def reaches(store: str) -> bool:
    """Whether the job has told its address."""
    try:
        connect(store, None, None, None).close()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    main()
