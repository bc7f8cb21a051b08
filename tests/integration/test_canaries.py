"""Nodes that compute wrong results: the router reports their pairs with both answers, and the good pairs serve.

The nodes are real, in one process, stepped by the test (support/nodes/served.py). A faulty node's KV is overwritten
after it was computed and before its checksum is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from served import Node, Served
from served_nodes import engine_of
from thinned import thinned

from baton.engine.checkpoint.model_check import DEMO
from baton.engine.work import BatchRow

Start = Callable[..., Served]
BODY = {"prompt": "def main(args): return", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def spoil(node: Node) -> Callable[[], None]:
    """Overwrite the keys of every page that the node computes, in one layer. Return a function that mends the node."""
    engine = engine_of(node)
    compute = engine.compute

    def spoilt(rows: Sequence[BatchRow]) -> Any:
        computed = compute(rows)
        for row in rows:
            for page in row.pages[: (row.position + len(row.input_ids)) // engine.pool.page_size]:
                engine.kv[0, page, 0].fill_(3.0)
        return computed

    engine.compute = spoilt
    return lambda: setattr(engine, "compute", compute)


def states(served: Served) -> dict[str, str]:
    """Return each pair's state, by the names of its nodes."""

    def get() -> dict[str, str]:
        health = served.dispatcher.health
        pairs = [pair for group in served.dispatcher.registry.groups.values() for pair in group.pairs()]
        return {f"{prefill.node_id} {decode.node_id}": health.state(prefill, decode) for prefill, decode in pairs}

    return served.call(get)


def words(served: Served) -> dict[str, str]:
    """Return each pair's state as one word."""
    return {pair: re.sub(r"^pair .*? is (\w+): .*", r"\1", state) for pair, state in states(served).items()}


def expect(served: Served, **expected: str) -> None:
    """Step the nodes until the pairs have these states, by name (p0_d1)."""
    full = {f"prefill-{pair[1]} decode-{pair[4]}": word for pair, word in expected.items()}
    try:
        served.run(lambda: words(served) == full, 30)
    except AssertionError:
        raise AssertionError(states(served)) from None


def text(served: Served, **more: Any) -> str:
    stream = served.ask(**BODY, **more)
    served.finish(stream)
    assert not stream.errors, stream.errors
    return stream.texts[0]


def test_a_faulty_first_pair_serves_no_request_and_makes_no_good_pair_faulty(start: Start) -> None:
    served = start()
    spoil(served.start("prefill"))
    served.start("decode")
    expect(served, p0_d0="faulty")
    served.start("prefill")
    served.start("decode")
    expect(served, p0_d0="faulty", p0_d1="faulty", p1_d0="ready", p1_d1="ready")
    named = re.compile(r"its canary gave [\d ]+(, but .* alone computes|; .* gave) [\d ]+")
    assert all(named.search(state) for state in states(served).values() if state != "ready"), states(served)
    right = text(served)
    for index in range(4):
        served.finish(served.ask(**{**BODY, "prompt": f"{index} {BODY['prompt']}"}))
    nodes = served.call(
        lambda: [{span.node for span in recorder.trace.spans} for recorder in served.dispatcher.finished]
    )
    assert len(nodes) == 5 and all("prefill-0" not in each for each in nodes)
    served.kill("prefill-0")
    assert text(served) == right
    served.check_books()


def test_a_single_faulty_pair_becomes_ready_when_it_is_mended(start: Start) -> None:
    served = start(router={"node_wait_s": 0.2})
    mend = spoil(served.start("prefill"))
    served.start("decode")
    expect(served, p0_d0="faulty")
    assert not served.call(lambda: served.dispatcher.health.is_ready)
    reason = served.call(lambda: served.dispatcher.health.reason)
    assert re.search(r"pair prefill-0 -> decode-0 is faulty: its canary gave [\d ]+, but .* alone computes", reason)
    stream = served.ask(**BODY)
    served.finish(stream)
    assert "its nodes cannot work together" in stream.errors[0]["message"]
    mend()
    served.nodes["prefill-0"].cache.flush()
    expect(served, p0_d0="ready")
    assert text(served)
    served.check_books()


@pytest.mark.parametrize("bad", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_one_faulty_node_of_four(bad: str, start: Start) -> None:
    """A faulty decode node computes local prompts wrongly; the canaries through it are right."""
    served = start()
    for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
        node = served.start(name[:-2], name)
        if name == bad and bad.startswith("prefill"):
            spoil(node)
        elif name == bad:
            spoil_rounds(node)
    pairs = {f"p{p}_d{d}": f"prefill-{p} decode-{d}" for p in (0, 1) for d in (0, 1)}
    expect(served, **{short: "faulty" if bad in pair else "ready" for short, pair in pairs.items()})
    assert text(served) == text(served)
    served.check_books()


@pytest.mark.parametrize("kv_dtype", thinned(["auto", "fp8"], lambda i, _: i == 1))
def test_a_faulty_node_is_found_though_nodes_round_coarsely(kv_dtype: str) -> None:
    """Only a trained model is sure enough of a token."""
    with Served(DEMO, page_size=16, chunk_tokens=64, quantization="fp8", kv_dtype=kv_dtype) as served:
        served.start("prefill", chunk_tokens=7)
        for _ in range(2):
            served.start("decode")
        expect(served, p0_d0="ready", p0_d1="ready")
        model = engine_of(served.start("decode")).model
        logits = model.logits
        model.logits = lambda *args: logits(*args).roll(1, -1)
        expect(served, p0_d0="ready", p0_d1="ready", p0_d2="faulty")


def spoil_rounds(node: Any) -> None:
    """Overwrite the keys of a decode node's pages before each round, whether pulled or computed."""
    submit = node.rounds.submit

    def spoilt(sequences: Any, *rest: Any) -> Any:
        for sequence in sequences:
            for page in sequence.pages[: sequence.num_computed // engine_of(node).pool.page_size]:
                engine_of(node).kv[0, page, 0].fill_(3.0)
        return submit(sequences, *rest)

    node.rounds.submit = spoilt


@pytest.mark.parametrize("algorithm", ["ngram", "standalone", "eagle", "mtp3-deepseek"])
def test_pairs_that_speculate_are_ready_and_nothing_is_left(algorithm: str, start: Start) -> None:
    served = start(algorithm).up(1, 1)
    served.run(lambda: not served.call(lambda: served.dispatcher.requests))
    decode = served.nodes["decode-0"]
    assert decode.stats().computed_tokens > 0, "the decode node computed the canary's prompt"
    assert text(served)
    served.check_books()
