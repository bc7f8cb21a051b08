"""`baton bench` from its command line to its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from baton.deploy.bench.compare import read_report
from baton.deploy.cli import main

from .conftest import TimetableServer

SHORT = ["--seconds", "0.3", "--arrivals", "constant", "--rate", "20", "--prompt-len", "40", "--tokens", "4"]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_API_KEY", "OPENAI_API_KEY", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def bench(server: TimetableServer, *argv: str) -> int:
    return main(["bench", "--url", server.url, *SHORT, *argv])


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_fits_the_terminal(
    server: TimetableServer, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    server.faults = ["silent"] + [429] * 2  # the first request opens the way
    assert bench(server) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    assert f"{server.url}: fake 7, model toy" in words and "5 sent, 3 answered" in words
    assert "failed: 2 x HTTP 429: the queue is full" in words and "prompts of random token ids" in words
    assert ("p90" in words) == (columns == 80) and "ttft" in words and "good: " in words


def test_all_that_is_needed_to_repeat_a_run_is_in_its_file(
    server: TimetableServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", server_key := "very-secret")
    server.key = server_key
    path, picture = tmp_path / "a.json", tmp_path / "a.svg"
    assert bench(server, "--repeat", "2", "--rate", "30", "--json", str(path), "--svg", str(picture)) == 0
    assert server_key not in path.read_text() and ElementTree.parse(picture)
    found = read_report(path)
    assert [(load.rate, load.repeat) for load in found.loads] == [(20, 1), (20, 2), (30, 1), (30, 2)]
    assert (found.server, found.model, found.url) == ("fake 7", "toy", server.url)
    assert found.settings["prompt_len"] == "40" and "--prompt-len=40" in found.command
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    assert {len(prompt) for prompt in prompts} == {40} and len(set(prompts)) == len(prompts), "none is cached"
    server.forget()
    assert bench(server, "--repeat", "2", "--rate", "30", "--seed", str(found.prompt_seed)) == 0
    assert sorted(prompts) == sorted(tuple(body["prompt"]) for body in server.bodies[1:])


@pytest.mark.parametrize("argv", [["--chat"], ["--turns", "2"]])
def test_a_server_that_tells_no_ids_gets_words_of_as_many_tokens(server: TimetableServer, argv: list[str]) -> None:
    """Its tokenizer is unknown, so the first requests find how many tokens words have."""
    server.vocab_size = None if argv == ["--chat"] else 50
    server.sends_token_ids = False
    assert bench(server, *argv) == 0
    prompts = [body["messages"][0]["content"] if argv == ["--chat"] else body["prompt"] for body in server.bodies[3:]]
    assert min(len(prompt.split()) for prompt in prompts) == pytest.approx((40 - 5) / 3, abs=1)


def test_a_trace_is_replayed(server: TimetableServer, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"timestamp": 5, "input_length": 9, "output_length": 3}\n' * 3)
    assert main(["bench", "--url", server.url, "--trace", str(tmp_path / "trace"), "--no-ignore-eos"]) == 0
    bodies = server.bodies[1:]
    assert [(len(body["prompt"]), body["max_tokens"], "ignore_eos" in body) for body in bodies] == [(9, 3, False)] * 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "nothing listens at http://127.0.0.1:9"),
        (["--url", "ftp://x"], "write it like http://127.0.0.1:8000"),
        (["--url", "http://me:pw@127.0.0.1:9"], "give it by BATON_API_KEY"),
        (["--model", "other"], "does not serve other; it serves toy"),
        (["--prompt-len", "5000"], "has 5,004 tokens, and toy takes 4,096"),
        (["--turns", "40", "--turn-len", "99-120"], "has 4,880 tokens, and toy takes 4,096"),
        (["--prompt-len", "9-5"], "--prompt-len 9-5: use a number"),
        (["--rate", "fast"], "--rate 20 fast: use numbers"),
        (["--slo", "12"], "TTFT,TPOT such as 200,12"),
        (["--arrivals", "constant", "--burstiness", "2"], "needs --arrivals poisson"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--prefix-len", "40"], "must be less than --prompt-len 40"),
        (["--json", "/no/such/place/a.json"], "there is no folder /no/such/place"),
        (["--trace", "/no/such/trace"], "/no/such/trace cannot be read"),
        (["--seconds", "0"], "--seconds is 0.0; it must be more than 0"),
        (["--compare", "/no/such/a.json", "b.json"], "/no/such/a.json cannot be read"),
    ],
)
def test_a_wrong_flag_is_one_sentence(
    server: TimetableServer, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, *argv) in (1, 2)
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("baton: error: ") and said.err.count("\n") == 1
    assert words in said.err and server.bodies == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("key", "the API key is wrong (HTTP 401); set BATON_API_KEY or OPENAI_API_KEY"),
        ("foreign", "has no OpenAI-compatible interface: GET /v1/models answers HTTP 404"),
        ("refuses", "the first request failed, HTTP 400: the queue is full"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_sentence(
    server: TimetableServer, fault: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "key" if fault == "key" else None
    server.faults = [400] if fault == "refuses" else []
    server.url += "/elsewhere" if fault == "foreign" else ""
    assert bench(server) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("about", "vocab_size", "words"),
    [
        ({"id": ["a"]}, 50, "has no OpenAI-compatible interface: GET /v1/models answers HTTP 200"),
        ({"id": "toy", "max_model_len": "long"}, 50, "has no OpenAI-compatible interface"),
        ({"id": "toy"}, -5, ""),
        ({"id": "\x1b[31m<b>toy</b>", "owned_by": "\x1b]0;you\x07"}, 10**30, ""),
    ],
)
def test_a_server_that_answers_nonsense_is_told_so(
    server: TimetableServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    about: dict[str, Any],
    vocab_size: int,
    words: str,
) -> None:
    server.about, server.vocab_size = about, vocab_size
    picture = tmp_path / "a.svg"
    assert bench(server, "--svg", str(picture)) == (1 if words else 0)
    out, err = capsys.readouterr()
    assert words in err and "\x1b" not in out + err
    assert words or ElementTree.parse(picture)
