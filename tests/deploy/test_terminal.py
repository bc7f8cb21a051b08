"""The terminal of `baton up`: a signal ends a wait, and a block of lines shows the state of each process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.deploy.terminal import Signals, StartProgress, Status, flow, make_key_file, own_command, ready_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.timing
def test_a_signal_ends_the_wait_and_is_counted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        start = time.monotonic()
        signals.wait(20.0)
        assert time.monotonic() - start < 10
        timer.join()
        assert signals.stops == 1
        signals.wait(0.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_terminal_shows_the_last_line_of_each_named_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    with Status() as status:
        progress = StartProgress(["prefill-0", "decode-0"], status)
        progress.take("router", ["12:00:00.000 I router serving HTTP"])
        progress.take("prefill-0", ["12:00:00.000 I prefill-0 first", "12:00:00.000 I prefill-0 loading weights"])
        progress.take("decode-0", ['{"level": "info", "event": "capturing \\u001b[31m of graphs of all kinds"}'])
        progress.draw(3.0)
        block = "\n   3 s  prefill-0: loading weights\n   3 s  decode-0: capturing ?[31m of gr"
        assert stderr.getvalue() == f"\r\x1b[J{block}\x1b[2A\r", "the cursor rests above the block"
        stderr.truncate(0)
        stderr.seek(0)
        status.tell("decode-0 serves again")
        assert stderr.getvalue() == f"\r\x1b[Jdecode-0 serves again\n\r\x1b[J{block}\x1b[2A\r", "it stays on the screen"
    assert stderr.getvalue().endswith("\r\x1b[J"), "the block is erased at the end"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_a_terminal_that_can_draw_every_line_is_printed(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    stderr = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "dumb" if is_terminal else "xterm")
    with Status() as status:
        progress = StartProgress(["decode-0"], status)
        progress.take("router", ["one", "two"])
        progress.draw(1.0)
        status.tell("three")
    assert stderr.getvalue() == "  router: one\n  router: two\nthree\n"


def test_texts_flow_into_lines_and_stay_whole() -> None:
    words = ["1.5 requests/s", "ttft p50 12 ms, p95 40 ms", "3 running"]
    assert flow(words, 80) == ["1.5 requests/s   ttft p50 12 ms, p95 40 ms   3 running"]
    assert flow(words, 40) == ["1.5 requests/s", "ttft p50 12 ms, p95 40 ms   3 running"]
    assert max(map(len, flow(words, 20))) <= 20


def test_the_printed_request_finds_the_key_wherever_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell that does not know it: the commands up to the request are pasted."""
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    url, model = "http://127.0.0.1:1", "demo"
    directory = tmp_path / "with space"
    directory.mkdir()
    file = make_key_file(directory, "it's secret")
    text = ready_text(url, model, directory, asks_key=True, key_file=file)
    assert file is not None and "secret" not in text and file.stat().st_mode & 0o77 == 0
    export = next(line for line in text.splitlines() if "export" in line)
    said = subprocess.run(["sh", "-c", f'{export}; echo "$BATON_API_KEY"'], capture_output=True, text=True, check=True)
    assert said.stdout == "it's secret\n"
    monkeypatch.setenv("BATON_API_KEY", "known")
    assert make_key_file(tmp_path, "known") is make_key_file(tmp_path, None) is None
    text = ready_text(url, model, tmp_path, asks_key=True, key_file=None)
    assert "export" not in text and "$BATON_API_KEY" in text
    assert "BATON_API_KEY" not in ready_text(url, model, tmp_path, asks_key=False, key_file=None)


def test_the_printed_command_is_one_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "a b" / ".venv" / "bin"
    venv.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert own_command() == f"'{venv}/python' -m baton.deploy.cli"
    (venv / "baton").write_text("#!/bin/sh\n")
    (venv / "baton").chmod(0o755)
    assert own_command() == f"'{venv}/baton'"
    monkeypatch.chdir(tmp_path / "a b")
    assert own_command() == ".venv/bin/baton"
    monkeypatch.setenv("PATH", f"{venv}:/usr/bin")
    assert own_command() == "baton"
