"""Grammars that bind the answer alone: thoughts come first, with every kind of grammar."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.metadata.wire import messages
from baton.router.http.thoughts_first import thoughts_first
from baton.router.reasoning_parsers.base import ReasoningParser
from baton.router.reasoning_parsers.harmony import HarmonyReasoningParser
from baton.router.reasoning_parsers.think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from baton.router.text.grammar import Grammar, GrammarSource, converted
from baton.router.text.tokenizer import TextTokenizer

from ..conftest import System
from ..sites import text_tokenizer, tokenizer_file
from .chats import TEMPLATE, USER, accepts, say

KINDS: dict[str, tuple[GrammarSource, str, str]] = {  # source, a text that it allows, and one that it does not
    "json": (GrammarSource("json", '{"type": "object", "required": ["a"]}'), '{"a": 1}', "{}"),
    "regex": (GrammarSource("regex", "[a-z]+x"), "abx", "ab"),
    "choice": (GrammarSource("choice", '["yes", "no"]'), "yes", "maybe"),
    "grammar": (GrammarSource("grammar", 'start: a+\na: "ab"'), "abab", "aba"),
    "structural_tag": (
        GrammarSource("structural_tag", '{"structures": [["<f>", {"type": "integer"}, "</f>"]], "triggers": ["<f"]}'),
        "so <f>5</f>.",
        "so <f>x</f>.",
    ),
}


def matcher_of(grammar: str, data: bytes, vocab_size: int) -> LLMatcher:
    matcher = LLMatcher(LLTokenizer(data.decode(), n_vocab=vocab_size, eos_token=1), grammar)
    assert not matcher.get_error()
    return matcher


def allows(grammar: str, text: str) -> bool:
    ids = text_tokenizer().inner.encode(text).ids
    matcher = matcher_of(grammar, tokenizer_file(), 420)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_come_before_every_kind(kind: str) -> None:
    source, good, bad = KINDS[kind]
    tokenizer = LLTokenizer(tokenizer_file().decode(), n_vocab=420, eos_token=1)

    def grammar_after(reasoning: type[ReasoningParser], prompt: str) -> str:
        before = thoughts_first(reasoning, prompt, text_tokenizer(), of_calls=False)
        assert before
        found = converted(msgspec.structs.replace(source, before=before), tokenizer)
        assert isinstance(found, Grammar), found
        return found.text

    grammar = grammar_after(Qwen3ReasoningParser, "assistant\n")
    for before in ("", "<think>\nhm {}\n</think>\n\n"):
        assert allows(grammar, before + good)
        assert not allows(grammar, before + bad)
    assert allows(grammar, "<think>\nhm") == (kind == "structural_tag")  # which allows any text around its tags
    inside = grammar_after(DeepSeekR1ReasoningParser, "")
    assert allows(inside, "hm</think>" + good)
    assert not allows(inside, "hm</think>" + bad)
    behind = grammar_after(Qwen3ReasoningParser, "<think>\n\n</think>\n\n")
    assert allows(behind, good)
    assert not allows(behind, bad)


def test_harmony_binds_the_final_message() -> None:
    marks = HarmonyReasoningParser.markers
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file())
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    data = inner.to_str().encode()
    before = thoughts_first(HarmonyReasoningParser, "", TextTokenizer(data), of_calls=False)
    assert before is not None
    source = GrammarSource("grammar", 'start: "yes"', before)
    found = converted(source, LLTokenizer(data.decode(), n_vocab=440, eos_token=1))
    assert isinstance(found, Grammar), found
    grammar = found.text
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for text, is_allowed in ((f"{thoughts}{final}yes", True), (f"{final}yes", True), (f"{final}no", False)):
        ids, matcher = inner.encode(text).ids, matcher_of(grammar, data, 440)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_allowed
    assert thoughts_first(HarmonyReasoningParser, "", text_tokenizer(), of_calls=False) is None
    assert thoughts_first(None, "", text_tokenizer(), of_calls=True) == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {"type": "object"}}},
    ],
)
def test_a_chat_with_a_schema_may_think(make_system: Any, asked: dict[str, Any]) -> None:
    system: System = make_system(template=TEMPLATE + "{# <think></think> #}", context_len=4096).up()
    say(system, '<think>hm</think>\n{"a": 1}')
    body = {"model": "fake", "messages": [USER], **asked}
    status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"a": 1}', "hm")
    grammar = system.cluster.by_name("p0").got(messages.Prefill)[-1].request.params.grammar
    assert accepts(system, grammar, '<think>hm</think>\n{"a": 1}')
    assert not accepts(system, grammar, "<think>hm</think>\nhello")
