"""A random model must call a tool: real nodes mask everything else, with and without speculation."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import openai
import pytest
from checkpoints import make_checkpoint
from served import Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 8, "pattern": "^[a-z ]*$"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{# <tool_call> arguments #}"
)


def ask(served: Served, **more: Any) -> Any:
    """Ask for chat completions in a thread, step the nodes meanwhile, and return the answer."""
    answers: list[Any] = []

    def run() -> None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            given: Any = {"model": served.model.name, "messages": [{"role": "user", "content": "hello"}]}
            answers.append(client.chat.completions.create(**given, tools=TOOLS, max_tokens=300, **more))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    served.run(lambda: not thread.is_alive(), 120.0)
    return answers[0]


@pytest.fixture(scope="module", params=[("none", "hermes"), ("ngram", "hermes"), ("ngram", "pythonic")])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "random")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    speculative, parser = request.param
    with Served(model, router={"tool_parser": parser}, num_pages=512, speculative=speculative) as served:
        yield served.up()


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5, "n": 3}], ids=["greedy", "seeded"]
)
def test_required_calls_are_whole_and_valid(served: Served, sampling: dict[str, Any]) -> None:
    answer = ask(served, tool_choice="required", parallel_tool_calls=False, **sampling)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls", choice
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    served.check_books()


def test_a_named_tool_is_called_once(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(served, tool_choice=choice, temperature=0.8, seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    served.check_books()
