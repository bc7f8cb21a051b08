"""The benchmark of grammars: a planted model's texts are lists of JSON objects, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest
from bench_grammar import GRAMMAR, Point, row_of, write_words
from planted_text import PlantedText


def test_every_text_of_the_words_is_a_list_of_objects(tmp_path: Path) -> None:
    end = write_words(tmp_path / "tokenizer.json", 1024)
    tokenizer = llguidance.LLTokenizer(str(tmp_path / "tokenizer.json"), n_vocab=1024, eos_token=[end])
    text = PlantedText(1024)
    ids = text.continuation([17, 4], 8 * text.base)
    matcher = llguidance.LLMatcher(tokenizer, GRAMMAR)
    for token in ids:
        assert matcher.compute_bitmask()[token // 8] >> token % 8 & 1 and matcher.consume_token(token)
    first, last = ([at for at, token in enumerate(ids) if text.low[token] == 0][end] for end in (0, -1))
    objects = json.loads(f"[{tokenizer.decode_str(ids[first:last])[:-1]}]")
    assert [word for each in objects for word in each["text"].split()] == [f"t{token}" for token in ids[first:last]]


def test_bound_rounds_are_compared_with_free_ones() -> None:
    row = row_of(Point(32, 5, 8.0, 10.0, [1.0, 2.0, 3.0], 0.25, 640))
    assert row["bound, of free"] == 0.8 and row["masks p99"] == pytest.approx(2.98) and row["late"] == "25%"
