"""The official clients with the demo model in real processes: structured output, messages and responses. All tests
share a cluster and leave it idle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from cluster import Cluster, held, wait_until
from pydantic import BaseModel

pytestmark = pytest.mark.integration

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
ASKED: list[Any] = [{"role": "user", "content": "Describe a cat."}]


class Animal(BaseModel):
    """What the demo model, which has never seen JSON, must write."""

    kind: Literal["cat", "dog"]
    legs: int
    tame: bool | None
    names: list[str]


SCHEMAS: dict[str, Any] = {
    "flat": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1, None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "union": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
    "recursive": {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "$ref": "#/$defs/node",
    },
    "pattern": {"type": "string", "pattern": "^[A-F]{3}-[0-9]{4}$"},
    "format": {"type": "string", "format": "date"},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("clients"), DEMO) as cluster:
        yield cluster.start(node_flags=["--num-pages", "600"])


@pytest.fixture
def demo(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    wait_until(lambda: not held(shared.ledger()), lambda: f"idle books: {held(shared.ledger())}")


@pytest.fixture
def client(demo: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0)


def choices_of(client: openai.OpenAI, **fields: Any) -> list[tuple[str, str]]:
    """Return text and finish reason of each choice, the same whether whole or streamed."""
    given: dict[str, Any] = {"model": "demo", "messages": ASKED, "temperature": 1, "seed": 5, "max_tokens": 300}
    given |= fields
    answer = client.chat.completions.create(**given)
    whole = [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]
    texts, ends = dict.fromkeys(range(len(whole)), ""), dict[int, str]()
    for chunk in client.chat.completions.create(stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [(texts[i], ends[i]) for i in range(len(whole))] == whole
    return whole


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_text_satisfies_its_schema(client: openai.OpenAI, name: str) -> None:
    given = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
    for text, finish in choices_of(client, response_format=given, n=3, extra_body={"min_tokens": 2}):
        if finish == "stop":
            jsonschema.validate(json.loads(text), SCHEMAS[name])
        else:
            assert name == "recursive", (text, finish)


def test_the_text_is_in_the_language_of_a_regular_expression(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"regex": "(ab|c){3,5}!"}}
    texts = choices_of(client, n=4, extra_body=asked, logprobs=True)
    assert all(re.fullmatch("(ab|c){3,5}!", text) and finish == "stop" for text, finish in texts), texts
    ends = choices_of(client, n=2, extra_body={"structured_outputs": {"choice": ["yes!", "no!"]}}, stop="!")
    assert all(text in ("yes", "no") for text, _ in ends), ends


def test_the_clients_own_parser_gets_its_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=ASKED, response_format=Animal, temperature=1, seed=1, max_tokens=600
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
