"""Speculation through the handoff changes no token, greedy or seeded, with preemption, prefix hits and stops."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import STREAM_MTP, target_of
from heads import ALGORITHM, KINDS, LAYERED, write_head
from matrix import rounds_paused
from node_pair import NodePair, node_pairs, params
from thinned import thinned

MakePair = Callable[..., NodePair]
SETTINGS = {"page_size": 4, "chunk_tokens": 6}


@functools.cache
def plain_of(model: Path) -> dict[tuple[str, int], list[int]]:
    """Return the ids by request without speculation."""
    with node_pairs() as start:
        return generate(start(model, prefill=SETTINGS, decode=SETTINGS))


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, *, decode: dict[str, Any] | None = None, **both: Any) -> NodePair:
            return start(model, prefill={**SETTINGS, **both}, decode={**SETTINGS, **both, **(decode or {})})

        yield make


def prompts(lens: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(50) for _ in range(num)] for num in lens]


CASES = prompts((1, 4, 5, 8, 13, 25))
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1}


def generate(
    pair: NodePair, name: str = "r", max_tokens: int = 17, *, waits_until_full: bool = False
) -> dict[tuple[str, int], list[int]]:
    """Return ids by request. `waits_until_full`: rounds begin when the decode node has no room for more requests."""
    for i, prompt in enumerate(CASES):
        pair.submit(f"{name}{i}", prompt, params(max_tokens))
        pair.submit(f"{name}seeded{i}", prompt, params(max_tokens, seed=i, **SAMPLED), n=1 + i % 3)
    if waits_until_full:
        with rounds_paused(pair):
            pair.step_until(lambda: pair.is_full and not pair.decode.scheduler.reserved)
    results = pair.run()
    assert all(result.ended is not None for result in results.values())
    return {
        (rid.removeprefix(name), choice): result.ids for (rid, choice), result in results.items() if rid[:1] == name[:1]
    }


NAMES = ("ngram", "standalone", *KINDS, *LAYERED, STREAM_MTP)


def drafter(name: str, model: Path, checkpoint: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """Return the settings of both nodes. The heads are random, so almost every draft is rejected."""
    if name == "ngram":
        return {"speculative": "ngram", "draft_steps": 3}
    if name == STREAM_MTP:
        return {"speculative": "mtp", "draft_steps": 4}
    if name == "standalone":
        draft = checkpoint("llama", hidden_size=32, num_hidden_layers=1)
        return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 4}
    changes = {"hidden_size": 24} if name in ("eagle3", "frozen-kv-mtp") else {}  # unlike the target's
    head = write_head(tmp_path / name, name, model, **changes)
    steps = 3 if name in LAYERED else 4
    return {"speculative": ALGORITHM[name], "draft_model": str(head), "draft_steps": steps}


@pytest.mark.parametrize(  # test_matrix.py has all drafters, by one transport
    ("name", "transport"),
    thinned([(name, ("local", "zmq")[i % 2]) for i, name in enumerate(NAMES)], lambda i, *_: i % 6 == 5),
)
def test_output_is_that_of_speculation_off(
    name: str, transport: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    plain = plain_of(model)
    pair = make_pair(model, transport=transport, **drafter(name, model, checkpoint, tmp_path))
    assert generate(pair) == plain
    assert generate(pair, "again") == plain  # prefix hits in both caches


@pytest.mark.parametrize("name", thinned(NAMES, lambda i, _: i % 6 == 4))
def test_preemption_changes_no_token(
    name: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    plain = plain_of(model)
    tight = make_pair(model, decode={"num_pages": 26}, **drafter(name, model, checkpoint, tmp_path))
    assert generate(tight, waits_until_full=True) == plain
    assert tight.decode.stats().preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(
    temperature: float, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    model = checkpoint("llama")
    pair = make_pair(model, speculative="standalone", draft_model=str(model), draft_steps=4)
    for i, prompt in enumerate(CASES):
        pair.submit(f"r{i}", prompt, params(21, temperature=temperature, seed=i, presence_penalty=0.2))
    pair.run()
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > 80
    assert stats.num_accepted == stats.num_drafted, stats


def test_a_stop_inside_an_accepted_run_ends_there(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    model = checkpoint("llama")
    pair = make_pair(model, speculative="standalone", draft_model=str(model), draft_steps=6)
    prompt = CASES[4]
    pair.submit("free", prompt, params(12, num_logprobs=2))
    free = pair.run()["free", 0]
    assert len(free.logprobs) == 12
    stop = free.ids[8]
    pair.submit("r", prompt, params(12, stop_ids=(stop,), num_logprobs=2))
    result = pair.run()["r", 0]
    assert result.ids == free.ids[: free.ids.index(stop) + 1]
    assert result.ended is not None and result.ended.reason == "stop" and result.ended.stop_id == stop
    assert [entry.top_ids for entry in result.logprobs] == [entry.top_ids for entry in free.logprobs[: len(result.ids)]]
