"""Structured output: the grammar that nodes get for each field, and bodies that are refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from thinned import thinned

from baton.metadata.errors import Overloaded, RequestError, Unavailable
from baton.metadata.wire import messages as m
from baton.router.http.generation import grammars
from baton.router.http.generation.grammars import GrammarChecks
from baton.router.nodes.node import Node, NodeGroup
from baton.router.tenants.fair_turns import FairTurns
from baton.router.text.grammar import Grammar, GrammarFault, GrammarSource
from baton.router.text.grammar_process import GrammarProcess, LoadTokenizer

from ...conftest import System
from ...dispatching.test_runner import own
from ...sites import add_node, make_group, make_hello

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
BODIES = {
    "/v1/completions": {"model": "fake", "prompt": "hello", "max_tokens": 100},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}

SERVED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '"type": "object"'),
    ({"response_format": FORMAT}, '"required": ["a"]'),
    ({"response_format": {"type": "structural_tag", **TAG}}, "%json"),
    ({"structured_outputs": {"json": SCHEMA}}, '"required": ["a"]'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, '"required": ["a"]'),
    ({"structured_outputs": {"json_object": True}}, '"type": "object"'),
    ({"structured_outputs": {"regex": "a+"}}, "/a+/"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, 'start: "yes" | "no"'),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag", **TAG}}}, "%json"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "%json"),
    ({"response_format": FORMAT}, '"whitespace_pattern": "'),
    ({"response_format": {"type": "structural_tag", **TAG}}, '"whitespace_pattern": "'),
    (
        {"response_format": FORMAT, "structured_outputs": {"disable_any_whitespace": True}},
        '"whitespace_flexible": false',
    ),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, '"whitespace_pattern": "[ ]?"'),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, '"whitespace_pattern": "'),
]


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    thinned(
        [(path, *served) for served in SERVED for path in BODIES],
        lambda i, *_: i % 4 in (0, 3),  # half of the fields in each route
    ),
)
def test_both_nodes_get_the_grammar(system: System, path: str, fields: dict[str, Any], part: str) -> None:
    status, body, _ = system.router.request("POST", path, {**BODIES[path], **fields})
    assert status == 200, body
    asked = [*own(system.cluster.by_name("p0"), m.Prefill), *own(system.cluster.by_name("d0"), m.Reserve)]
    grammars = {message.request.params.grammar for message in asked}
    assert len(asked) == 2 and len(grammars) == 1
    assert part in grammars.pop()


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_without_a_grammar_none_is_sent(system: System, fields: dict[str, Any]) -> None:
    assert system.complete(**fields)[0] == 200
    assert [message.request.params.grammar for message in own(system.cluster.by_name("p0"), m.Prefill)] == [None]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format: type 'json_schema' needs json_schema"),
    ({"response_format": {**FORMAT, "type": "text"}}, "response_format: type 'text' has no json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not served; served are: json_object, "),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"items": {"uniqueItems": True}}},
            }
        },
        'response_format.json_schema.schema.items: "uniqueItems" cannot be enforced',
    ),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex: excludes response"),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "a*"}},
        "structured_outputs.whitespace_pattern: must be a regular expression of spaces",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *", "disable_any_whitespace": True}},
        "structured_outputs.whitespace_pattern: excludes disable_any_whitespace",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}},
        "structured_outputs.whitespace_pattern: must",
    ),
    ({"structured_outputs": {}}, "structured_outputs: needs one of json, json_object, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice: excludes structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex: at 1(8): invalid regex"),
    ({"structured_outputs": {"json": "["}}, "structured_outputs.json: must be a JSON schema"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: cannot be read"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json: must be a JSON schema"),
    ({"structured_outputs": {"json": {"a": "x" * (1 << 17)}}}, "structured_outputs.json: has 131081 bytes; at most"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag: Expected `object`"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx: unknown field; the nearest known field is regex"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: excludes structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_with_its_place(system: System, fields: dict[str, Any], words: str) -> None:
    for path, body in BODIES.items():
        status, answer, _ = system.router.request("POST", path, {**body, **fields})
        assert status == 400, answer
        assert answer["error"]["message"].startswith(words), answer
        assert answer["error"]["param"] == words.partition(":")[0].partition(".")[0]


@pytest.mark.timing
def test_streams_go_on_while_a_hostile_schema_is_refused(system: System) -> None:
    """The event loop never pauses for long, and the schema costs a bounded time."""
    hostile = {"properties": {f"p{i}": {"type": "string"} for i in range(3500)}}
    assert system.complete(structured_outputs={"json": SCHEMA})[0] == 200  # the process runs
    longest, last, is_over = [0.0], [0.0], threading.Event()

    def tick() -> None:
        now = time.monotonic()
        longest[0], last[0] = max(longest[0], now - (last[0] or now)), now
        if not is_over.is_set():
            loop.call_later(0.001, tick)

    loop = system.router._loop
    loop.call_soon_threadsafe(tick)
    begun = time.monotonic()
    try:
        status, answer, _ = system.complete(structured_outputs={"json": hostile})
    finally:
        is_over.set()
    assert status == 400
    assert answer["error"]["message"] == "structured_outputs.json: takes more than 0.5 s to compile; make it smaller"
    assert time.monotonic() - begun < 10
    print(f"longest pause {1000 * longest[0]:.1f} ms")
    assert longest[0] < 0.25  # 50 ms on a machine that does nothing else


GOOD = GrammarSource("regex", "a+")


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


@pytest.fixture
def group() -> NodeGroup:
    group = make_group()
    add_node(group, "prefill", "p")
    return group


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that reach the process."""
    sources: list[str] = []
    convert = GrammarProcess.convert

    def watched(self: GrammarProcess, load: LoadTokenizer, source: GrammarSource) -> Grammar | GrammarFault:
        sources.append(source.text)
        return convert(self, load, source)

    monkeypatch.setattr(GrammarProcess, "convert", watched)
    return sources


