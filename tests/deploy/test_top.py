"""`baton top` against a small HTTP server: as text, as JSON, on a terminal, and with bad input."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs

from baton.deploy import cli, top
from baton.deploy.client import Client
from baton.deploy.up import free_port
from baton.metadata.version import install_command
from baton.router.http.page.types import LiveRequest, LiveWait, OwnedPages, Snapshot

from .conftest import Server, node, snapshot

PATH = "/live?once=true"
PAGES = OwnedPages(total=120, free=60, request=30, ticket=10, cache=20, padding=0)
REQUEST = LiveRequest(
    rid="cmpl-0123456789abcdef",
    model="demo",
    stage="handoff",
    node="decode-0",
    prefill="prefill-0",
    decode="decode-0",
    num_prompt=1_234,
    num_tokens=1,
    age_s=2.5,
    why="[red]decode-0\x1b[2J pulls",
)
TROUBLE = node("prefill-0", "silent", "its last heartbeat came 3.0 s ago")
Top = Callable[..., tuple[int, str, str]]


def growing() -> Callable[[], bytes]:
    """Return what answers with snapshots a second apart, in which ten tokens have come."""
    times = iter(range(1, 1_000))

    def body() -> bytes:
        number = next(times)
        full = structs.replace(node(generated=10 * number, why="full: it has no pages"), pages=PAGES, running=3)
        wait = LiveWait("handoff", "decode-0 pulls the pages of the prompt", 1, 0.25)
        more: dict[str, Any] = {"requests": [REQUEST], "num_requests": 3, "waits": [wait]}
        return msgspec.json.encode(snapshot(100.0 + number, full, TROUBLE, tokens=10 * number, **more))

    return body


@pytest.fixture
def run_top(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Top:
    """Runs the command in this process: its status, output and errors."""
    monkeypatch.setattr(top, "_BETWEEN_S", 0.0)
    for name in ("BATON_API_KEY", "BATON_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    server.pages[PATH] = 200, growing()

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["top", *([] if "--url" in argv else ["--url", server.url]), *argv])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("columns", [80, 40])
def test_a_pipe_gets_the_state_once_as_text(run_top: Top, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, text, errors = run_top()
    assert (status, errors) == (0, "")
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    words = " ".join(text.split())
    for expected in (
        ": ready 0.0 requests/s 10 tokens/s",
        "decode-0 ready 3/8 10",
        "prefill-0 is silent: its last heartbeat came 3.0 s ago decode-0: full: it has no pages",
        "2 older requests are not listed",
        "1 in handoff, the oldest for 250 ms: decode-0 pulls the pages of the prompt",
    ):
        assert expected in words
    if columns == 80:
        assert "10.0 MB/s 0.1 s ███▓▒▒░░░░░░ 50%" in words
        assert "cmpl-012345678 handoff 1,234 1 2.5 s [red]decode-0?[2J pull" in words.replace("…", "")


def test_json_has_a_snapshot_and_the_rates_since_the_one_before(run_top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)  # JSON does without
    monkeypatch.delitem(sys.modules, "baton.deploy.top_view", raising=False)
    status, text, _ = run_top("--json")
    answer = json.loads(text)
    assert status == 0
    assert msgspec.convert(answer["snapshot"], Snapshot).requests == [REQUEST]
    assert answer["rates"]["tokens_per_s"] == answer["rates"]["nodes"]["decode-0"]["generated_tokens_per_s"] == 10.0
    assert answer["rates"]["ttft"] is None


def test_a_missing_library_is_named_with_its_extra(run_top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "baton.deploy.top_view", raising=False)
    assert run_top("--once") == (2, "", f"baton: error: `baton top` needs rich: {install_command('terminal')}\n")


def test_an_api_key_shows_counts_and_says_what_is_missing(server: Server, run_top: Top) -> None:
    server.pages[PATH] = 200, msgspec.json.encode(snapshot(1.0, sees="counts"))
    status, text, _ = run_top()
    assert status == 0
    assert "0 running" in text and "--admin-key" in text and "node  " not in text


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"{}", "there is no GET /live: this is no Baton router, or an older one"),
        (404, b"<html>\n<p>no</p>\n</html>", "there is no GET /live"),
        (200, b"<html>\n</html>", "not the answer of a Baton router"),
        (200, b'{"at": 1}', "not the answer of a Baton router"),
        (401, b'{"error": {"message": "the API key is missing"}}', "missing (HTTP 401); give the router's admin key"),
        (500, b"<html>\n<p>broken</p>\n</html>", "<html> <p>broken</p> </html> (HTTP 500)"),
    ],
)
@pytest.mark.parametrize("form", ["--once", "--json"])
def test_a_foreign_server_or_a_missing_key_is_one_sentence(
    server: Server, run_top: Top, status: int, body: bytes, words: str, form: str
) -> None:
    server.pages[PATH] = status, body
    exit_status, text, errors = run_top(form)
    assert (exit_status, text, errors.count("\n")) == (1, "", 1)
    assert words in errors


@pytest.mark.parametrize(("url", "status"), [("ftp://x", 2), ("http://127.0.0.1:{port}", 1)])
def test_a_wrong_address_is_one_sentence(run_top: Top, url: str, status: int) -> None:
    exit_status, _, errors = run_top("--url", url.format(port=free_port()))
    assert (exit_status, errors.count("\n")) == (status, 1)
    assert "--url" in errors


def test_keys_and_drawing_ask_the_router_nothing_while_spans_are_shown(server: Server) -> None:
    from baton.deploy.top_view import View

    asked: list[str] = []

    def ended() -> bytes:
        asked.append(REQUEST.rid)
        return b'{"error": {"message": "it has ended"}}'

    server.pages[PATH] = 200, growing()
    server.pages[f"/debug/requests/{REQUEST.rid}"] = 404, ended
    view = View(Client(server.url))
    view.look()
    view.press(b"\n")
    for _ in range(5):
        view.press(b"j")
        view.draw()
    assert asked == [REQUEST.rid]
    view.try_look()
    assert asked == [REQUEST.rid] * 2


def test_a_terminal_is_drawn_anew_until_q_and_left_as_it_was(server: Server) -> None:
    server.pages[PATH] = 200, growing()
    server.pages[f"/debug/requests/{REQUEST.rid}"] = 404, b'{"error": {"message": "it has ended"}}'
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-P", "-m", "baton.deploy.cli", "top", "--url", server.url]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)

    def until(words: str) -> str:
        text, deadline = "", time.monotonic() + 60
        while words not in text and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 65536).decode()
        assert words in text
        return text

    try:
        assert "\x1b[?1049h" in until("q leaves"), "it has a screen of its own"
        os.write(ours, b"s")
        until("sorts (now by tokens)")
        os.write(ours, b"\n")
        until("it has ended (HTTP 404)")
        server.pages[PATH] = 503, b'{"error": {"message": "shutting down"}}'
        os.write(ours, b"\n")
        until("no newer figures: shutting down")
        os.write(ours, b"q")
        assert process.wait(30) == 0
        until("\x1b[?1049l")
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
