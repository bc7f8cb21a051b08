"""The terminal of `baton up`: a signal ends a wait, and the progress line shows the state of each process."""

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

from baton.deploy.client import Client
from baton.deploy.terminal import Signals, Status, own_command, ready_text


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
    monkeypatch.setenv("COLUMNS", "100")
    with Status(["prefill-0", "decode-0"]) as status:
        status.take("router", ["12:00:00.000 I router serving HTTP"])
        status.take("prefill-0", ["12:00:00.000 I prefill-0 first", "12:00:00.000 I prefill-0 loading weights"])
        status.take("decode-0", ['{"level": "info", "event": "capturing graphs"}'])
        status.draw(3.0)
        drawn = stderr.getvalue()
        status.tell("decode-0 serves again")
    assert "   3 s  prefill-0: loading weights" in drawn and "decode-0: capturing graphs" in drawn
    assert "first" not in drawn and "router" not in drawn and "\n" not in drawn
    assert "\x1b[Kdecode-0 serves again\n" in stderr.getvalue()
    assert stderr.getvalue().endswith("\r\x1b[K"), "the progress line is erased at the end"


def test_without_a_terminal_every_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Status(["decode-0"]) as status:
        status.take("router", ["one", "two"])
        status.draw(1.0)
        status.tell("three")
    assert stderr.getvalue() == "  router: one\n  router: two\nthree\n"


class OneModel(Client):
    def model_names(self) -> list[str]:
        return ["demo"]


def test_the_printed_request_finds_the_key_wherever_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell that does not know it: the commands up to the request are pasted."""
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    client = OneModel("http://127.0.0.1:1")
    directory = tmp_path / "with space"
    directory.mkdir()
    text = ready_text(client, directory, "it's secret")
    assert "secret" not in text and (directory / "api.key").stat().st_mode & 0o77 == 0
    export = next(line for line in text.splitlines() if "export" in line)
    said = subprocess.run(["sh", "-c", f'{export}; echo "$BATON_API_KEY"'], capture_output=True, text=True, check=True)
    assert said.stdout == "it's secret\n"
    monkeypatch.setenv("BATON_API_KEY", "known")
    text = ready_text(client, tmp_path, "known")
    assert "export" not in text and "$BATON_API_KEY" in text
    assert "BATON_API_KEY" not in ready_text(client, tmp_path, None)


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
