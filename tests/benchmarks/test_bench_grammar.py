"""The benchmark of grammars: a planted model's texts are lists of JSON strings, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
from bench_grammar import GRAMMAR, Point, table, write_words


def test_every_text_of_the_words_is_a_list_of_strings(tmp_path: Path) -> None:
    write_words(tmp_path / "tokenizer.json", 600)
    tokenizer = llguidance.LLTokenizer(str(tmp_path / "tokenizer.json"), n_vocab=600, eos_token=[0])
    matcher = llguidance.LLMatcher(tokenizer, GRAMMAR)
    assert matcher.consume_tokens([17, 599, 1]) and json.loads(f"[{tokenizer.decode_str([17, 599])[:-1]}]")
    assert tokenizer.decode_str([17, 599]) == '"t17","t599",'


def test_bound_rounds_are_compared_with_free_ones() -> None:
    points = [Point(32, 5, 8.0, 10.0, [1.0, 2.0, 3.0], 0.25, 640)]
    assert table(points).splitlines()[2:] == ["| 32 | 5 | 8.00 | 10.00 | 0.800 | 2.00 / 2.98 | 25% | 640 |"]
