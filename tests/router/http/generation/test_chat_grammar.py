"""The grammar of a chat's outputs: budgets of thoughts, and calls, forced or beside a format. llguidance checks it with
the tokens of a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.metadata.wire import messages
from baton.router.http.generation.grammars import literal_of
from baton.router.text.tokenizer import TextTokenizer

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import own
from ..chats import NOW, TEMPLATE, USER, WEATHER, accepts, call, say

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
        own(sent[0], messages.Prefill)[-1].request.params.grammar,
        own(sent[1], messages.Reserve)[-1].request.params.grammar,
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


PATTERN = {"type": "string", "pattern": "^a"}
NOW_TWICE = ", ".join(['{"name": "now", "arguments": {}}'] * 2)
PARIS = call("get_weather", {"city": "Paris é"})
THINKING = TEMPLATE + (
    "{# <think></think> #}{% if enable_thinking is not defined %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def grammar_of_calls(system: System, text: str, **more: Any) -> Any:
    """Let the nodes say a text for a chat with both tools, and return the grammar that they got."""
    say(system, text)
    body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], **more}
    status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return own(system.cluster.by_name("p0"), messages.Prefill)[-1].request.params.grammar


@pytest.fixture
def make_chat(make_system: Callable[..., System]) -> Callable[[str], System]:
    return lambda template: make_system(template=template, context_len=4096).up()


@pytest.mark.parametrize("is_parallel", [None, False])
def test_required_calls(make_chat: Callable[[str], System], is_parallel: bool | None) -> None:
    system = make_chat(TEMPLATE)
    grammar = grammar_of_calls(system, PARIS, tool_choice="required", parallel_tool_calls=is_parallel)
    assert accepts(system, grammar, PARIS)
    assert accepts(system, grammar, call("now", {}))
    assert accepts(system, grammar, f"{PARIS}\n{PARIS}") == (is_parallel is None)
    assert not accepts(system, grammar, "hello")
    assert not accepts(system, grammar, call("get_weather", {"town": "Paris"}))
    assert not accepts(system, grammar, call("now", {"a": 1}))


def test_a_named_tool(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    choice = {"type": "function", "function": {"name": "now"}}
    grammar = grammar_of_calls(system, call("now", {}), tool_choice=choice)
    assert accepts(system, grammar, call("now", {}))
    assert not accepts(system, grammar, PARIS)
    assert not accepts(system, grammar, call("now", {}) + "\n" + call("now", {}))
    assert grammar_of_calls(system, PARIS) is None


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("[TOOL_CALLS]", [f"[TOOL_CALLS]{space}[{NOW_TWICE}]" for space in ("", " ")]),
        ("<|start_header_id|>parameters", ['{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}']),
        ("<|python_start|>", ["[now()]", "[now(), now()]"]),
    ],
)
def test_other_formats(make_chat: Callable[[str], System], template: str, texts: list[str]) -> None:
    system = make_chat(TEMPLATE.replace("tool_call", "call") + f"{{# {template} #}}")
    grammar = grammar_of_calls(system, texts[0], tool_choice="required")
    for text in texts:
        assert accepts(system, grammar, text)
        assert not accepts(system, grammar, text.replace("now", "then"))


def test_thoughts_may_come_first(make_chat: Callable[[str], System]) -> None:
    """A grammar begins where the prompt ends: before, inside or behind thoughts."""
    before = make_chat(TEMPLATE + "{# <think></think> #}")
    grammar = grammar_of_calls(before, call("now", {}), tool_choice="required")
    assert accepts(before, grammar, f"<think>\nI could {PARIS}.\n</think>\n\n{PARIS}")
    assert accepts(before, grammar, PARIS)
    assert not accepts(before, grammar, "<think>\nNo.\n</think>\n\nNo.")
    assert not accepts(before, grammar, "I think " + PARIS)
    inside = make_chat(THINKING)
    grammar = grammar_of_calls(inside, f"Hm.</think>{PARIS}", tool_choice="required")
    assert accepts(inside, grammar, f"Hm.\n</think>\n\n{PARIS}")
    assert not accepts(inside, grammar, PARIS)
    options = {"enable_thinking": False}
    grammar = grammar_of_calls(inside, PARIS, tool_choice="required", chat_template_kwargs=options)
    assert accepts(inside, grammar, PARIS)
    assert not accepts(inside, grammar, f"Hm.\n</think>\n\n{PARIS}")


FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "a"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "never"),
    ({"structured_outputs": {"regex": "[0-9]{2}"}}, "17", "1"),
    ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, "yy", "y"),
]


@pytest.mark.parametrize(("asked", "right", "wrong"), FORMATS)
def test_a_format_binds_the_answer_and_not_the_thoughts(
    make_chat: Callable[[str], System], asked: dict[str, Any], right: str, wrong: str
) -> None:
    inside = make_chat(THINKING)
    say(inside, f"Hm.</think>{right}")
    body = {"model": "fake", "messages": [USER], **asked}
    status, answer, _ = inside.router.request("POST", "/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == right, answer
    grammar = own(inside.cluster.by_name("p0"), messages.Prefill)[-1].request.params.grammar
    assert grammar is not None
    assert accepts(inside, grammar, f"Hm, {wrong}?\n</think>\n\n{right}")
    assert not accepts(inside, grammar, f"Hm.</think>{wrong}") and not accepts(inside, grammar, right)


def test_marks_that_are_special_tokens_are_literal_tokens(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    literal = literal_of(system.tokenizer)
    assert literal("<|im_end|>") == "<[3]>"
    assert literal("<think>") == '"<think>"'


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
FORMAT: Any = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA},
    }
}
ANSWER = '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "made"),
    [
        (TEMPLATE, call("now", {})),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("<|start_header_id|>parameters", '{"name": "now", "parameters": {}}'),
        ("<|python_start|>", "[now()]"),
        ("<tool_call><function=", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ],
    ids=["hermes", "mistral", "llama3_json", "pythonic", "qwen3_coder"],
)
def test_a_format_and_calls_beside_it(make_chat: Callable[[str], System], template: str, made: str) -> None:
    """A loop of calls ends in an answer of the format: each output is one of the two, and nothing else."""
    if template != TEMPLATE:
        template = TEMPLATE.replace("tool_call", "call") + f"{{# {template} #}}"
    system = make_chat(template)
    for text, reason in ((made, "tool_calls"), (ANSWER, "stop")):
        grammar = grammar_of_calls(system, text, **FORMAT)
        assert accepts(system, grammar, made) and accepts(system, grammar, ANSWER)
        for other in ("text", '{"a": "b"}', made.replace("now", "then"), made + ANSWER, ANSWER + made):
            assert not accepts(system, grammar, other), other
        body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], **FORMAT}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, reason), answer
        assert choice["message"]["content"] == (None if reason == "tool_calls" else ANSWER)


def test_a_format_with_tools_comes_after_thoughts(make_chat: Callable[[str], System]) -> None:
    inside = make_chat(THINKING)
    grammar = grammar_of_calls(inside, f"Hm.</think>{PARIS}", **FORMAT)
    for text in (PARIS, f"{PARIS}\n{PARIS}", ANSWER):
        assert accepts(inside, grammar, f"Is it {text}?\n</think>\n\n{text}") and not accepts(inside, grammar, text)
    grammar = grammar_of_calls(inside, f"Hm.</think>{PARIS}", parallel_tool_calls=False, **FORMAT)
    assert accepts(inside, grammar, f"</think>{PARIS}") and not accepts(inside, grammar, f"</think>{PARIS}\n{PARIS}")


@pytest.mark.parametrize(("choice", "right", "wrong"), [("required", PARIS, ANSWER), ("none", ANSWER, PARIS)])
def test_a_forced_or_forbidden_call_leaves_no_choice(
    make_chat: Callable[[str], System], choice: str, right: str, wrong: str
) -> None:
    system = make_chat(TEMPLATE)
    grammar = grammar_of_calls(system, right, tool_choice=choice, **FORMAT)
    assert accepts(system, grammar, right) and not accepts(system, grammar, wrong)


def test_every_kind_of_format_may_stand_beside_calls(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    for asked, right, wrong in FORMATS:
        grammar = grammar_of_calls(system, right, **asked)
        assert accepts(system, grammar, right) and accepts(system, grammar, PARIS), asked
        assert not accepts(system, grammar, wrong), asked


def test_calls_without_a_grammar_exclude_a_format(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE + "{# <function= #}")
    function = {"name": "f", "strict": True, "parameters": {"properties": {"s": PATTERN}}}
    tool = {"type": "function", "function": function}
    for more, words in (
        (
            {},
            "response_format.json_schema.schema: calls of these tools in the format qwen3_coder have no grammar; leave",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice: calls of these tools in the format qwen3_coder have no grammar; use",
        ),
    ):
        body = {"model": "fake", "messages": [USER], "tools": [tool], **FORMAT, **more}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        assert status == 400 and answer["error"]["message"].startswith(words), answer


RECORD = {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "number"}}
LOOKAHEAD = {"type": "string", "pattern": "^(?=.*[0-9]).+$", "format": "phone"}
PUBLISHED: dict[str, Any] = {
    "type": "object",
    "properties": {"r": RECORD, "s": {"type": "array", "items": LOOKAHEAD, "uniqueItems": True}},
    "required": ["r"],
}


@pytest.mark.parametrize("template", ["", "<|python_start|>", "<tool_call><function="])
def test_a_required_call_leaves_out_what_cannot_be_enforced_of_a_tool_that_is_not_strict(
    make_chat: Callable[[str], System], template: str
) -> None:
    system = make_chat(TEMPLATE.replace("tool_call", "call") + f"{{# {template} #}}" if template else TEMPLATE)
    function = {"name": "f", "parameters": PUBLISHED}
    texts = {
        "": call("f", {"r": {"A": 1.5}, "s": ["x", "x"]}),
        "<|python_start|>": "[f(r={\"A\": 1.5}, s=['x', 'x'])]",
        "<tool_call><function=": (
            '<tool_call>\n<function=f>\n<parameter=r>\n{"A": 1.5}\n</parameter>\n</function>\n</tool_call>'
        ),
    }
    tools = [NOW, {"type": "function", "function": function}]
    grammar = grammar_of_calls(system, texts[template], tools=tools, tool_choice="required")
    assert accepts(system, grammar, texts[template])
    assert not accepts(system, grammar, texts[template].replace("1.5", "true"))
    body = {"model": "fake", "messages": [USER], "tools": [NOW, {**tools[1], "function": {**function, "strict": True}}]}
    status, answer, _ = system.router.request("POST", "/v1/chat/completions", {**body, "tool_choice": "required"})
    words = "tools[1].function.parameters.properties.r: \"propertyNames\" cannot be enforced; leave it out (tool 'f')"
    assert (status, answer["error"]["message"]) == (400, words)


def test_white_space_in_calls_is_bounded(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    compact, spaced = (PARIS.replace('{"city": ', before) for before in ('{"city":', '{ \n"city":'))
    for more, may_be_indented in (({}, True), ({"structured_outputs": {"disable_any_whitespace": True}}, False)):
        grammar = grammar_of_calls(system, compact, tool_choice="required", **more)
        assert accepts(system, grammar, compact) and not accepts(system, grammar, spaced)
        assert accepts(system, grammar, PARIS) == may_be_indented


def test_an_answer_may_begin_as_a_call_does(make_chat: Callable[[str], System]) -> None:
    """Llama's calls have no mark, so a schema may have their keys."""
    system = make_chat(TEMPLATE.replace("tool_call", "call") + "{# <|start_header_id|>parameters #}")
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = '{"name": "now", "parameters": {}}'
    for text in ('{"name": "Ann", "age": 3}', '{"name":"nowhere"}', made):
        grammar = grammar_of_calls(system, text, response_format=asked)
        assert accepts(system, grammar, text), text
        body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], "response_format": asked}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, "tool_calls" if text == made else "stop")
        assert choice["message"]["content"] == (None if text == made else text)
    assert not accepts(system, grammar, '{"name": "other", "parameters": {}}')
