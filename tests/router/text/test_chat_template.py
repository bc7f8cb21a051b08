"""Chat templates: what they are given, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.errors import ProtocolError, RequestError
from baton.router.text.chat_template import ChatTemplate

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
