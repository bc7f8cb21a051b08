"""Grammars of calls: what they force or allow, checked by llguidance with the tokens of a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.metadata.wire import messages
from baton.router.http.generation.bound_calls import literal_of

from ...conftest import System
from ..chats import NOW, TEMPLATE, USER, WEATHER, accepts, call, say

PATTERN = {"type": "string", "pattern": "^a"}
NOW_TWICE = ", ".join(['{"name": "now", "arguments": {}}'] * 2)
PARIS = call("get_weather", {"city": "Paris é"})
THINKING = TEMPLATE + (
    "{# <think></think> #}{% if enable_thinking is not defined %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def grammar_of(system: System, text: str, **more: Any) -> Any:
    """Let the nodes say a text for a chat with both tools, and return the grammar that they got."""
    say(system, text)
    body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], **more}
    status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return system.cluster.by_name("p0").got(messages.Prefill)[-1].request.params.grammar


@pytest.fixture
def make_chat(make_system: Callable[..., System]) -> Callable[[str], System]:
    return lambda template: make_system(template=template, context_len=4096).up()


@pytest.mark.parametrize("is_parallel", [None, False])
def test_required_calls(make_chat: Callable[[str], System], is_parallel: bool | None) -> None:
    system = make_chat(TEMPLATE)
    grammar = grammar_of(system, PARIS, tool_choice="required", parallel_tool_calls=is_parallel)
    assert accepts(system, grammar, PARIS)
    assert accepts(system, grammar, call("now", {}))
    assert accepts(system, grammar, f"{PARIS}\n{PARIS}") == (is_parallel is None)
    assert not accepts(system, grammar, "hello")
    assert not accepts(system, grammar, call("get_weather", {"town": "Paris"}))
    assert not accepts(system, grammar, call("now", {"a": 1}))


def test_a_named_tool(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    choice = {"type": "function", "function": {"name": "now"}}
    grammar = grammar_of(system, call("now", {}), tool_choice=choice)
    assert accepts(system, grammar, call("now", {}))
    assert not accepts(system, grammar, PARIS)
    assert not accepts(system, grammar, call("now", {}) + "\n" + call("now", {}))
    assert grammar_of(system, PARIS) is None


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
    grammar = grammar_of(system, texts[0], tool_choice="required")
    for text in texts:
        assert accepts(system, grammar, text)
        assert not accepts(system, grammar, text.replace("now", "then"))


def test_thoughts_may_come_first(make_chat: Callable[[str], System]) -> None:
    """A grammar begins where the prompt ends: before, inside or behind thoughts."""
    before = make_chat(TEMPLATE + "{# <think></think> #}")
    grammar = grammar_of(before, call("now", {}), tool_choice="required")
    assert accepts(before, grammar, f"<think>\nI could {PARIS}.\n</think>\n\n{PARIS}")
    assert accepts(before, grammar, PARIS)
    assert not accepts(before, grammar, "<think>\nNo.\n</think>\n\nNo.")
    assert not accepts(before, grammar, "I think " + PARIS)
    inside = make_chat(THINKING)
    grammar = grammar_of(inside, f"Hm.</think>{PARIS}", tool_choice="required")
    assert accepts(inside, grammar, f"Hm.\n</think>\n\n{PARIS}")
    assert not accepts(inside, grammar, PARIS)
    options = {"enable_thinking": False}
    grammar = grammar_of(inside, PARIS, tool_choice="required", chat_template_kwargs=options)
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
    grammar = inside.cluster.by_name("p0").got(messages.Prefill)[-1].request.params.grammar
    assert grammar is not None
    assert accepts(inside, grammar, f"Hm, {wrong}?\n</think>\n\n{right}")
    assert not accepts(inside, grammar, f"Hm.</think>{wrong}") and not accepts(inside, grammar, right)


def test_marks_that_are_special_tokens_are_literal_tokens(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    literal = literal_of(system.tokenizer)
    assert literal("<|im_end|>") == "<[3]>"
    assert literal("<think>") == '"<think>"'


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
JSON: Any = {
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
        grammar = grammar_of(system, text, **JSON)
        assert accepts(system, grammar, made) and accepts(system, grammar, ANSWER)
        for other in ("text", '{"a": "b"}', made.replace("now", "then"), made + ANSWER, ANSWER + made):
            assert not accepts(system, grammar, other), other
        body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], **JSON}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, reason), answer
        assert choice["message"]["content"] == (None if reason == "tool_calls" else ANSWER)


def test_a_format_with_tools_comes_after_thoughts(make_chat: Callable[[str], System]) -> None:
    inside = make_chat(THINKING)
    grammar = grammar_of(inside, f"Hm.</think>{PARIS}", **JSON)
    for text in (PARIS, f"{PARIS}\n{PARIS}", ANSWER):
        assert accepts(inside, grammar, f"Is it {text}?\n</think>\n\n{text}") and not accepts(inside, grammar, text)
    grammar = grammar_of(inside, f"Hm.</think>{PARIS}", parallel_tool_calls=False, **JSON)
    assert accepts(inside, grammar, f"</think>{PARIS}") and not accepts(inside, grammar, f"</think>{PARIS}\n{PARIS}")


@pytest.mark.parametrize(("choice", "right", "wrong"), [("required", PARIS, ANSWER), ("none", ANSWER, PARIS)])
def test_a_forced_or_forbidden_call_leaves_no_choice(
    make_chat: Callable[[str], System], choice: str, right: str, wrong: str
) -> None:
    system = make_chat(TEMPLATE)
    grammar = grammar_of(system, right, tool_choice=choice, **JSON)
    assert accepts(system, grammar, right) and not accepts(system, grammar, wrong)


def test_every_kind_of_format_may_stand_beside_calls(make_chat: Callable[[str], System]) -> None:
    system = make_chat(TEMPLATE)
    for asked, right, wrong in FORMATS:
        grammar = grammar_of(system, right, **asked)
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
        body = {"model": "fake", "messages": [USER], "tools": [tool], **JSON, **more}
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
    grammar = grammar_of(system, texts[template], tools=tools, tool_choice="required")
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
        grammar = grammar_of(system, compact, tool_choice="required", **more)
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
        grammar = grammar_of(system, text, response_format=asked)
        assert accepts(system, grammar, text), text
        body = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], "response_format": asked}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, "tool_calls" if text == made else "stop")
        assert choice["message"]["content"] == (None if text == made else text)
    assert not accepts(system, grammar, '{"name": "other", "parameters": {}}')
