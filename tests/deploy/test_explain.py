"""`baton explain` against a small HTTP server that answers with the router's own types."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from baton.deploy import cli
from baton.deploy.explain import request_lines
from baton.deploy.up import free_port
from baton.metadata.wire.request import ChunkTimes, PrefillTimes, PullTimes
from baton.router.requests.trace import Explanation, RecentRequests, RequestLine, RequestTrace, SequenceTrace, Span

SPANS = [
    Span("queue", 0.0, 0.25, num_refused=2),
    Span("prefill", 0.25, 0.5, "p0", 0, num_prompt=612, num_cached=16, prefill_times=PrefillTimes(
        0.0, 2, 5, (ChunkTimes(1, 512, 0.0, 0.25), ChunkTimes(4, 100, 0.125, 0.125)))),
    Span("pull", 0.75, 0.0, "d0", 0, num_pages=3, num_bytes=3_000_000, had_pages=1, moving_s=0.01, gb_per_s=0.3,
         pull_times=PullTimes("local", 0.0, 0.0, 2), way="through shared memory"),
    Span("decode", 0.75, 0.25, "d0", 0, num_tokens=1, num_steps=1),
    Span("queue", 1.0, 0.5, reason="decode node d0: its connection closed"),
    Span("decode", 1.5, 0.5, "d1", 1, num_tokens=20, num_steps=8, num_drafted=40, num_accepted=12),
]  # fmt: skip
TRACE = RequestTrace(
    "cmpl-1", "mine", "demo", "done", 1.8e9, 2.0, 0.75, 628, None, 16, [SequenceTrace(0, "length", 21, SPANS)]
)


@dataclass
class Server:
    """Answers every GET with `status` and `body`."""

    url: str = ""
    status: int = 200
    body: bytes = b"{}"
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def say(self, value: Any, status: int = 200) -> None:
        self.status, self.body = status, msgspec.json.encode(value)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.paths.append(self.path)
            state.keys.append(self.headers["Authorization"])
            self.send_response(state.status)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        yield state
        http_server.shutdown()
        thread.join()


Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    """Runs the command in this process: its status, output and errors."""
    for name in ("BATON_API_KEY", "BATON_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["explain", "--url", server.url, *argv])
        return status, *capsys.readouterr()

    return run


def test_a_trace_for_people(server: Server, explain: Explain) -> None:
    server.say(Explanation([TRACE]))
    status, text, _ = explain("cmpl-1")
    assert (status, server.paths, server.keys) == (0, ["/debug/requests/cmpl-1"], [None])
    lines = text.splitlines()
    assert lines[0] == "cmpl-1 (x-request-id mine): done in 2.00 s"
    for words in ("model demo", "628 prompt tokens, 16 of them cached", "first token after 750.0 ms", "21 tokens"):
        assert words in lines[1]
    rows = {line.split()[0]: line for line in lines[4:] if line}
    assert rows["queue"].split()[:4] == ["queue", "1,000.0", "500.0", "25%"]
    assert "moved: decode node d0: its connection closed" in rows["queue"]
    assert "decode was full 2 times" in text
    assert "p0, 612 tokens, 16 more were cached; 2 offers, 5 pages before the last chunk" in rows["prefill"]
    for words in (
        "3 pages, 3.0 MB at 0.3 GB/s through shared memory",
        "1 more were cached",
        "2 pulled again",
        "10.0 ms on their",
    ):
        assert words in rows["pull"]
    assert "d1, attempt 2, 20 tokens in 8 rounds, 12 of 40 drafts accepted" in rows["decode"]
    assert rows["chunk"].split()[:3] == ["chunk", "1", "250.0"]
    assert "100 tokens, 125.0 ms after the one before" in rows["4"]
    assert rows["sum"].split() == ["sum", "0.0", "2,000.0", "100%"]


def test_a_prompt_shows_who_computed_it_and_why_nodes_were_chosen(server: Server, explain: Explain) -> None:
    spans = [
        Span("local prefill", 0.0, 0.5, "d0", 0, "local, since no prefill node is here", num_prompt=612),
        Span("reserve", 0.5, 0.0, "d1", 1, "least loaded of 3 decode nodes: 2 running of 64"),
        Span("prefill", 0.5, 0.5, "p0", 1, "the only prefill node", num_prompt=612),
    ]
    trace = msgspec.structs.replace(TRACE, sequences=[SequenceTrace(0, "length", 21, spans)])
    server.say(Explanation([trace]))
    text = explain("cmpl-1")[1]
    assert "d0, at most 612 tokens on the decode node; local, since no prefill node is here" in text
    assert "d1, attempt 2, least loaded of 3 decode nodes: 2 running of 64" in text
    assert "p0, attempt 2, 612 tokens; the only prefill node" in text


def test_bars_lie_where_their_spans_lie(server: Server, explain: Explain) -> None:
    server.say(Explanation([TRACE]))
    rows = [line for line in explain("cmpl-1")[1].splitlines() if "%  " in line]
    bars = [line.split("%  ")[1][:24] for line in rows]
    spans = [(bar.index(bar.strip()[0]), len(bar.rstrip())) for bar in bars]
    assert spans == [(0, 3), (3, 9), (9, 10), (9, 12), (12, 18), (18, 24)]


def test_several_requests_choices_and_an_error(server: Server, explain: Explain) -> None:
    sequences = [SequenceTrace(0, "stop", 3, SPANS), SequenceTrace(1, None, 2, SPANS, num_forgotten=7)]
    failed = msgspec.structs.replace(TRACE, outcome="failed", error="the model broke", sequences=sequences, ttft_s=None)
    live = msgspec.structs.replace(TRACE, outcome="live", total_s=0.0, client_id=None)
    server.say(Explanation([failed, live]))
    text = explain("mine")[1]
    for words in (
        "failed in 2.00 s",
        "failed: the model broke",
        "no token, 5 tokens",
        "choice 1: 2 tokens, not finished",
    ):
        assert words in text
    assert "7 spans in the middle were dropped" in text
    assert "cmpl-1: running for 0.0 ms" in text


def test_nothing_that_the_router_says_moves_the_terminal(server: Server, explain: Explain) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\rm"
    server.say(Explanation([msgspec.structs.replace(TRACE, model=evil, client_id=evil)]))
    line = RequestLine(evil, None, "demo", "done", 1.8e9, 2.0, 0.75, 628, 21, 1, "prefill", 0.5)
    texts = [explain("cmpl-1")[1]]
    server.say(RecentRequests([line]))
    texts.append(explain()[1])
    server.say({"error": {"message": evil}}, 404)
    texts.append(explain("cmpl-1")[2])
    for text in texts:
        assert "title" in text and all(line.isprintable() for line in text.split("\n")), repr(text)


def test_json_is_what_the_router_says(server: Server, explain: Explain) -> None:
    server.say(Explanation([TRACE]))
    assert json.loads(explain("cmpl-1", "--json")[1]) == json.loads(server.body)


def test_without_an_id_recent_ones_are_listed(server: Server, explain: Explain) -> None:
    line = RequestLine("cmpl-1", None, "demo", "done", 1.8e9, 2.0, 0.75, 628, 21, 1, "prefill", 0.5)
    server.say(RecentRequests([line, msgspec.structs.replace(line, rid="chatcmpl-22", num_moves=0)]))
    status, text, _ = explain()
    assert (status, server.paths) == (0, ["/debug/requests"])
    head, first, second = text.splitlines()
    assert head.index("outcome") == first.index("done") == second.index("done")
    assert first.split()[-7:] == ["done", "2,000.0", "21", "1", "prefill", "500.0", "ms"]
    server.say(RecentRequests([]))
    assert "no request yet" in explain()[1]


def test_an_id_with_a_slash_is_one_path_segment(server: Server, explain: Explain) -> None:
    server.say(Explanation([TRACE]))
    explain("a/../b?c")
    assert server.paths == ["/debug/requests/a%2F..%2Fb%3Fc"]


def test_what_to_do_when_it_does_not_work(server: Server, explain: Explain) -> None:
    def error(message: str) -> dict[str, Any]:
        return {"error": {"message": message}}

    cases = [
        (404, error("no request 'x' is known; it is the answer's x-request-id"), ("no request 'x'", "HTTP 404")),
        (401, error("this route needs the admin key"), ("needs the admin key", "--admin-key", "BATON_ADMIN_KEY")),
        (403, error("an API key is not enough"), ("not enough", "--admin-key")),
        (200, {"hello": "world"}, ("not the answer of a Baton router", server.url)),
        (200, ["requests"], ("not the answer of a Baton router",)),
    ]
    for status, body, words in cases:
        server.say(body, status)
        code, out, problem = explain("x")
        assert (code, out, problem.count("\n")) == (1, "", 1)
        for word in words:
            assert word in problem
    server.status, server.body = 200, b"<html>"
    assert "not the answer of a Baton router" in explain("x")[2]


def test_of_several_routers_the_one_answers_that_took_the_request(server: Server, explain: Explain) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    server.say(Explanation([TRACE]))
    code, out, _ = explain("cmpl-1", "--url", f"{nobody}, {server.url}")
    assert code == 0 and out.startswith("cmpl-1 (")
    server.say({"error": {"message": "no request 'x' is known"}}, 404)
    code, _, problem = explain("x", "--url", f"{nobody},{server.url}")
    assert code == 1 and f"{nobody}: " in problem and f"{server.url}: " in problem and "'x' is known" in problem
    server.say(RecentRequests([]))
    code, out, _ = explain("--url", f"{server.url},{server.url}")
    assert code == 0 and out.count(f"{server.url}:") == 2 and out.count("no request yet") == 2


def test_nobody_listens(explain: Explain) -> None:
    code, _, problem = explain("x", "--url", f"http://127.0.0.1:{free_port()}")
    assert code == 1
    for words in ("nothing listens", "baton up", "--url"):
        assert words in problem


def test_the_admin_key_goes_before_the_api_key(
    server: Server, explain: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say(RecentRequests([]))
    monkeypatch.setenv("BATON_API_KEY", "api")
    explain()
    monkeypatch.setenv("BATON_ADMIN_KEY", "admin")
    explain()
    explain("--admin-key", "other")
    assert server.keys == ["Bearer api", "Bearer admin", "Bearer other"]


def test_tokens_from_host_memory_are_named() -> None:
    spans = [
        Span("prefill", 0.0, 0.5, "p0", 0, num_prompt=12, num_cached=4_000, num_restored=3_008),
        Span("decode", 0.5, 0.25, "d0", 0, num_tokens=1, num_restored=16),
        Span("recompute", 0.75, 0.25, "d0", 0, num_restored=2_000),
    ]
    trace = RequestTrace("cmpl-1", None, "demo", "done", 1.8e9, 1.0, 0.5, 4_012, None, 4_000, [])
    trace.sequences.append(SequenceTrace(0, "length", 1, spans))
    text = "\n".join(request_lines(trace, "#"))
    assert "12 tokens, 4,000 more were cached (3,008 of them in host memory)" in text
    assert "1 tokens; 16 prompt tokens came from host memory" in text
    assert "2,000 tokens came from host memory" in text
