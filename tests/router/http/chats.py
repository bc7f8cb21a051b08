"""Chats with tools that several test files share: a template of Hermes' format, tools, and what nodes say and get."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import tokenizers

from baton.metadata.wire import messages
from baton.metadata.wire.request import unpack_ids
from baton.router.text.tokenizer import TextTokenizer

from ..conftest import RunningRouter, System
from ..dispatching.test_runner import own

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    TEMPLATE
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    + "{# <think> {{ message.reasoning_content }} #}{{ reasoning_effort }}"
)
TEXT = "<think>\nIt may rain.\n</think>\n\nYes."
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
USER: Any = {"role": "user", "content": "hello"}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


@contextmanager
def marked_system(router: RunningRouter, tokenizer_file: bytes, template: str) -> Generator[System]:
    """Run a system whose tokenizer has a token for each of MARKS, as Qwen 3's does."""
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file)
    inner.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in MARKS])
    data = inner.to_str().encode()
    system = System(router, TextTokenizer(data), data, template=template, vocab_size=424, context_len=4096)
    yield system.up()
    router.wait_idle()
    system.cluster.close()


def say(system: System, text: str) -> None:
    ids = system.say(text)
    system.cluster.script = lambda prompt, choice: ids


def num_tokens(system: System, text: str) -> int:
    return len(system.tokenizer.inner.encode(text).ids)


def prompt_of(system: System) -> str:
    sent = own(system.cluster.by_name("p0"), messages.Prefill)[-1].request
    return system.tokenizer.decode(unpack_ids(sent.prompt_ids))


def accepts(system: System, grammar: str, text: str) -> bool:
    """Whether a grammar allows exactly this text, by the tokens of the system's tokenizer."""
    from llguidance import LLMatcher, LLTokenizer

    ids = system.tokenizer.inner.encode(text).ids
    matcher = LLMatcher(LLTokenizer(system.cluster.tokenizer.decode(), n_vocab=420, eos_token=1), grammar)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
