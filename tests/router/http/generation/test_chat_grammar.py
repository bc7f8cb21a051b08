"""Budgets of thoughts in chat completions: the grammar that nodes get, alone and with what else binds the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.metadata.wire import messages
from baton.router.text.tokenizer import TextTokenizer

from ...conftest import RunningRouter, System
from ..chats import NOW, TEMPLATE, USER, call

OPEN = TEMPLATE + "{# </think> #}{% if enable_thinking is not defined %}<think>{% else %}<think></think>{% endif %}"
UNDECIDED = TEMPLATE + "{# <think></think> #}"
JSON: Any = {"response_format": {"type": "json_object"}}
FORCED: Any = {"tools": [NOW], "tool_choice": "required"}
AUTO: Any = {"tools": [NOW]}


@pytest.fixture
def make_thinker(make_router: Callable[..., RunningRouter], tokenizer_file: bytes) -> Iterator[Callable[..., System]]:
    """Make systems whose tokenizer has the marks of thoughts and of Hermes' calls, as Qwen 3's has them."""
    systems: list[System] = []
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    inner.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in marks])
    data = inner.to_str().encode()

    def make(template: str, **more: Any) -> System:
        given: dict[str, Any] = {"template": template, "vocab_size": 424, "context_len": 4096, **more}
        systems.append(System(make_router(), TextTokenizer(data), data, **given))
        return systems[-1].up()

    yield make
    for system in systems:
        system.router.wait_idle()
        system.cluster.close()


def ask(system: System, **more: Any) -> tuple[int, Any]:
    body = {"model": "fake", "messages": [USER], "max_tokens": 60, **more}
    return system.router.request("POST", "/v1/chat/completions", body)[:2]


def grammar_of(system: System, text: str, **more: Any) -> str | None:
    """Let the nodes say a text, and return the grammar that they got."""
    ids = system.say(text)
    system.cluster.script = lambda prompt, choice: ids
    status, answer = ask(system, **more)
    assert status == 200, answer
    sent = [system.cluster.by_name(name) for name in ("p0", "d0")]
    grammars = {
        sent[0].got(messages.Prefill)[-1].request.params.grammar,
        sent[1].got(messages.Reserve)[-1].request.params.grammar,
    }
    assert len(grammars) == 1
    return grammars.pop()


def takes(system: System, grammar: str | None, text: str) -> bool:
    assert grammar is not None
    ids = system.tokenizer.inner.encode(text).ids
    matcher = LLMatcher(LLTokenizer(system.cluster.tokenizer.decode(), n_vocab=424, eos_token=1), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("template", [OPEN, UNDECIDED], ids=["open", "undecided"])
@pytest.mark.parametrize(
    ("more", "answer", "other"),
    [
        ({}, "free <|im_end|>", None),
        (AUTO, f"free {call('now', {})}", None),
        (JSON, '{"a": 1}', "free"),
        (FORCED, call("now", {}), "free"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
    ],
    ids=["alone", "auto", "json", "forced", "choice"],
)
def test_the_thoughts_are_bounded_whatever_binds_the_answer(
    make_thinker: Callable[..., System], template: str, more: dict[str, Any], answer: str, other: str | None
) -> None:
    system, begin = make_thinker(template), "" if template == OPEN else "<think>"
    grammar = grammar_of(system, f"{begin}hm</think>{answer}", thinking_token_budget=4, **more)
    for count, is_allowed in ((0, True), (4, True), (5, False), (40, False)):
        text = f"{begin}{'!' * count}</think>"
        assert takes(system, grammar, text + answer) == is_allowed, (grammar, text)
        assert other is None or not takes(system, grammar, text + other)
    assert not takes(system, grammar, f"{begin}!!"), "the text does not end in thoughts"
    assert takes(system, grammar, answer) == (template == UNDECIDED)
    if other is not None:
        assert takes(system, grammar_of(system, answer, **more), f"{begin}{'!' * 40}</think>{answer}")


def test_no_thought_at_all(make_thinker: Callable[..., System]) -> None:
    system = make_thinker(OPEN)
    grammar = grammar_of(system, "</think>free", thinking_token_budget=0)
    assert takes(system, grammar, "</think>free") and not takes(system, grammar, "!</think>free")


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER, {"role": "assistant", "content": "Y"}], "continue_final_message": True},
    ],
    ids=["thinking is off", "an answer goes on"],
)
def test_without_thoughts_a_budget_has_no_effect(make_thinker: Callable[..., System], more: dict[str, Any]) -> None:
    system = make_thinker(OPEN)
    assert grammar_of(system, "Yes.", thinking_token_budget=4, **more) is None
    with_format = [
        grammar_of(system, '{"a": 1}', **more, **JSON, **each) for each in ({}, {"thinking_token_budget": 4})
    ]
    assert with_format[0] == with_format[1] is not None


def test_what_cannot_be_bounded_is_refused(make_system: Callable[..., System]) -> None:
    """Marks that are several tokens, as in this tokenizer, cannot be counted."""
    system = make_system(template=OPEN, context_len=4096).up()
    for more in ({}, AUTO, FORCED, JSON):
        status, answer = ask(system, thinking_token_budget=4, **more)
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget"), answer
        assert "the length of this model's thoughts cannot be set" in answer["error"]["message"]


def test_marks_that_are_tokens_close_thoughts_without_a_budget(make_thinker: Callable[..., System]) -> None:
    """No text of a grammar means such a token, so rules must name it by its id, also if the tokenizer does not call it
    special."""
    system = make_thinker(OPEN)
    for more, answer in ((JSON, '{"a": 1}'), (FORCED, call("now", {}))):
        grammar = grammar_of(system, f"hm</think>{answer}", **more)
        assert takes(system, grammar, f"hm</think>{answer}")
        assert not takes(system, grammar, f"hm</think>free {answer}")
