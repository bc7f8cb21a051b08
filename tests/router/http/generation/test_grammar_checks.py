"""Checks of grammars: each is compiled once, faults name the field, and old nodes are not asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from baton.metadata.errors import Overloaded, RequestError, Unavailable
from baton.router.fair_turns import FairTurns
from baton.router.http.generation import grammar_checks
from baton.router.http.generation.grammar_checks import GrammarChecks
from baton.router.nodes.node import Node, NodeGroup
from baton.router.text.grammar import Grammar, GrammarFault, GrammarSource
from baton.router.text.grammar_process import GrammarProcess, LoadTokenizer

from ...sites import add_node, make_group, make_hello

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
    monkeypatch.setattr(grammar_checks, "MAX_KEPT", 2)
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
