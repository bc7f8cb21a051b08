"""The environment of templates is that of transformers, and its bounds end every rendering."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.router.text.template_environment import RenderBounds, TemplateEnvironment, TooMuchWork

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


LOOP = "{% for a in range(99999) %}"
ENDLESS = [
    LOOP * 3 + "x" + "{% endfor %}" * 3,
    LOOP + "{% if range(9999) | map('string') | list %}{% endif %}{% endfor %}",
    LOOP + "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
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