async def test_a_grammar_is_compiled_once(checks: GrammarChecks, group: NodeGroup, asked: list[str]) -> None:
    texts = await asyncio.gather(*(checks.checked(GOOD, group, "f") for _ in range(5)))
    texts.append(await checks.checked(GOOD, group, "f"))
    assert len(set(texts)) == 1 and "a+" in texts[0]
    assert asked == ["a+"]


async def test_a_fault_is_remembered_and_names_the_field(
    checks: GrammarChecks, group: NodeGroup, asked: list[str]
) -> None:
    source = GrammarSource("json", '{"properties": {"q": {"not": {"type": "null"}}}}')
    for place in ("response_format.json_schema.schema", "structured_outputs.json"):
        with pytest.raises(RequestError, match=r"\.properties\.q: \"not\" cannot be enforced") as caught:
            await checks.checked(source, group, place)
        assert caught.value.param == place.partition(".")[0]
        assert str(caught.value).startswith(f"{place}.properties.q: ")
    assert len(asked) == 1


async def test_few_grammars_are_remembered(
    checks: GrammarChecks, group: NodeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        await checks.checked(GrammarSource("regex", text), group, "f")
    assert asked == ["a", "b", "c", "b"]


async def test_many_waiting_grammars_are_refused(checks: GrammarChecks, group: NodeGroup) -> None:
    checks._turns = FairTurns("grammars", 1, 2)  # type: ignore[attr-defined]
    several = [checks.checked(GrammarSource("regex", "x" * (1 + i)), group, "f") for i in range(4)]
    answers = await asyncio.gather(*several, return_exceptions=True)
    assert [isinstance(answer, str) for answer in answers] == [True, True, True, False]
    assert isinstance(answers[3], Overloaded)


async def test_a_client_that_leaves_does_not_end_the_check_of_another(
    checks: GrammarChecks, group: NodeGroup, asked: list[str]
) -> None:
    first, second = (asyncio.create_task(checks.checked(GOOD, group, "f")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert "a+" in await second
    assert asked == ["a+"]


async def test_nodes_that_know_no_grammars_are_not_asked(checks: GrammarChecks, asked: list[str]) -> None:
    group = make_group()
    hello = msgspec.structs.replace(make_hello("prefill", "p"), protocol_max=5)
    node = Node(hello, group, 0.0)
    group.nodes[node.routing_id] = node
    with pytest.raises(Unavailable, match="earlier release"):
        await checks.checked(GOOD, group, "f")
    assert not asked


async def test_a_model_that_ends_no_text_gets_no_grammar(checks: GrammarChecks, asked: list[str]) -> None:
    hello = make_hello("prefill", "p")
    group = make_group(msgspec.structs.replace(hello, model=msgspec.structs.replace(hello.model, eos_token_ids=())))
    add_node(group, "prefill", "p")
    with pytest.raises(RequestError, match="no token that ends a text"):
        await checks.checked(GOOD, group, "f")
    assert not asked


async def test_nothing_runs_after_the_end(checks: GrammarChecks, group: NodeGroup) -> None:
    await checks.checked(GOOD, group, "f")
    pid = checks._process.pid  # type: ignore[attr-defined]
    executor = checks._turns._executor  # type: ignore[attr-defined]
    assert pid is not None and executor is not None
    late = [asyncio.ensure_future(checks.checked(GrammarSource("regex", text), group, "f")) for text in "bcd"]
    await asyncio.sleep(0)
    checks.close()
    assert {type(each) for each in await asyncio.gather(*late, return_exceptions=True)} <= {
        RequestError,
        Unavailable,
        str,
    }
    executor.shutdown(wait=True)
    assert not Path(f"/proc/{pid}").exists()
    assert checks._process.pid is None  # type: ignore[attr-defined]
