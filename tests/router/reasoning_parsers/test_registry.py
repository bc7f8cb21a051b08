"""A chat template tells the parser of its model's thoughts."""

from __future__ import annotations

import pytest

from baton.router.reasoning_parsers.registry import REASONING_PARSERS, find_parser


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|>{{ message.content.split('</think>') }}<think>", "qwen3"),
        ("{{ '<\uff5cAssistant\uff5c><think>' }}{{ content.split('</think>') }}", "deepseek_r1"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma4"),
        ("<|im_start|>", None),
    ],
)
def test_a_template_tells_its_parser(template: str, name: str | None) -> None:
    assert find_parser(template, None) is (None if name is None else REASONING_PARSERS[name])


def test_a_flag_chooses_the_parser_or_none() -> None:
    assert find_parser("<|im_start|>", "qwen3") is REASONING_PARSERS["qwen3"]
    assert find_parser("<think></think>", "none") is None
