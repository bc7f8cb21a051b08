"""All tool-call parsers: calls that a template renders come back, and no text breaks the promises of base.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.tool_parsers.base import CallBegin
from baton.router.tool_parsers.registry import TOOL_PARSERS, parser_for_template

from .calls import TOOLS, Call, Parsed, parse, parse_all_ways
from .renderings import RENDERINGS, Calls

NASTY = 'q"uo\\te </tool_call> <tool_call> [TOOL_CALLS] ]) }; \n é 😀 </parameter> <|python_tag|>'
WEATHER: dict[str, Any] = {
    "city": NASTY,
    "days": 3,
    "share": -0.5,
    "exact": True,
    "tags": ["a", NASTY],
    "place": {"x": [1.5, None, False], "</function>": {}},
    "unit": None,
}
WITH_CONTENT = [name for name in RENDERINGS if name not in ("llama3_json", "pythonic")]


def expected(content: str, calls: Calls) -> Parsed:
    return Parsed(content, [Call(name, json.dumps(arguments)) for name, arguments in calls])


def same(found: Parsed, wanted: Parsed) -> None:
    assert found.content == wanted.content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        (call.name, json.loads(call.arguments)) for call in wanted.calls
    ]
    assert not any(call.broken for call in found.calls)


@pytest.mark.parametrize("family", RENDERINGS)
@pytest.mark.parametrize(
    "calls",
    [
        [("get_weather", WEATHER)],
        [("now", {}), ("get_weather", {"city": "Paris"}), ("write_file", {"path": "/a", "text": f"\n{NASTY}\n\n"})],
    ],
    ids=["one", "several"],
)
def test_rendered_calls_come_back(family: str, calls: Calls) -> None:
    name, render = RENDERINGS[family]
    same(parse_all_ways(TOOL_PARSERS[name], render("", calls)), expected("", calls))


@pytest.mark.parametrize("family", WITH_CONTENT)
def test_text_before_calls_is_content(family: str) -> None:
    name, render = RENDERINGS[family]
    calls = [("now", {}), ("get_weather", {"city": "Paris"})]
    same(parse_all_ways(TOOL_PARSERS[name], render("Let me look.\nSo:", calls)), expected("Let me look.\nSo:", calls))


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("text", ["", "hello", " 1 < 2, [x] {y} \n", NASTY.replace("[TOOL_CALLS]", ""), "<|", "[TOOL_"])
def test_text_without_calls_is_content(name: str, text: str) -> None:
    assert parse_all_ways(TOOL_PARSERS[name], text) == Parsed(text, [])


@pytest.mark.parametrize("family", RENDERINGS)
def test_a_call_that_is_cut_off_is_broken(family: str) -> None:
    """At every place: before its name is known its text is content, later a broken call that holds it."""
    name, render = RENDERINGS[family]
    text = render("", [("get_weather", {"city": "Paris", "days": 3})])
    seen: set[str] = set()
    for end in range(1, len(text)):
        found = parse(TOOL_PARSERS[name], [text[:end]])
        if not found.calls:
            assert found.content in (text[:end], text[:end].removeprefix("<|python_start|>"))
            seen.add("content")
        elif found.calls[0].broken is not None:
            assert text[:end].removeprefix("<|python_start|>") == found.calls[0].broken
            seen.add("broken")
        else:  # only marks behind the call are missing
            assert json.loads(found.calls[0].arguments) == {"city": "Paris", "days": 3}
    assert seen == {"content", "broken"}


@settings(max_examples=num_examples(150), deadline=None)
@given(family=st.sampled_from(list(RENDERINGS)), data=st.data())
def test_damaged_texts_keep_the_promises(family: str, data: st.DataObject) -> None:
    """`parse` checks the order of events, and that whole calls are JSON and broken ones are not."""
    name, render = RENDERINGS[family]
    text = render("", [("get_weather", {"city": "Paris", "days": 3}), ("now", {})])
    pieces = [
        *TOOL_PARSERS[name].markers,
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "(",
        ")",
        "\\",
        "\n",
        ",",
        "<",
        "x",
        "</function>",
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 8)))
        text = text[:start] + data.draw(st.sampled_from(["", *pieces])) + text[end:]
    whole = parse(TOOL_PARSERS[name], [text])
    assert parse(TOOL_PARSERS[name], list(text)) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parse(TOOL_PARSERS[name], [text[:cut], text[cut:]]) == whole


@settings(max_examples=num_examples(60), deadline=None)
@given(
    family=st.sampled_from(["harmony", "hermes", "llama3_json", "mistral", "mistral_list", "pythonic"]),
    arguments=st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63)
            | st.text(st.characters(codec="utf-8"), max_size=12),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
)
def test_any_arguments_come_back(family: str, arguments: dict[str, Any]) -> None:
    import keyword

    if any(keyword.iskeyword(key) for key in arguments):
        return
    name, render = RENDERINGS[family]
    text = render("", [("get_weather", arguments)])
    found = parse(TOOL_PARSERS[name], list(text))
    same(found, expected("", [("get_weather", arguments)]))


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_ids_are_new_and_of_the_familys_form(name: str) -> None:
    rendered = next(render for parser, render in RENDERINGS.values() if parser == name)("", [("now", {})] * 2)
    events = TOOL_PARSERS[name](TOOLS).feed(rendered)
    ids = [event.call_id for event in events if isinstance(event, CallBegin)]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() if name == "mistral" else each.startswith("call_") for each in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ \'<tool_call>\\n{"name": "\' }}{{ tool_call.arguments | tojson }}', "hermes"),
        ("<tool_call>\\n<function=' + tool_call.name + '>\\n", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('<|start_header_id|> Respond in the format {"name": function name, "parameters": ...}', "llama3_json"),
        ("you MUST put it in the format of [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<|start|>assistant<|channel|>commentary to={{ name }}<|message|>", "harmony"),
        ("{{ '<|tool_call>call:' + function['name'] + '{' }}", "gemma4"),
        ("<tool_call>{{ name }}<arg_key>arguments", None),
        ("<|start_header_id|><TOOLCALL>{{ parameters }}", None),
        ("<|im_start|>{{ message.content }}", None),
    ],
)
def test_a_template_tells_its_parser(template: str, name: str | None) -> None:
    assert parser_for_template(template) == name
