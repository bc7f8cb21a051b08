"""Probing finds the form in which a template reads messages."""

from __future__ import annotations

import pytest

from baton.router.text.chat_template import ChatTemplate
from baton.router.text.template_form import ContentForm, TemplateForm

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
