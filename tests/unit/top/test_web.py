import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from commlayer.tools.top import web
from commlayer.tools.top.client import NoAnswerError
from commlayer.tools.top.web import COLUMNS, Feed, Server
from tests.unit.top.test_table import sample


class Job:
    """A job's collector."""

    def __init__(self) -> None:
        self.answers = True

    def ask(self) -> dict[str, Any]:
        if not self.answers:
            raise NoAnswerError("nobody there")
        return {"samples": [sample(0), sample(1)], "ages": {}, "ended": []}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(Feed(Job().ask)) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def got(server: Server, path: str, host: str | None = None) -> tuple[int, str, Any]:
    """Status, content security policy and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers.get("Content-Security-Policy", ""), body


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(server: Server) -> None:
    status, policy, page = got(server, f"/{server.word}/")
    nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
    assert status == 200
    assert f'<script nonce="{nonce}">' in page
    assert "default-src 'none'" in policy
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert all(word not in page for word in ("innerHTML", "NONCE", "eval("))
    assert got(server, f"/{server.word}/")[1] != policy


def test_views_and_history(server: Server) -> None:
    for _ in range(3):
        server.feed.look()
    view = json.loads(got(server, f"/{server.word}/view")[2])
    assert (view["error"], len(view["ranks"]), view["job"]["live"]) == ("", 2, 2)
    past = json.loads(got(server, f"/{server.word}/history")[2])
    assert (past["names"], len(past["rows"])) == (list(COLUMNS), 3)
    assert past["rows"][0][past["names"].index("sent_bytes_s")] == 2 * 117_000_000


def test_only_the_whole_address_and_the_own_name_get_an_answer(server: Server) -> None:
    port = server.server_port
    for path, host, status in (
        ("/", None, 404),
        ("/view", None, 404),
        (f"/{server.word}", None, 404),
        (f"/{server.word}/../view", None, 404),
        (f"/{server.word}x/view", None, 404),
        ("/%C3%A9/view", None, 404),
        (f"/{server.word}/view", f"evil.example:{port}", 403),
        (f"/{server.word}/view", "127.0.0.1", 403),
        (f"/{server.word}/view", f"localhost:{port}", 200),
    ):
        assert got(server, path, host)[0] == status, (path, host)
    with pytest.raises(ValueError, match="use another one"):
        Server(server.feed, port)


def test_a_job_that_has_ended_leaves_its_last_view() -> None:
    job = Job()
    feed = Feed(job.ask)
    assert json.loads(feed.latest())["error"] == "no answer yet"
    feed.look()
    job.answers = False
    feed.look()
    view = json.loads(feed.latest())
    assert (view["error"], len(view["ranks"])) == ("nobody there", 2)
    assert len(json.loads(feed.history())["rows"]) == 1


def test_the_history_has_ten_minutes_however_often_the_job_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 300.0, 600.0, 605.0))
    rest = {**dict.fromkeys(COLUMNS, 0.0), "live": 2}
    monkeypatch.setattr(web, "summarize", lambda _: {"job": {**rest, "time": next(times)}})
    feed = Feed(Job().ask)
    for _ in range(4):
        feed.look()
    assert [row[0] for row in json.loads(feed.history())["rows"]] == [300.0, 600.0, 605.0]
