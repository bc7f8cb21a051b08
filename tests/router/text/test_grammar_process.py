"""The process that compiles grammars: hostile ones cost bounded time and memory, and the next one is served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.metadata.errors import Unavailable
from baton.router.text import grammar_process
from baton.router.text.grammar import Grammar, GrammarFault, GrammarSource
from baton.router.text.grammar_process import MAX_CPU_S, MAX_TOKENIZERS, GrammarProcess, LoadTokenizer

from ..sites import tokenizer_file

GOOD = GrammarSource("regex", "a+")


def load(name: str = "t") -> LoadTokenizer:
    return LoadTokenizer(name, tokenizer_file(), 420, (1,))


@pytest.fixture
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess()
    yield process
    process.close()
    process.join()


HOSTILE = {
    "properties": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3500)}}),
    "references": json.dumps(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{j}"} for j in range(60)]} for i in range(60)},
        }
    ),
}


@pytest.mark.timing
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_in_bounded_time(process: GrammarProcess, name: str) -> None:
    assert isinstance(process.convert(load(), GOOD), Grammar)
    begun = time.monotonic()
    fault = process.convert(load(), GrammarSource("json", HOSTILE[name]))
    assert isinstance(fault, GrammarFault), fault
    assert time.monotonic() - begun < 20 * MAX_CPU_S
    assert isinstance(process.convert(load(), GOOD), Grammar)


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_module", "baton.no_such_module")
    with pytest.raises(Unavailable, match=r"ended with status -?\d+ before it had read the tokenizer"):
        process.convert(load(), GOOD)
    monkeypatch.undo()
    assert isinstance(process.convert(load(), GOOD), Grammar)


def test_a_process_that_dies_is_started_again(process: GrammarProcess) -> None:
    assert isinstance(process.convert(load(), GOOD), Grammar)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSEGV)
    answers = [process.convert(load(), GOOD) for _ in range(2)]
    assert isinstance(answers[1], Grammar)


def test_a_tokenizer_that_the_compiler_does_not_know_is_a_fault(process: GrammarProcess) -> None:
    fault = process.convert(LoadTokenizer("bad", b'{"version": "1.0"}', 420, (1,)), GOOD)
    assert isinstance(fault, GrammarFault)
    assert "tokenizer" in fault.words
    assert isinstance(process.convert(load(), GOOD), Grammar)


def test_tokenizers_that_are_no_longer_served_are_forgotten(process: GrammarProcess) -> None:
    pids: set[int | None] = set()
    for index in range(MAX_TOKENIZERS + 1):
        assert isinstance(process.convert(load(str(index)), GOOD), Grammar)
        pids.add(process.pid)
    assert len(pids) == 2


def test_the_process_ends_when_the_router_has_gone() -> None:
    command = [sys.executable, "-m", grammar_process.__name__]
    ended = subprocess.run(command, input=b"", capture_output=True, timeout=200)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
