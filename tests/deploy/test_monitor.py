"""What `baton up` says of the router's snapshots: figures, nodes that are not ready, news, sums at the end."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.deploy.monitor import Monitor, NodeNews, service_words
from baton.deploy.rates import rates
from baton.deploy.terminal import Status
from baton.router.http.page.types import LiveCounts

from .conftest import node, snapshot


def test_the_figures_of_the_service_are_short_texts() -> None:
    counts = LiveCounts(waiting=2, running=1_024)
    old = snapshot(100.0, node())
    new = snapshot(
        104.0,
        node(drafts=(10, 40, 30)),
        counts=counts,
        done=6,
        failed=2,
        tokens=8_000,
        prompts=(100, 25),
        ttft=(0, 4, 0, 0),
    )
    assert service_words(new, rates(old, new)) == [
        "1.5 requests/s",
        "2,000 tokens/s",
        "1,024 running",
        "2 waiting",
        "ttft p50 150 ms, p95 195 ms",
        "75% of drafts accepted, 4.0 tokens per round",
        "25% of prompts cached",
        "2 failed",
    ]
    assert service_words(new, None) == ["1,024 running", "2 waiting"]
    assert service_words(old, rates(old, old)) == ["0.0 requests/s", "0 tokens/s", "0 running", "0 waiting"]


def test_each_change_of_the_nodes_is_one_line() -> None:
    news = NodeNews()
    well = snapshot(100.0, node())
    draining = snapshot(101.0, node(state="draining", why="d0 is draining"))
    assert news.lines(well) == []
    assert news.lines(draining) == ["d0 is draining"]
    assert news.lines(draining) == []
    assert news.lines(well) == ["all nodes take requests again"]
    assert news.lines(snapshot(102.0, reason="no decode node")) == ["nothing is served now: no decode node"]
    assert news.lines(snapshot(103.0, reason="no decode node")) == []
    assert news.lines(well) == ["requests are served again"]
    for age in "1.2", "2.3":  # the same news in other words
        silent = snapshot(104.0, node(state="silent", why=f"its last heartbeat came {age} s ago"))
        expected = ["decode-0 is silent: its last heartbeat came 1.2 s ago"] if age == "1.2" else []
        assert news.lines(silent) == expected
    news.lines(well)
    ranks = [node(name, "draining", "group decode-0 is draining") for name in ("decode-0", "decode-0/rank-1")]
    assert news.lines(snapshot(105.0, *ranks)) == ["group decode-0 is draining"]
    assert news.lines(snapshot(106.0, node("decode-1", "gone", "it fell silent"))) == ["all nodes take requests again"]


class Terminal(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_one_block_that_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    why = "decode node decode-1 is draining, since an operator asked for it (POST /admin/nodes/decode-1/undrain)"
    with Status() as status:
        monitor = Monitor(status)
        monitor.take(snapshot(100.0, node()), 1.0)
        stderr.truncate(0)
        monitor.take(snapshot(101.0, node(), node("decode-1", "draining", why), tokens=70, ttft=(0, 9, 0, 0)), 2.0)
        news, _, block = stderr.getvalue().rpartition("\r\x1b[J")
        assert f"{why}\n" in news, "news stays above the block"
        lines = block.split("\n")
        assert max(map(len, lines[1:-1])) < columns
        words = " ".join(block.split())
        assert words.startswith(
            "0.0 requests/s 70 tokens/s 0 running 0 waiting ttft p50 150 ms, p95 195 ms decode node"
        )
        monitor.take(None, 3.0)
        assert "the router does not answer" in stderr.getvalue()


def test_without_a_terminal_figures_come_as_lines_while_tokens_flow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stderr = Terminal()
    stderr.is_terminal = False
    monkeypatch.setattr(sys, "stderr", stderr)
    monitor = Monitor(Status())
    for second in range(20):
        now = 100.0 + second
        monitor.take(snapshot(now, done=second // 10, tokens=7 * min(second, 8), uptime_s=second), now)
    lines = stderr.getvalue().splitlines()
    assert lines == [
        "0.0 requests/s; 7 tokens/s; 0 running; 0 waiting",  # of the first second
        "0.0 requests/s; 7 tokens/s; 0 running; 0 waiting",
        "0.1 requests/s; 5 tokens/s; 0 running; 0 waiting",
        "0.1 requests/s; 1 tokens/s; 0 running; 0 waiting",
    ]
    assert monitor.summary(1, tmp_path) == (
        f"1 request done; 56 tokens (7 tokens/s while busy); 0 moves, 1 restart; logs in {tmp_path}"
    )


def test_a_router_that_never_answered_sums_to_nothing(tmp_path: Path) -> None:
    words: Any = Monitor(Status()).summary(0, tmp_path)
    assert words == f"0 requests done; 0 tokens; 0 moves, 0 restarts; logs in {tmp_path}"
