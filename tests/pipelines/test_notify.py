"""Webhooks: what they are sent, when it is tried again, and that no secret gets out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from pipelines.fleet.config import Config, ConfigError, Notify, Output, Scan, Webhook
from pipelines.fleet.notify import NotifyError, message, send
from pipelines.fleet.serve import server

CONFIG = Config(Scan(["x"]), Output("out"), notify=Notify(tries=3, link="https://reports/"))
SECRET = "T0P/S3CR3T"
HOSTILE = "<!channel> <http://evil|click> *bold* & `x`"


def group(status: str = "new", **keys: Any) -> dict[str, Any]:
    return {
        "status": status, "kind": "cycle", "job": "night/job", "jobs": 3, "gpu_hours": 12.5,
        "summary": "ranks wait", "teams": ["nlp"], "suppressed": None, "fingerprint": "ab" * 8,
    } | keys  # fmt: skip


def told(*groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": "dl2gpu.digest/1", "run": "2026-11-30", "night": "2026-11-30", "jobs": 9,
        "deadlocked": 1, "cost": {"gpu_hours": 12.5}, "groups": list(groups),
    }  # fmt: skip


class Server(ThreadingHTTPServer):
    """Answers with the given statuses, one after the other, then with 200; keeps what it got."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.got = list(statuses), list[Any]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(self.rfile.read(int(self.headers["Content-Length"])))
                status = outer.statuses.pop(0) if outer.statuses else 200
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
                """Nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(*getattr(request, "param", ()))
    yield made
    made.shutdown()
    made.server_close()


def post(made: Server, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> list[float]:
    monkeypatch.setenv("HOOK", made.address)
    waits: list[float] = []
    send(Webhook("HOOK"), body, CONFIG, waits.append)
    return waits


def test_json(started: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = message(told(group(), group("known")), Webhook("HOOK"), CONFIG)
    assert body is not None
    assert post(started, monkeypatch, body) == []
    got = json.loads(started.got[0])
    assert [g["status"] for g in got["groups"]] == ["new"]
    assert got["link"] == "https://reports/2026-11-30/"


def test_slack(started: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [group(summary=HOSTILE, job=HOSTILE)] * 12
    body = message(told(*many), Webhook("HOOK", form="slack"), CONFIG)
    assert body is not None
    post(started, monkeypatch, body)
    got = json.loads(started.got[0])
    assert got["text"] == "12 findings to look at, night 2026-11-30"
    texts = [b["text"]["text"] for b in got["blocks"][1:]]
    assert len(texts) == 12  # ten, how many more, the link
    assert "<!channel>" not in "".join(texts)
    assert "<http://evil" not in "".join(texts)
    assert "&lt;!channel&gt;" in texts[0]
    assert texts[-1].startswith("<https://reports/2026-11-30/|")
    assert all(len(t) <= 3000 for t in texts)  # what Slack takes


@pytest.mark.parametrize(
    ("groups", "hook"),
    [
        ([], Webhook("HOOK")),
        ([group("known"), group("gone")], Webhook("HOOK")),
        ([group(suppressed="known to us")], Webhook("HOOK")),
        ([group()], Webhook("HOOK", team="vision")),
        ([group()], Webhook("HOOK", on=("gone",))),
    ],
)
def test_nothing_to_tell(groups: list[dict[str, Any]], hook: Webhook) -> None:
    assert message(told(*groups), hook, CONFIG) is None


@pytest.mark.parametrize("started", [(500, 429)], indirect=True)
def test_tried_again(started: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = post(started, monkeypatch, {"a": 1})
    assert len(started.got) == 3
    assert len(waits) == 2
    assert waits[1] > 0


@pytest.mark.parametrize(
    ("started", "tries", "said"),
    [
        ((404,), 1, "refused, status 404"),
        ((307,), 1, "refused, status 307"),
        ((503, 503, 503, 503), 3, "not taken in 3 tries, last status 503"),
    ],
    indirect=["started"],
)
def test_given_up(started: Server, tries: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotifyError) as e:
        post(started, monkeypatch, {"a": 1})
    assert said in str(e.value)
    assert SECRET not in str(e.value)
    assert SECRET not in repr(e.value.__cause__)
    assert len(started.got) == tries


@pytest.mark.parametrize("address", [None, "", f"file:///{SECRET}", f"https:{SECRET}", SECRET])
def test_no_address(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if address is not None:
        monkeypatch.setenv("HOOK", address)
    with pytest.raises(NotifyError, match="expected an address") as e:
        send(Webhook("HOOK"), {}, CONFIG)
    assert SECRET not in str(e.value)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Server()
    made.shutdown()
    made.server_close()
    monkeypatch.setenv("HOOK", made.address)
    with pytest.raises(NotifyError, match="not taken in 3 tries") as e:
        send(Webhook("HOOK"), {}, CONFIG, lambda _: None)
    assert SECRET not in str(e.value)


# --------------------------------------------------------------------------------------------------
# Metrics over HTTP


def test_metrics_are_served(tmp_path: Path) -> None:
    from urllib.error import HTTPError

    source = tmp_path / "dl2gpu.prom"
    config = Config(Scan(["x"]), Output(str(tmp_path), metrics=str(source)))
    with server(config, "127.0.0.1:0") as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{made.server_address[1]}"
        for path, status in (("/metrics", 503), ("/", 404), ("/../dl2gpu.prom", 404)):
            with pytest.raises(HTTPError) as e:
                urlopen(at + path)
            assert e.value.code == status
            e.value.close()
        source.write_text("a 1\n")
        with urlopen(f"{at}/metrics") as answer:
            assert answer.read() == b"a 1\n"
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        made.shutdown()


@pytest.mark.parametrize(
    ("metrics", "listen", "said"),
    [
        (None, "127.0.0.1:0", "output.metrics"), ("m", "nowhere", "expected address:port"),
        ("m", "256.0.0.1:1", "cannot be bound"), ("m", "127.0.0.1:99999", "cannot be bound"),
    ],
)  # fmt: skip
def test_what_cannot_be_served(metrics: str | None, listen: str, said: str) -> None:
    config = Config(Scan(["x"]), Output("out", metrics=metrics))
    with pytest.raises(ConfigError, match=said):
        server(config, listen)
