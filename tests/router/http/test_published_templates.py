"""Prompts of templates in the shape of the published ones are those of transformers, or refused by a sentence.

The templates (tests/support/published_templates) are written for this test. FACTS says what each of them reads.
`as_documented` gives transformers the messages as docs/api.md says that they are read:

    developer              the system, if the template knows no developer
    late system messages   joined to the message before them, if the template does not write them there
    parts                  parts, if the template reads them; else one text, joined by line ends
    null                   absent, as with transformers, unless the template then fails or loses the calls
    calls                  their arguments are text, if the template reads text
    continued text         refused, if the template writes it in another way than it is given
    thoughts               not under gpt-oss' name beside text and calls, where its template refuses them
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.metadata.errors import RequestError
from baton.router.http.generation.prompts import chat_text
from baton.router.http.generation.tool_types import Tool
from baton.router.http.generation.types import ChatMessage
from baton.router.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[3]
SOURCES = {path.stem: path.read_text() for path in (ROOT / "tests/support/published_templates").glob("*.jinja")}
SOURCES["demo"] = json.loads((ROOT / "deploy/demo/tokenizer_config.json").read_text())["chat_template"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
REWRITTEN = "writes the final message in another way than it is given"
ALL = frozenset({"system", "user", "assistant", "calls", "tool"})


class Facts(NamedTuple):
    """What a template reads."""

    late: bool = True  # a system's message behind others
    knows_developer: bool = False
    parts: frozenset[str] = frozenset()  # kinds of messages whose parts it reads
    only_parts: bool = False  # it reads no text
    text_arguments: bool = False
    null_beside_calls: bool = False  # it shows a call beside null, and fails or drops the call if there is no content
    empty_drops_calls: bool = False


FACTS: dict[str, Facts] = {
    "command_r": Facts(),
    "command_r_tool_use": Facts(late=False),
    "deepseek_r1": Facts(text_arguments=True, null_beside_calls=True, empty_drops_calls=True),
    "deepseek_v3_0324": Facts(text_arguments=True, null_beside_calls=True),
    "deepseek_v3_1": Facts(text_arguments=True, null_beside_calls=True),
    "demo": Facts(),
    "gemma2": Facts(late=False),
    "gemma3": Facts(parts=frozenset({"user", "assistant"})),
    "glm4_6": Facts(parts=ALL - {"tool"}),
    "gpt_oss": Facts(late=False, knows_developer=True),
    "granite": Facts(),
    "hermes": Facts(),
    "kimi_k2": Facts(parts=ALL),
    "llama2": Facts(),
    "llama3": Facts(),
    "llama3_none": Facts(),
    "llama4": Facts(parts=frozenset({"user", "assistant", "calls"})),
    "llava": Facts(parts=ALL, only_parts=True),
    "minimax_m2": Facts(late=False, parts=ALL),
    "mistral1": Facts(late=False),
    "mistral3": Facts(late=False),
    "mistral_small3": Facts(parts=frozenset({"user"})),
    "phi3": Facts(),
    "phi4_mini": Facts(),
    "plain_arguments": Facts(text_arguments=True),
    "qwen2_5": Facts(),
    "qwen2_5_vl": Facts(parts=ALL),
    "qwen3": Facts(),
    "qwen3_5": Facts(late=False, parts=ALL),
    "qwen3_coder": Facts(),
    "smollm3": Facts(late=False),
    "zephyr": Facts(),
}


class Case(NamedTuple):
    """The fields of a body that make its prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    continues: bool = False
    adds_prompt: bool = True


