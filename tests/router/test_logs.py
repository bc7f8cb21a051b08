"""The router's log: nothing of a prompt or an output at any level, whatever fails, and the ids of clients' traces."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.metadata.config import ProcessConfig
from baton.metadata.logs import setup_logging
from baton.router.http.generation.output import OutputReading
from baton.router.http.openai.format import CompletionFormat

from .conftest import System
from .http.chats import TEMPLATE, call

MARK = "quagga"  # in every text of a client and of a node
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
USER = {"role": "user", "content": f"{MARK}?"}
TOOL = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {"type": "object"}}}
STOPPED_TEMPLATE = TEMPLATE + "{% if messages[0].role == 'tool' %}{{ raise_exception(messages[0].content) }}{% endif %}"

COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"stream": True, "logprobs": 2, "echo": True, "return_token_ids": True},
    {"stop": [MARK], "n": 2, "user": MARK, "prompt_cache_key": MARK},
    {"structured_outputs": {"choice": [MARK]}},
    {"structured_outputs": {"regex": f"({MARK}"}},
    {"structured_outputs": {"grammar": f"root ::= {MARK} ("}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": MARK}}}},
    {"temperature": MARK},
    {MARK: MARK},
    {"max_tokens": 1 << 40},
    {"prompt": MARK * 2000},
    {"prompt": f"\ud800{MARK}"},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"stream": True, "tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": f"{MARK}s"}}},
    {"messages": [{"role": "tool", "content": MARK, "tool_call_id": MARK}]},
    {"messages": [{"role": MARK, "content": MARK}]},
]


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a router writes to stderr at the level debug."""
    root, baton, stream = logging.getLogger(), logging.getLogger("baton"), io.StringIO()
    before = (list(root.handlers), root.level, baton.level)
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging(ProcessConfig(log_level="debug", log_format=request.param), "router")
    yield stream
    root.handlers[:], root.level = before[0], before[1]
    baton.setLevel(before[2])


def fail(*texts: object) -> Any:
    raise ValueError(f"{MARK}: {texts}")


def test_no_text_of_a_client_or_of_a_node_is_logged(
    make_system: Callable[..., System], log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = make_system(template=STOPPED_TEMPLATE, context_len=4096)
    system.text = f"{MARK}!\n{call(MARK, {MARK: MARK})}<tool_call>{{{MARK}"  # of canaries too, so before the first
    system.up(num_decode=2)
    post = system.router.request
    statuses = [system.complete(**{"prompt": f"{MARK} one", **fields})[0] for fields in COMPLETIONS]
    assert set(statuses) == {200, 400}
    for fields in CHATS:
        assert post("POST", "/v1/chat/completions", {"model": "fake", "messages": [USER], **fields})[0] in (200, 400)
    for path, body in (
        ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": [USER], "system": MARK}),
        ("/v1/responses", {"model": "fake", "input": MARK, "instructions": MARK}),
        ("/v1/completions", f'{{"prompt": "{MARK}'.encode()),
    ):
        post("POST", path, body)

    defects = (  # of ours, whose exceptions quote texts
        (CompletionFormat, "whole", "/v1/completions", {"prompt": MARK}),
        (CompletionFormat, "chunk", "/v1/completions", {"prompt": MARK, "stream": True}),
        (OutputReading, "new_reader", "/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    )
    for kind, method, path, body in defects:
        with monkeypatch.context() as broken:
            broken.setattr(kind, method, fail)
            post("POST", path, {"model": "fake", **body})
    system.router.wait_idle()
    page = log.getvalue()
    assert page.count("ValueError") >= len(defects) and "refused" in page and page.count("done: ") >= 8
    assert MARK not in page.lower()


def test_the_lines_of_a_request_carry_the_id_of_its_clients_trace(system: System, log: io.StringIO) -> None:
    def lines_of(traceparent: str) -> list[str]:
        body = {"model": "fake", "prompt": "hello"}
        answer = system.router.request("POST", "/v1/completions", body, {"traceparent": traceparent})[1]
        system.router.wait_idle()
        return [line for line in log.getvalue().splitlines() if answer["id"] in line]

    lines = lines_of(f"00-{TRACE_ID}-00f067aa0ba902b7-01")
    assert len(lines) >= 3 and all(TRACE_ID in line for line in lines), lines
    if lines[0].startswith("{"):
        entries = [json.loads(line) for line in lines]
        assert {entry["trace_id"] for entry in entries} == {TRACE_ID}
        assert all({"time", "level", "rid", "node", "event"} <= entry.keys() for entry in entries)
    for wrong in (f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE_ID[1:]}-1-01", "x" * 600):
        assert not [line for line in lines_of(wrong) if "trace_id" in line]
