"""Streams that say which tokens are accepted drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.request import unpack_ids

from ...conftest import System
from ...fake_nodes import FakeNode


def marked(_node: FakeNode, messages: list[m.Tokens]) -> list[m.Tokens]:
    """Messages of a node whose every fourth token is sampled, and the others are accepted drafts."""

    def flags(message: m.Tokens) -> bytes:
        [first], [count] = unpack_ids(message.firsts), unpack_ids(message.counts)
        return bytes(place % 4 != 0 for place in range(first, first + count))

    return [msgspec.structs.replace(each, drafts={0: flags(each)}) for each in messages]


def choices(system: System, path: str, **body: Any) -> list[dict[str, Any]]:
    asked = {"model": "fake", "max_tokens": 100, "stream": True, "stream_options": {"include_drafts": True}, **body}
    asked |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    status, answer, _ = system.router.request("POST", path, asked)
    assert status == 200, answer
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    return [choice for event in events for choice in event["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_token_says_its_text_and_whether_it_was_drafted(system: System, path: str) -> None:
    system.behaviour.step_tokens, system.behaviour.change_tokens = 4, marked
    found = choices(system, path, n=2)
    for index in (0, 1):
        own = [choice for choice in found if choice["index"] == index]
        for choice in own:
            drafts = choice.get("drafts", [])
            assert "".join(draft["text"] for draft in drafts) == text_of(choice)
        tokens = [draft for choice in own for draft in choice.get("drafts", [])]
        assert len(tokens) == len(system.say(system.text)), "one entry per token, the end of the sequence included"
        assert [draft["is_draft"] for draft in tokens] == [place % 4 != 0 for place in range(len(tokens))]
    for options in (None, {"include_drafts": False}, {"include_usage": True}):
        assert not any("drafts" in choice for choice in choices(system, path, stream_options=options))
    system.behaviour.change_tokens = None


def test_thoughts_and_calls_have_the_tokens_of_the_whole_output(make_system: Callable[..., System]) -> None:
    system = make_system({"reasoning_parser": "deepseek_r1"}).up()
    system.text = "<think>a quick thought</think>the answer"
    found = choices(system, "/v1/chat/completions")
    tokens = [draft for choice in found for draft in choice.get("drafts", [])]
    assert "".join(draft["text"] for draft in tokens) == system.text
    assert "".join(map(text_of, found)) == "the answer"


def test_a_node_of_an_older_release_does_not_say(make_system: Callable[..., System]) -> None:
    system = make_system()
    for role, name in (("prefill", "p0"), ("decode", "d0")):
        system.cluster.add(role, name, protocol_max=6, protocol=6)
    system.router.wait_ready()
    tokens = [draft for choice in choices(system, "/v1/completions") for draft in choice.get("drafts", [])]
    first, *others = [draft["is_draft"] for draft in tokens]
    assert not first, "a prefill node samples its only token, which the decode node may have repeated before"
    assert set(others) == {None}
    assert "".join(draft["text"] for draft in tokens) == system.text


@pytest.mark.parametrize("flags", [b"", b"\1", b"\7" * 1000])
def test_marks_of_a_wrong_length_change_no_text(system: System, flags: bytes) -> None:
    """A node may also mark choices that do not exist, or without being asked."""
    system.behaviour.change_tokens = lambda _node, messages: [
        msgspec.structs.replace(each, drafts={0: flags, 7: b"\1"}) for each in messages
    ]
    found = choices(system, "/v1/completions")
    tokens = [draft for choice in found for draft in choice.get("drafts", [])]
    assert "".join(map(text_of, found)) == "".join(draft["text"] for draft in tokens) == system.text
    assert len(tokens) == len(system.say(system.text))
    assert not any("drafts" in choice for choice in choices(system, "/v1/completions", stream_options=None))


def test_only_streams_have_drafts(system: System) -> None:
    status, body, _ = system.complete(stream_options={"include_drafts": True})
    assert (status, body["error"]["param"]) == (400, "stream_options")
