"""A chat template tells the parser of its model's thoughts."""

from __future__ import annotations

import pytest

from baton.router.reasoning_parsers.registry import REASONING_PARSERS, parser_for_template


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|>{{ message.content.split('</think>') }}<think>", "qwen3"),
        ("{{ '<\uff5cAssistant\uff5c><think>' }}{{ content.split('</think>') }}", "deepseek_r1"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|im_start|>", None),
    ],
)
def test_a_template_tells_its_parser(template: str, name: str | None) -> None:
    assert parser_for_template(template) == name
    assert name is None or name in REASONING_PARSERS
