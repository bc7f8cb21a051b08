"""Chat templates: what they are given, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.errors import ProtocolError, RequestError
from baton.router.text.chat_template import ChatTemplate, ContentForm, TemplateForm

TOOL = {"type": "function", "function": {"name": "f"}}


def render(source: str, **options: object) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    return template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True, options=options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_an_error_in_a_template_is_an_error_of_the_messages(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_takes_too_long_refuses_the_messages() -> None:
    loop = "{% for a in range(99999) %}"
    with pytest.raises(RequestError, match="refuses these messages: they take it more than 5000000 steps or 300 ms"):
        render(loop * 2 + "{% endfor %}" * 2)


@pytest.mark.parametrize("source", ["{% for %}", "{% break %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"])
def test_a_template_that_does_not_compile_is_refused(source: str) -> None:
    with pytest.raises(ProtocolError, match="compile"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "knows_tools"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}", True),
        ("no tools here{% set tools = 1 %}", False),
        ("{# tools #}{{ messages[0].tools }}", False),
    ],
)
def test_a_template_knows_its_variables(source: str, knows_tools: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.knows_tools == template.knows("tools") == knows_tools
    assert not template.knows("reasoning_effort")
    given = template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, options={}, tools=[TOOL])
    assert ('"name": "f"' in given) == knows_tools


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "padding"])
def test_an_option_that_would_have_no_effect_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} ") as caught:
        render("x", **{name: None})
    assert caught.value.param == "chat_template_kwargs"


def test_options_win_over_special_tokens_and_may_be_documents() -> None:
    assert render("{{ eos_token }}{{ bos_token }}", eos_token="E", bos_token="B") == "EB"
    assert render("{{ documents[0].text }}{{ documents | length }}", documents=[{"text": "t"}]) == "t1"
    assert render("{{ documents }}") == "None"
    wrong: list[Any] = ["t", ["t"], {"text": "t"}]
    for documents in wrong:
        with pytest.raises(RequestError, match="documents must be a list of objects"):
            render("{{ documents }}", documents=documents)


def test_only_a_template_that_knows_no_other_name_reads_thoughts_as_reasoning() -> None:
    assert ChatTemplate("{{ messages[0].reasoning }}", {}).reads_reasoning
    assert ChatTemplate("{{ messages[0]['reasoning'] }}", {}).reads_reasoning
    assert not ChatTemplate("{{ messages[0].reasoning or messages[0].reasoning_content }}", {}).reads_reasoning


LOOP = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}"
TEXT, PARTS = "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
FIRST = "{{ m.content if m.content is string else m.content[0].text }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}ARGS{% endfor %}"
OBJECT, JSON = "{{ c.function.arguments | tojson }}", "{{ 'x' + c.function.arguments }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
NO_TEXT = "{% if m.tool_calls and m.content is none %}CALLS{% else %}{{ '' + m.content }}{% endif %}"


def form_of(body: str, arguments: str = "") -> TemplateForm:
    source = LOOP.replace("BODY", body.replace("CALLS", CALLS)).replace("ARGS", arguments)
    return ChatTemplate(source, {}).form(has_tools=False)


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (TEXT, ContentForm(null="absent")),
        (PARTS, ContentForm(takes_text=False, takes_parts=True)),
        (EITHER, ContentForm(takes_parts=True, null="absent")),
        (FIRST, ContentForm(null="empty")),
        ("{{ m.content | tojson }}", ContentForm()),
        ("{{ '' + m.content }}", ContentForm()),
        ("{{ m['content'] if 'content' in m else 'None' }}", ContentForm()),
        ("{{ raise_exception('none of these') }}", ContentForm()),
    ],
)
def test_the_form_of_content(body: str, form: ContentForm) -> None:
    assert form_of(body).of("user") == form


def test_roles_may_have_forms_of_their_own() -> None:
    form = form_of("{% if m.role == 'tool' %}" + TEXT + "{% else %}" + EITHER + "{% endif %}" + "CALLS", OBJECT)
    assert [form.of(kind).takes_parts for kind in ("user", "system", "assistant", "calls", "tool")] == [True] * 4 + [
        False
    ]


@pytest.mark.parametrize(
    ("body", "arguments", "as_text", "null", "takes_empty"),
    [
        (TEXT + "CALLS", OBJECT, False, "absent", True),
        (TEXT + "CALLS", ITEMS, False, "absent", True),
        (TEXT + "CALLS", JSON, True, "absent", True),
        (TEXT + "CALLS", "{{ c.function.arguments }}", True, "absent", True),
        (NO_TEXT, OBJECT, False, "null", False),
        (NO_TEXT, JSON, True, "null", False),
        ("{{ '' + m.content }}CALLS", OBJECT, False, "empty", True),
        ("{{ m.content if m.content is defined else 'None' }}CALLS", OBJECT, False, "empty", True),
        ("{{ '' + m.content }}", "", False, "absent", True),
    ],
    ids=["object", "items", "joined text", "written text", "null", "null and text", "empty", "None", "no calls"],
)
def test_the_form_of_calls(body: str, arguments: str, as_text: bool, null: str, takes_empty: bool) -> None:
    form = form_of(body, arguments)
    calls = form.of("calls")
    assert (form.text_arguments, calls.null, calls.takes_empty) == (as_text, null, takes_empty)


def test_a_template_that_shows_no_call_and_knows_no_tool_does_not_get_an_empty_text_instead() -> None:
    """It refuses such a message, as with transformers. The prompt would lack the call without a word."""
    refusing = "{{ raise_exception('who?') if m.role == 'tool' else '' + m.content }}"
    form = form_of(refusing)
    assert form.of("calls").null == "absent" and form.of("assistant").null == "empty"
    shown = form_of(refusing + "CALLS", OBJECT)
    assert shown.of("calls").null == "empty", "it shows calls beside a text alone"


def test_content_is_given_in_the_form_that_is_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ContentForm().content(["a", "b"]) == "a\nb"
    assert ContentForm(takes_parts=True).content(["a", "b"]) == parts
    assert ContentForm(takes_text=False, takes_parts=True).content("a") == parts[:1]
    assert ContentForm(null="null", takes_empty=False).content("") is None
    assert ContentForm(null="null").content("") == ContentForm().content(None) == ""


def test_a_slow_template_is_not_probed_for_long() -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert form_of(slow + TEXT).of("user") == ContentForm()
