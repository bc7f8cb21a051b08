"""Loads on Baton: what is made of the answers. tests/deploy/bench tests the client."""

from __future__ import annotations

import pytest
from bench_load import look, row_of
from planted_text import PlantedText

from baton.deploy.bench.client import Reply
from baton.deploy.bench.sender import SentRequest
from baton.deploy.simulation.figures import Record, Slo, summary


def test_a_row_has_a_column_for_each_figure() -> None:
    row = summary([Record(0.1, 0.004, 0.02, 0.03)], 2.0, [Slo(200, 12), Slo(50, 8)])
    found = row_of(row | {"rate": 2.0, "failed": 0, "wrong": 0})
    assert (found["first token p50"], found["largest gap p99"]) == (pytest.approx(100), pytest.approx(30))
    assert (found["good at 200 / 12, requests/s"], found["good at 50 / 8, requests/s"]) == (0.5, 0.0)
    assert row_of(summary([], 2.0, []) | {"rate": 2.0}) == {"rate": 2.0, "requests": 0}, "no answer, no times"


def test_an_answer_counts_if_it_is_whole_and_is_compared_with_the_planted_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PlantedText(4096)
    right = text.continuation([5, 6], 3)

    def asked(ids: list[int], error: str | None = None) -> SentRequest:
        reply = Reply(ids=ids, error=error, message="why")
        reply.times.append(1.0)
        return SentRequest(0.0, 0.0, 1, 3, [5, 6], reply)

    found = look([asked(right), asked([*right[:2], 1 - right[2]]), asked(right[:2]), asked(right, "HTTP 503")], text)
    assert (len(found.answered), found.num_wrong, found.num_checked, found.num_failed) == (2, 1, 6, 2)
    said = capsys.readouterr().err
    assert "2 tokens came, not 3" in said and "HTTP 503 why" in said
