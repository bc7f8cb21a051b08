"""A random model with thoughts, which it never closes by itself: real nodes close them at the budget, and the tokens
before are those of a request without one."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers
from checkpoints import make_checkpoint
from served import Served
from served_nodes import num_generated
from thinned import halved

MARKS = ("<think>", "</think>")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{# </think> #}<think>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
GREEDY: Any = {"temperature": 0}
SEEDED: Any = {"temperature": 1, "seed": 8, "n": 2}


def begin(served: Served, budget: int | None, **more: Any) -> tuple[threading.Thread, list[Any]]:
    """Ask for chat completions in a thread. Its end brings the answer."""
    answers: list[Any] = []
    extra = {"return_token_ids": True, **({} if budget is None else {"thinking_token_budget": budget})}

    def run() -> None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            given: Any = {"model": served.model.name, "messages": [{"role": "user", "content": "hello"}]}
            answers.append(client.chat.completions.create(**{**given, "max_tokens": 60, **more}, extra_body=extra))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answers


def ask(served: Served, budget: int | None, **more: Any) -> Any:
    """Ask for chat completions, step the nodes meanwhile, and return the answer."""
    thread, answers = begin(served, budget, **more)
    served.run(lambda: not thread.is_alive(), 120.0)
    return answers[0]


@pytest.fixture(scope="module", params=["none", "ngram"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "random", vocab_size=514)
    inner = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert inner.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in MARKS]) == 2
    inner.save(str(model / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with Served(model, num_pages=512, speculative=request.param) as served:
        yield served.up()


def close_id(served: Served) -> int:
    found = tokenizers.Tokenizer.from_file(str(served.model / "tokenizer.json")).token_to_id("</think>")
    assert found == 513
    return found


@pytest.mark.parametrize(("sampling", "budget"), halved([GREEDY, SEEDED], [0, 1, 17]))
def test_thoughts_end_at_their_budget(served: Served, budget: int, sampling: dict[str, Any]) -> None:
    never_closes = {"logit_bias": {"512": -100, str(close_id(served)): -50}}  # by itself; nor does it open them again
    free, bound = (ask(served, each, **sampling, **never_closes) for each in (None, budget))
    for one, other in zip(free.choices, bound.choices, strict=True):
        assert other.token_ids[: budget + 1] == [*one.token_ids[:budget], close_id(served)]
        assert len(other.token_ids) > budget + 1 and other.message.content
    num_thoughts = bound.usage.completion_tokens_details.reasoning_tokens
    assert num_thoughts == len(bound.choices) * (budget + 1), "the closing mark is counted too"
    served.check_books()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_format_binds_the_answer_behind_them(served: Served, sampling: dict[str, Any]) -> None:
    answer = ask(served, 9, response_format=FORMAT, max_tokens=200, **sampling)
    for choice in answer.choices:
        assert choice.token_ids.index(close_id(served)) <= 9
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    served.check_books()


@pytest.mark.parametrize("after", [3, 30])
def test_a_budget_outlives_a_move(served: Served, after: int) -> None:
    """The decode node dies within the thoughts, and behind them. Another one goes on."""
    whole = ask(served, 20, **GREEDY).choices[0].token_ids
    assert whole[20] == close_id(served)
    thread, answers = begin(served, 20, **GREEDY)
    served.run(lambda: num_generated(served) >= after)
    name = served.holder("decode")
    assert name is not None
    served.kill(name)
    served.start("decode", f"{name}-again")
    served.run(lambda: not thread.is_alive())
    assert answers[0].choices[0].token_ids == whole
    served.check_books()
