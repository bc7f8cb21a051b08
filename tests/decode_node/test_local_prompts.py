"""Local prompts: a decode node that computes a prompt itself gives the same tokens as with a prefill node.

It does so beside sequences whose prompts came from a prefill node, and frees all that it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
from matrix import PAGE_SIZE, Plain
from node_pair import ROUTER_EPOCH, NodePair, node_pairs, params

from baton.metadata.wire.messages import Cancel, Resend
from baton.metadata.wire.request import Unit

MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """`make_pair(model)`: a pair with small pages and chunks."""
    with node_pairs() as start:

        def make(model: Path, *, decode: dict[str, Any] | None = None, overlaps: bool = False, **both: Any) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 200, "max_running": 8, "chunk_tokens": 6, **both}
            return start(model, prefill=both, decode={**both, **(decode or {})}, overlaps=overlaps)

        yield make


@pytest.mark.parametrize("name", ["none", "ngram", *drafters.ALL])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_local_prompt_gives_the_same_tokens_as_a_handoff(
    name: str, is_preempted: bool, plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair, tmp_path: Path
) -> None:
    """Every other request has a local prompt. All share one batch."""
    model, reference = plain(name)
    speculation = {} if name == "none" else drafters.settings(name, model, tmp_path)
    pair = make_pair(model, overlaps=is_preempted, **speculation)
    for phase in range(2):  # the second finds pages of the first
        for index, case in enumerate(reference.cases):
            is_local = index % 2 == phase
            pair.submit(f"{phase} {case.ask.name}", case.prompt, case.params, n=case.ask.n, is_local=is_local)
    for _ in range(8 if is_preempted else 0):  # some sequences lose their pages before their first token
        for _ in range(2):
            pair.step_until(lambda: pair.decode.scheduler.running)
            pair.step()
        pair.decode.settle()
        for running in list(pair.decode.scheduler.running)[::2]:
            pair.decode.scheduler.preempt(running)
    results = pair.run()
    for phase in range(2):
        for case in reference.cases:
            case.check([results[f"{phase} {case.ask.name}", choice] for choice in range(case.ask.n)])
    assert (pair.decode.stats().preemptions > 3) == is_preempted
    assert len(pair.admitted) == sum(case.ask.n for case in reference.cases)


def test_a_local_prompt_needs_no_prefill_node(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    pair.submit("r", range(1, 30), params(5, num_logprobs=2), is_local=True)
    result = pair.run()["r", 0]
    assert len(result.ids) == len(result.logprobs) == 5
    assert result.ended is not None and (result.ended.num_prompt, result.ended.num_cached) == (29, 0)
    assert pair.prefill.stats().steps == 0 and pair.decode.stats().computed_tokens == 28
    assert not pair.admitted and not pair.done


def test_another_cache_salt_does_not_find_pages_of_the_prefill_node(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"))
    prompt = list(range(1, 30))
    pair.submit("with prefill", prompt, params(5), cache_salt="a")
    pair.run()
    pair.submit("same", prompt, params(5), cache_salt="a", is_local=True)
    assert pair.run()["same", 0].ended.num_cached == 28
    assert pair.decode.stats().computed_tokens == 0
    pair.submit("own", prompt, params(5), cache_salt="b", is_local=True)
    assert pair.run()["own", 0].ended.num_cached == 0
    assert pair.decode.stats().computed_tokens == 28
    assert len({tuple(result.ids) for result in pair.results.values()}) == 1


def test_a_local_prompt_continues_from_received_tokens(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    sampled = params(12, temperature=1.0, seed=7, repetition_penalty=1.2)
    pair.submit("whole", range(1, 12), sampled)
    whole = pair.run()["whole", 0].ids
    for count in (1, 5, 11):
        pair.submit(f"after {count}", range(1, 12), sampled, received=whole[:count], is_local=True)
        assert pair.run()[f"after {count}", 0].ids[count:] == whole[count:]
    pair.submit("a prompt of one token", [3], params(4), is_local=True)
    pair.submit("the same", [3], params(4))
    results = pair.run()
    assert results["a prompt of one token", 0].ids == results["the same", 0].ids


def test_a_refused_request_is_granted_when_capacity_becomes_free(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"), decode={"max_running": 1})
    pair.submit("first", range(1, 12), params(20))
    pair.submit("second", range(1, 12), params(20), is_local=True)
    pair.step_until(lambda: pair.is_full)
    assert [unit.rid for unit in pair.decode.units()] == ["first"]
    results = pair.run()
    assert results["first", 0].ids == results["second", 0].ids


def test_a_cancelled_request_frees_everything(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    pair.submit("r", range(1, 40), params(20), is_local=True)
    pair.step_until(lambda: 0 < pair.decode.stats().computed_tokens < 38)
    pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit("r", 0, 0), first=0))
    pair.send("decode", Cancel(router_epoch=ROUTER_EPOCH, rid="r", attempt=0, choices=None, reason="test"))
    pair.step_until(lambda: pair.decode.is_idle)
    assert pair.results["r", 0].failed is None and not pair.decode.units()
    pair.results.clear()
