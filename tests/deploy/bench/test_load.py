"""The load: arrivals, lengths and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from baton.deploy.bench.load import (
    BLOCK_TOKENS,
    RequestShape,
    Vocabulary,
    plan,
    read_length,
    synthetic,
    times_of,
)
from baton.deploy.simulation.traffic import Arrival, from_trace
from baton.metadata.errors import ConfigError

IDS = Vocabulary(range(1000))


def test_lengths_are_drawn_from_their_ranges() -> None:
    arrivals = synthetic([0.1] * 500, RequestShape((10, 20), (3, 5)), seed=1)
    assert {each.prompt_len for each in arrivals} == set(range(10, 21))
    assert {each.num_tokens for each in arrivals} == {3, 4, 5}
    planned = plan(arrivals, RequestShape(), IDS, "seed")
    assert [len(each.prompt) for each in planned] == [each.prompt_len for each in arrivals]


def test_another_seed_draws_other_prompts_of_the_same_lengths() -> None:
    arrivals = synthetic([0.1] * 5, RequestShape((10, 20)), seed=1)
    one, two, again = (plan(arrivals, RequestShape(), IDS, seed) for seed in ("a", "b", "a"))
    assert one == again and [len(each.prompt) for each in one] == [len(each.prompt) for each in two]
    assert all(a.prompt != b.prompt for a, b in zip(one, two, strict=True))


def test_prompts_share_their_beginnings() -> None:
    shape = RequestShape((30, 30), prefix_len=20, num_prefixes=2)
    prompts = [each.prompt for each in plan(synthetic([0.0] * 50, shape, 0), shape, IDS, "seed")]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2 and len({tuple(prompt) for prompt in prompts}) == 50
    assert all(len(prompt) == 30 for prompt in prompts)


def test_conversations_have_parts_for_their_turns() -> None:
    shape = RequestShape((8, 8), num_turns=3, turn_len=(5, 6))
    (planned,) = plan(synthetic([0.0], shape, 0), shape, IDS, "seed")
    assert [len(part) in (5, 6) for part in planned.later] == [True, True]


def test_words_make_up_the_tokens_that_the_server_counts() -> None:
    words = Vocabulary(tokens_per_piece=2.5, overhead=7.0)
    (planned,) = plan([Arrival(0.0, 107, 1)], RequestShape(), words, "seed")
    assert len(planned.prompt) == 40 and isinstance(planned.prompt[0], str) and not words.is_ids
    assert words.draw(Random(0), -3.0), "a prompt is never empty"


def test_requests_of_a_trace_with_equal_hash_ids_begin_alike(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 0, "input_length": 2 * BLOCK_TOKENS, "output_length": 1, "hash_ids": [4, 5]},
        {"timestamp": 2000, "input_length": BLOCK_TOKENS + 9, "output_length": 1, "hash_ids": [4, 6]},
        {"timestamp": 3000, "prompt": "a prompt of its own", "output_length": 2},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    one, two, three = plan(from_trace(path, 2.0, None), RequestShape(), IDS, "seed")
    assert one.prompt[:BLOCK_TOKENS] == two.prompt[:BLOCK_TOKENS] and one.prompt[BLOCK_TOKENS:] != two.prompt[512:]
    assert (len(one.prompt), len(two.prompt), three.prompt) == (1024, 521, "a prompt of its own")
    assert [each.at_s for each in (one, two, three)] == [0.0, 1.0, 1.5]
    again = from_trace(path, 1.0, [0.1, 0.2, 0.3, 0.4])
    assert [each.at_s for each in again] == [0.1, 0.2, 0.3, 0.4] and again[3][1:] == again[0][1:], "it starts again"


@pytest.mark.parametrize("text", ["0", "a", "5-3", "-4", "3-x", "1.5", ""])
def test_a_wrong_length_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        read_length("--tokens", text)


def test_a_load_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise --seconds"):
        times_of(0.001, 1.0, 0, 1.0)
    with pytest.raises(ConfigError, match="lower --seconds"):
        plan([Arrival(0.0, 60_000_000, 1)] * 2, RequestShape(), IDS, "seed")
    with pytest.raises(ConfigError, match="150,000,002 tokens together"):
        plan([Arrival(0.0, 1, 1)] * 2, RequestShape(num_turns=4, turn_len=(1, 25_000_000)), IDS, "seed")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        from_trace(tmp_path / "none", 1.0, None)
    (tmp_path / "bad").write_text('{"timestamp": "soon"}')
    with pytest.raises(ConfigError, match="bad: line 1 is"):
        from_trace(tmp_path / "bad", 1.0, None)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="holds no request"):
        from_trace(tmp_path / "empty", 1.0, None)
