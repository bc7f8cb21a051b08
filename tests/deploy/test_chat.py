"""`baton chat` against a small real HTTP server that streams as the router does."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from baton.deploy.up import free_port

from .conftest import Server

CHAT = [sys.executable, "-P", "-m", "baton.deploy.cli", "chat", "--url"]


def chat(server: Server, text: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, server.url, *argv],
        input=text,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=200,
        env={**os.environ, **environ},
        check=False,
    )


def test_piped_lines_are_turns_and_history_is_kept(server: Server) -> None:
    result = chat(server, "one\n\ntwo\n", "--system", "be brief", "--temperature", "0")
    assert result.stdout == "answer 1 ü\nanswer 2 ü\n"
    assert result.returncode == 0, result.stderr
    last = server.requests[-1]
    assert last["model"] == "toy"
    assert last["temperature"] == 0
    assert "top_p" not in last, "what is not given is the model's own default"
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["messages"][2]["content"] == "answer 1 ü"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of the locales en_US.UTF-8 and C.UTF-8
def test_bytes_that_are_no_text_are_replaced(server: Server, errors: str) -> None:
    """As in a file in Latin-1."""
    result = chat(server, "caf\udce9\nnext\n", PYTHONIOENCODING=f"utf-8:{errors}")
    assert (result.returncode, result.stdout) == (0, "answer 1 ü\nanswer 2 ü\n"), result.stderr
    assert server.requests[-1]["messages"][0]["content"] == "caf\ufffd"


def test_a_terminal_that_cannot_show_a_character_shows_another(server: Server) -> None:
    result = chat(server, "one\nend length\n", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, "answer 1 ?\nanswer 2 ?\n"), result.stderr


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("length", "(cut at 7 tokens; /max N or --max-tokens N allows more)\n"),
        ("content_filter", "(ended early: content_filter)\n"),
        ("stop", ""),
    ],
)
def test_a_cut_answer_is_reported(server: Server, reason: str, words: str) -> None:
    """The message goes to stderr, so that a pipe receives only the answers."""
    result = chat(server, f"end {reason}\nnext\n", "--max-tokens", "7")
    assert (result.stdout, result.stderr) == ("answer 1 ü\nanswer 2 ü\n", words)
    assert result.returncode == 0


def test_the_longest_answer_can_be_changed(server: Server) -> None:
    result = chat(server, "one\n/max 2000\ntwo\n/reset\n/max\n/max many\n/max 0\n/max 1 2\n/maximum 5\nend length\n")
    assert [request["max_tokens"] for request in server.requests] == [512, 2000, 2000]
    assert result.stderr.count("/max needs a number of tokens, for example /max 4000") == 4
    assert "/maximum is not a command" in result.stderr
    assert "cut at 2000 tokens" in result.stderr


def test_reset_forgets_the_conversation_and_exit_ends_it(server: Server) -> None:
    result = chat(server, "one\n/reset\ntwo\n/nonsense\n/exit\nthree\n")
    assert [len(request["messages"]) for request in server.requests] == [1, 1]
    assert "/nonsense is not a command" in result.stderr


@pytest.mark.parametrize(
    ("question", "words"),
    [("refuse", "no such thing"), ("fail", "a node died"), ("break off", "broke off")],
)
def test_a_failed_answer_is_reported_and_not_kept_in_the_history(server: Server, question: str, words: str) -> None:
    result = chat(server, f"{question}\nafter\n")
    assert words in result.stderr
    assert result.returncode == 1
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["after"]


def test_the_key_comes_from_the_environment(server: Server) -> None:
    chat(server, "one\n", BATON_API_KEY="hunter2")
    assert server.keys == ["Bearer hunter2"]


def test_an_unreachable_router_is_an_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = subprocess.run([*CHAT, url], input="hello\n", capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"nothing listens at {url}" in result.stderr
    assert "baton up" in result.stderr


def test_ctrl_c_stops_the_answer_not_the_program(server: Server) -> None:
    controller, terminal = pty.openpty()
    with (
        subprocess.Popen(
            [*CHAT, server.url], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # whatever fails below must not wait for it
        os.close(terminal)
        os.write(controller, b"slow\n")
        seen = _read_until(controller, b"xxx")
        process.send_signal(signal.SIGINT)
        seen = _read_until(controller, b"(stopped)")
        assert server.left.wait(5), "the router was not told that the client has stopped reading"
        os.write(controller, b"next\n")
        seen = _read_until(controller, b"answer 2")
        assert b"Traceback" not in seen
        os.write(controller, b"/exit\n")
        assert process.wait(10) == 0
    os.close(controller)
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]


def _read_until(file: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(file, 4096)
    return seen
