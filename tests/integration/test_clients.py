"""The official clients with the demo model in real processes: structured output, messages and responses. All tests
share a cluster and leave it idle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from cluster import Cluster, held, wait_until
from pydantic import BaseModel, Field

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
ASKED: list[Any] = [{"role": "user", "content": "Describe a cat."}]


class Animal(BaseModel):
    """What the demo model, which has never seen JSON, must write. Every field is bounded: the model could write names
    until the context is full."""

    kind: Literal["cat", "dog"]
    legs: Annotated[int, Field(ge=0, le=100)]
    tame: bool | None
    names: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=3)]


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
    with Cluster(tmp_path_factory.mktemp("clients"), DEMO, is_forked=True) as cluster:
        yield cluster.start(node_flags=["--num-pages", "600"])


@pytest.fixture
def demo(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    wait_until(lambda: not held(shared.ledger()), lambda: f"idle books: {held(shared.ledger())}")


@pytest.fixture
def client(demo: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(demo: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.base_url, api_key="none", max_retries=0) as client:
        yield client


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


def test_three_apis_give_one_text(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Greedy text, its end and its counts are the same by chat completions, messages and responses, whole and
    streamed, with a stop string and without."""
    for num_tokens, stop in ((40, None), (40, "e"), (7, None)):
        chat = client.chat.completions.create(
            model="demo", messages=ASKED, temperature=0, max_completion_tokens=num_tokens, stop=stop
        )
        text, finish = chat.choices[0].message.content, chat.choices[0].finish_reason
        assert chat.usage is not None
        counts = (chat.usage.prompt_tokens, chat.usage.completion_tokens)

        given: dict[str, Any] = {"model": "demo", "messages": ASKED, "max_tokens": num_tokens}
        given |= {"extra_body": {"temperature": 0}, "stop_sequences": [stop] if stop else []}
        with claude.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
        for message in (claude.messages.create(**given), streamed):
            assert "".join(block.text for block in message.content if block.type == "text") == text
            reason = "max_tokens" if finish == "length" else "stop_sequence" if stop else "end_turn"
            assert (message.stop_reason, message.stop_sequence) == (reason, stop if reason == "stop_sequence" else None)
            num_prompt = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
            assert (num_prompt, message.usage.output_tokens) == counts
        assert claude.messages.count_tokens(model="demo", messages=ASKED).input_tokens == counts[0]
        if stop is not None:
            continue  # responses have no stop strings
        given = {"model": "demo", "input": ASKED, "temperature": 0, "max_output_tokens": num_tokens}
        *_, last = client.responses.create(stream=True, **given)
        assert last.type in ("response.completed", "response.incomplete")
        for response in (client.responses.create(**given), last.response):
            assert response.output_text == text
            assert response.status == ("incomplete" if finish == "length" else "completed")
            assert response.usage is not None
            assert (response.usage.input_tokens, response.usage.output_tokens) == counts


def test_structured_output_of_the_other_apis(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """The output is greedy, because these APIs have no seed: a sampled one could be white space without end."""
    response = client.responses.parse(model="demo", input=ASKED, text_format=Animal, temperature=0)
    assert isinstance(response.output_parsed, Animal)
    with client.responses.stream(model="demo", input=ASKED, text_format=Animal, temperature=0) as events:
        assert isinstance(events.get_final_response().output_parsed, Animal)
    message = claude.messages.create(
        model="demo",
        max_tokens=300,
        messages=ASKED,
        output_config={"format": {"type": "json_schema", "schema": SCHEMAS["flat"]}},
        extra_body={"temperature": 0},
    )
    (block,) = message.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMAS["flat"])


def test_streams_end_well_when_their_client_leaves(demo: Cluster, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="demo", max_tokens=1000, messages=ASKED) as stream:
        next(iter(stream.text_stream))
    wait_until(lambda: not held(demo.ledger()), lambda: f"idle books: {held(demo.ledger())}")
