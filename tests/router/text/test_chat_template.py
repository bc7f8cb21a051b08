"""Chat templates: what they are given, and what they refuse."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.metadata.errors import ProtocolError, RequestError
from baton.router.text.chat_template import (
    ChatTemplate,
    ContentForm,
    RenderBounds,
    TemplateEnvironment,
    TemplateForm,
    TooMuchWork,
)

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


VALUE: dict[str, Any] = {"b": [1, 2.0, None, True], "a": {"é": "<&'\\\"漢>"}, "tag": "{% %}"}
SOURCES = [
    "{{ value | tojson }}",
    "{{ value | tojson(True) }}",
    "{{ value | tojson(False, 2) }}",
    "{{ value | tojson(separators=(',', ':')) }}",
    "{{ value | tojson(True, None, [',', ' : '], True) }}",
    "{{ value | tojson(indent=4, sort_keys=True) }}",
    "{{ value | tojson(indent='--') }}",
    "{% for v in value.b %}{% generation %}{% set x = v %}{{ x }}{% endgeneration %}{{ x }}{% continue %}{% endfor %}",
    "{% for v in value.b %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index ~ loop.last }}{% endfor %}",
    "  {% if true %}\n  a\n  {% endif %}\n  {%- if true -%} b {%- endif %}\n\n",
    "{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(9) }}",
    "{% for v in [[1, [2]], [3, []]] recursive %}{{ v[0] }}{{ loop(v[1:]) if v[1] }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for v in range(5) if v % 2 %}{% set ns.n = ns.n + v %}{% endfor %}{{ ns.n }}",
    "{% for v in [] %}{% else %}e{% endfor %}",
    "{{ '-' * 20 ~ 2 ** 10 ~ 'x' | center(9) ~ 'a\nb' | indent(3, true) ~ 'x'.ljust(5) ~ dict(a=1) }}",
    "{{ strftime_now('%Y-%m-%d %Z') }}{{ missing }}{{ value.b[::-1] }}{{ value.items() | list }}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_templates_have_what_transformers_gives_them(source: str) -> None:
    expected = render_jinja_template([[]], chat_template=source, value=VALUE)[0][0]  # type: ignore[arg-type]
    assert TemplateEnvironment().from_string(source).render(value=VALUE) == expected


def test_a_filter_takes_no_argument_that_transformers_refuses() -> None:
    with pytest.raises(TypeError):
        TemplateEnvironment().from_string("{{ 1 | tojson(colour=2) }}").render()


LONG_LOOP = "{% for a in range(99999) %}"
ENDLESS = [
    LONG_LOOP * 3 + "x" + "{% endfor %}" * 3,
    LONG_LOOP + "{% if range(9999) | map('string') | list %}{% endif %}{% endfor %}",
    LONG_LOOP + "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) ~ m(n - 2) if n > 1 }}{% endmacro %}{{ m(40) }}",
    "{% for a in text %}{% for b in text %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
]


@pytest.mark.timing
@pytest.mark.parametrize("source", ENDLESS)
def test_a_rendering_that_takes_too_long_ends(source: str) -> None:
    environment = TemplateEnvironment()
    template = environment.from_string(source)
    for bounds in (RenderBounds(10**9, 0.05), RenderBounds(100, 1e9)):
        environment.limit(bounds)
        begun = time.thread_time()
        with pytest.raises(TooMuchWork, match="send fewer messages"):
            template.render(text="ab" * 10**5)
        assert time.thread_time() - begun < 5  # without bounds each takes minutes
    environment.limit(RenderBounds(2000, 1e9))
    assert environment.from_string("{% for a in range(900) %}x{% endfor %}").render() == "x" * 900


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10 ** 9",
        "10 ** 9 * [1]",
        "9 ** 99999",
        "'a' | center(10 ** 9)",
        "'a' | indent(width=10 ** 9)",
        "'a'.ljust(10 ** 9)",
    ],
)
def test_a_huge_value_is_not_made(expression: str) -> None:
    with pytest.raises(TooMuchWork):
        TemplateEnvironment().from_string("{{ " + expression + " }}").render()
