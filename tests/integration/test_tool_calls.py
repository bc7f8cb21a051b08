"""Tool calls and thoughts from real nodes: a model that says one text, and OpenAI's client."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from served import Served
from speaker import make_speaker

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>"
    "{# <think></think> <tool_call> {{ arguments }} #}"
)
ARGUMENTS = {"city": "Paris — é", "days": [1, 2.5, None], "note": 'a </tool_call> in "quotes"'}
TEXT = (
    "<think>\nThey want the weather; I call the tool.\n</think>\n\nOne moment.\n"
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now")]


class Chat(threading.Thread):
    """A chat in its own thread: the message and finish reason, and the usage."""

    def __init__(self, url: str, model: str, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self._url, self._model, self._is_streamed = url, model, stream
        self.num_chunks = 0
        self.message: Any = None
        self.finish_reason: Any = None
        self.usage: Any = None
        self.start()

    def run(self) -> None:
        given: Any = {"model": self._model, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
            if not self._is_streamed:
                answer = client.chat.completions.create(**given, temperature=0)
            else:
                options: Any = {"include_usage": True}
                with client.chat.completions.stream(**given, temperature=0, stream_options=options) as stream:
                    for _ in stream:
                        self.num_chunks += 1
                    answer = stream.get_final_completion()
        self.message, self.finish_reason = answer.choices[0].message, answer.choices[0].finish_reason
        self.usage = answer.usage

    def check(self) -> None:
        """Check that the message has all of TEXT."""
        assert self.finish_reason == "tool_calls"
        assert self.message.content == "One moment."
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in self.message.tool_calls]
        assert calls == [("get_weather", ARGUMENTS), ("now", {})]
        assert self.message.reasoning_content == "They want the weather; I call the tool."
        assert 0 < self.usage.completion_tokens_details.reasoning_tokens < self.usage.completion_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_speaker(tmp_path_factory.mktemp("model") / "speaker", TEXT, TEMPLATE)
    with Served(model, num_pages=512) as served:
        yield served.up(num_decode=2)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_from_real_nodes(served: Served, stream: bool) -> None:
    chat = Chat(served.url, served.model.name, stream=stream)
    served.run(lambda: not chat.is_alive())
    chat.check()
    served.check_books()


def test_items_of_responses_come_from_real_nodes(served: Served) -> None:
    given: Any = {"model": served.model.name, "input": "hello", "temperature": 0}
    given["tools"] = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]
    answers: list[Any] = []

    def ask() -> None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            answers.append(client.responses.create(**given))
            with client.responses.stream(**given) as stream:
                answers.append(stream.get_final_response())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    served.run(lambda: not thread.is_alive())
    assert len(answers) == 2
    for answer in answers:
        thoughts, text, *calls = answer.output
        assert thoughts.content[0].text == "They want the weather; I call the tool."
        assert (text.type, answer.output_text) == ("message", "One moment.")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", ARGUMENTS), ("now", {})]
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    served.check_books()


def test_a_call_survives_the_death_of_its_decode_node(served: Served) -> None:
    """The router keeps the parsers, so a move in the middle of the arguments does not show."""
    chat = Chat(served.url, served.model.name, stream=True)
    served.run(lambda: chat.num_chunks >= 40)
    holder = served.holder("decode")
    assert holder is not None
    served.kill(holder)
    served.run(lambda: not chat.is_alive())
    chat.check()
    served.check_books()
