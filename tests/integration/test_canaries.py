"""Nodes that compute wrong results: the router reports their pairs with both answers, and the good pairs serve.

The nodes are real, in one process, stepped by the test (support/nodes/served.py). A faulty node's KV is overwritten
after it was computed and before its checksum is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from served import Node, Served
from served_nodes import engine_of
from thinned import thinned

from baton.engine.checkpoint.model_check import DEMO
from baton.engine.work import BatchRow
from baton.metadata.handoff.schema.schema import pools
from baton.metadata.handoff.transports.base import Landed
from baton.metadata.handoff.transports.local import LocalTransport

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


TAIL_POOLS = [  # by family: those of windows, of what entries are made of, and of recurrent states
    *((family, "window") for family in ("gpt_oss", "gemma3_text", "gemma4_text", "mimo_v2_flash", "deepseek_v4")),
    ("mimo_v2_flash", "window_values"),
    *(("deepseek_v4", name) for name in ("heavy_sums", "sparse_inputs", "index_inputs")),
    *(("qwen3_5_text", name) for name in ("delta_states", "delta_rows")),
]
# one of their numbers may move none of a canary's few tokens
UNSEEN = ("heavy_sums", "sparse_inputs", "index_inputs", "delta_rows")


@pytest.mark.parametrize(
    ("family", "pool", "checksums"),
    thinned(
        [
            (*each, checksums)
            for each in TAIL_POOLS
            for checksums in (False, True)
            if checksums or each[1] not in UNSEEN
        ],
        lambda i, *_: i < 2,
    ),
)
def test_a_wrong_number_on_a_tail_page_is_found_by_its_digest_or_else_by_the_canary(
    family: str, pool: str, checksums: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is wrong on its way to one of two decode nodes. That of each page belongs to the page's first token."""
    with Served(checkpoint(family), checksums=checksums) as served:
        for role in ("prefill", "decode", "decode"):
            served.start(role)
        planted = plant(served.nodes["decode-0"], f"target.{pool}", monkeypatch)
        served.run(lambda: words(served).get("prefill-0 decode-1") == "ready", 30)
        served.run(lambda: states(served)["prefill-0 decode-0"] != "untried", 30)
        reason = states(served)["prefill-0 decode-0"]
        assert ("checksum" if checksums else "its canary gave") in reason, reason
        assert bool(served.nodes["decode-0"].stats().checksum_failures) == checksums and planted
        assert text(served)
        monkeypatch.undo()
        expect(served, p0_d0="ready", p0_d1="ready")
        served.check_books()


def plant(node: Node, pool: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Change one number of each page that has landed in a pool of the decode node, of the values if keys lie beside
    them. Return the pages."""
    engine, step, planted = engine_of(node), LocalTransport.step, list[int]()
    [memory] = [each for name, each in zip(pools(engine.schema), engine.memory, strict=True) if name == pool]
    num_planes = len(memory.layout.planes)
    offset = memory.layout.page_layer_bytes * (num_planes - 1) // num_planes

    def wrong(self: LocalTransport, max_bytes: int) -> Iterator[Landed]:
        for landed in step(self, max_bytes):
            page = landed.move.target
            if memory in self.memory and memory.holds(page):
                memory.pages[-1, page - memory.first, offset:].view("<f4")[0] += 100.0
                planted.append(page)
            yield landed

    monkeypatch.setattr(LocalTransport, "step", wrong)
    return planted


@pytest.mark.parametrize("algorithm", ["ngram", "standalone", "eagle", "mtp3-deepseek"])
def test_pairs_that_speculate_are_ready_and_nothing_is_left(algorithm: str, start: Start) -> None:
    served = start(algorithm).up(1, 1)
    served.run(lambda: not served.call(lambda: served.dispatcher.requests))
    decode = served.nodes["decode-0"]
    assert decode.stats().computed_tokens > 0, "the decode node computed the canary's prompt"
    assert text(served)
    served.check_books()