def call(name: str, arguments: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


ASK, REPLY = says("user", "What is 2 + 3 in Köln? <|im_end|> </think>"), says("assistant", " It is 5.\n")
WEATHER = call("weather", '{"town": "Zürich", "days": [1, 2], "units": {"c": true}, "note": null, "p": 1.0}')
RESULT = says("tool", '{"degrees": 12}', tool_call_id="call00001")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather of a town: "now" & <later>',
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "description": "Größe"},
                    "days": {"type": "array", "items": {"type": "integer", "minimum": 1}},
                    "units": {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]},
                    "mode": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}], "default": None},
                },
                "required": ["town"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def _conversations() -> Iterator[Case]:
    yield Case([ASK])
    yield Case([says("system", " Be kind.\n"), ASK, REPLY, ASK])
    yield Case([says("developer", "Be kind."), ASK])
    yield Case([says("system", parts("Be ", "kind.")), says("user", parts("Hi ", "there", ""))])
    yield Case([ASK, says("assistant", parts("a", "b\n")), says("user", parts("c"))])
    yield Case([ASK, says("system", "Be brief."), REPLY, says("developer", "Be kind."), ASK])
    yield Case([says("user", "a", name="Ann"), says("assistant", "", name="bot"), says("user", "")])
    yield Case([ASK, says("assistant", None), ASK])
    for content in (None, "", "Let me look.\n", parts("Let ", "me look.")):
        yield Case([ASK, says("assistant", content, tool_calls=[WEATHER]), RESULT], TOOLS)
    yield Case([ASK, {"role": "assistant", "tool_calls": [WEATHER]}, {**RESULT, "name": "weather"}, REPLY, ASK], TOOLS)
    two = [WEATHER, call("now", "", "call00002")]
    results = [RESULT, says("tool", parts("12:00", " sharp"), tool_call_id="call00002")]
    yield Case([says("system", "s"), ASK, says("assistant", None, tool_calls=two), *results, REPLY, ASK])
    for fields in ({}, {"tool_calls": [WEATHER]}):
        for content in ("It is.", None, ""):
            thinks = says("assistant", content, reasoning_content="Hm,\n12?", **fields)
            yield Case([ASK, thinks, *([RESULT] if fields else []), *([] if fields else [ASK])], TOOLS)
    yield Case([ASK, says("assistant", "<think>a</think>b", reasoning=""), ASK])
    for options in (
        {"enable_thinking": False},
        {
            "bos_token": "<B>",
            "thinking": True,
            "reasoning_effort": "low",
            "date_string": "1 May",
            "controls": {"length": "l"},
        },
        {"documents": [{"title": "T", "text": "Some text."}, {"title": "U", "text": "Ü"}]},
        {"tools_in_user_message": False, "model_identity": "M"},
    ):
        yield Case([says("system", "s"), ASK], TOOLS, options)
        yield Case([ASK], None, options, adds_prompt=False)
    for text in ("end", "|", "<", "s", "", "It is ", "a\n\n", "</think>", "<think>\na\n</think>\n\nb", " x", "é\u3000"):
        yield Case([ASK, says("assistant", text)], None, {}, continues=True)
    yield Case([ASK, says("assistant", parts("It ", "is "))], TOOLS, continues=True)
    yield Case([ASK, says("assistant", "It", reasoning_content="Hm")], continues=True)
    yield Case([ASK, REPLY, says("user", "|")], continues=True)


CASES = list(_conversations())


def as_documented(case: Case, facts: Facts) -> list[dict[str, Any]]:
    """Return the messages of a case as transformers gets them."""
    read: list[dict[str, Any]] = []
    for given in case.messages:
        message = dict(given)
        if message["role"] == "developer" and not facts.knows_developer:
            message["role"] = "system"
        is_late = read and message["role"] in ("system", "developer") and not facts.late
        if is_late and read[-1]["role"] in ("system", "developer", "user"):
            before, content = read[-1]["content"], message["content"]
            if isinstance(before, str) and isinstance(content, str):
                read[-1]["content"] = f"{before}\n\n{content}"
            else:
                first = parts(before) if isinstance(before, str) else before
                texts = [content] if isinstance(content, str) else [part["text"] for part in content]
                read[-1]["content"] = [*first, *parts("\n\n" + "\n".join(texts))]
            continue
        if is_late:
            message["role"] = "user"
        read.append(message)
    return [_message(message, facts) for message in read]


def _message(message: dict[str, Any], facts: Facts) -> dict[str, Any]:
    calls = message.get("tool_calls")
    kind = "calls" if calls else message["role"]
    content = message.get("content")
    if isinstance(content, list) and kind not in facts.parts:
        content = "\n".join(part["text"] for part in content)
    if isinstance(content, str) and facts.only_parts:
        content = parts(content)
    message = {**message, "content": content}
    if calls:
        message["tool_calls"] = [_call(each, facts) for each in calls]
        if content == "" and facts.empty_drops_calls:
            message["content"] = None
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        if content and thoughts is not None:
            message |= {"thinking": "", "reasoning_content": thoughts}
    return message


def _call(given: dict[str, Any], facts: Facts) -> dict[str, Any]:
    arguments = given["function"]["arguments"] or "{}"
    function = {**given["function"], "arguments": arguments if facts.text_arguments else json.loads(arguments)}
    return {**given, "function": function}


class Reference:
    """transformers' apply_chat_template of one template, without a tokenizer."""

    def __init__(self, name: str) -> None:
        self.facts = FACTS[name]
        self.source = SOURCES[name]

    def prompt(self, case: Case) -> str:
        """Return the prompt. Raises whatever transformers raises."""
        messages = as_documented(case, self.facts)
        try:
            return self._applied(case, messages)
        except Exception:
            if case.continues and messages[-1]["content"] is None:
                raise
        return self._applied(
            case, [m if m.get("tool_calls") or m["content"] else {**m, "content": ""} for m in messages]
        )

    def _applied(self, case: Case, messages: list[dict[str, Any]]) -> str:
        """Return the prompt as apply_chat_template makes it, but keep null beside calls if the template needs it."""
        needs_null = self.facts.null_beside_calls
        kept = [
            {key: value for key, value in m.items() if value is not None or (needs_null and m.get("tool_calls"))}
            for m in messages
        ]
        options = {**SPECIAL, **case.options}
        rendered: Any = render_jinja_template(
            [kept],  # type: ignore[arg-type]
            tools=case.tools,  # type: ignore[arg-type]
            documents=options.pop("documents", None),  # type: ignore[arg-type]
            chat_template=self.source,
            add_generation_prompt=case.adds_prompt and not case.continues,
            continue_final_message=case.continues,
            **options,
        )
        return rendered[0][0]


def outcome(template: ChatTemplate, case: Case) -> str | RequestError:
    """Return Baton's prompt, or its refusal."""
    group: Any = SimpleNamespace(template=template, key=SimpleNamespace(model="m"))
    tools = None if case.tools is None else msgspec.to_builtins(msgspec.convert(case.tools, list[Tool]))
    try:
        return chat_text(
            group,
            msgspec.convert(case.messages, list[ChatMessage]),
            add_generation_prompt=case.adds_prompt and not case.continues,
            continue_final=case.continues,
            options=case.options,
            tools=tools,
        )
    except RequestError as error:
        return error


def difference(template: ChatTemplate, reference: Reference, case: Case) -> str | None:
    """Return how Baton's answer to a case differs from transformers', None if it does not."""
    got = outcome(template, case)
    try:
        expected = reference.prompt(case)
    except Exception as error:  # templates and transformers raise many kinds
        if isinstance(got, RequestError):
            return None
        return f"transformers refuses ({error!r:.300}), Baton writes {got!r}"
    if isinstance(got, RequestError):
        final = case.messages[-1]["content"]
        if case.continues and REWRITTEN in str(got) and not expected.rstrip().endswith(str(final).strip()):
            return None  # a template takes marks such as </think> out of the text
        return f"Baton refuses ({got}), transformers writes {expected!r}"
    return None if got == expected else f"Baton writes\n{got!r}, transformers\n{expected!r}"


def test_there_are_facts_of_each_template() -> None:
    assert SOURCES.keys() == FACTS.keys()


@pytest.mark.parametrize("name", FACTS)
def test_prompts_are_those_of_transformers(name: str) -> None:
    reference = Reference(name)
    template = ChatTemplate(reference.source, SPECIAL)
    differences = {index: difference(template, reference, case) for index, case in enumerate(CASES)}
    wrong = {index: words for index, words in differences.items() if words}
    assert not wrong, "\n".join(f"{index} {CASES[index]}:\n{words}" for index, words in wrong.items())
