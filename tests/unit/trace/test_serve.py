"""The server for ui.perfetto.dev: one file, for one origin, until the page has it."""

import re
import threading
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import pytest

from commlayer.tools.trace import serve
from commlayer.tools.trace.serve import TraceServer, url


def test_the_address_is_that_of_the_page() -> None:
    assert url(Path("/tmp/my trace.json")) == (  # noqa: S108
        "https://ui.perfetto.dev/#!/?url=http://127.0.0.1:9001/my%20trace.json"
    )


def fetched(address: str) -> tuple[int, str | None, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310
            return answer.status, answer.headers["Access-Control-Allow-Origin"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, None, b""


def test_the_trace_is_served_to_the_page_alone(tmp_path: Path) -> None:
    path = tmp_path / "my trace.json"
    path.write_text("{}")
    with TraceServer(path, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        answers = []
        for name in ("", "other.json", "../my%20trace.json", "my%20trace.json"):
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            answers.append(fetched(f"http://127.0.0.1:{server.server_port}/{name}"))
            thread.join()
            assert server.fetched == (name == "my%20trace.json")
    assert answers == [(404, None, b"")] * 3 + [(200, "https://ui.perfetto.dev", b"{}")]


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with (
        TraceServer(tmp_path, 0) as server,
        pytest.raises(ValueError, match=rf"127.0.0.1:{server.server_port}: .*; ui.perfetto.dev reads from this port"),
    ):
        TraceServer(tmp_path, server.server_port)


@pytest.mark.parametrize("display", ["", ":0"])
def test_without_a_display_the_address_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, display: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[]")
    opened, said, threads = list[str](), list[str](), list[threading.Thread]()
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)

    def open_browser(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_browser)

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("waiting"):  # as the page does
            local = re.search(r"url=(\S+)", said[0])
            assert local is not None
            threads.append(threading.Thread(target=fetched, args=(local[1],)))
            threads[0].start()

    serve.serve(path, say, port=0)
    threads[0].join()
    assert said[0].startswith("opened https://" if display else "open in a browser: https://ui.perfetto.dev/#!/?url=")
    assert len(opened) == bool(display)
    assert any(line.startswith("from another machine, first: ssh -L ") for line in said) == (not display)
