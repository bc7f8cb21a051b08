"""Models with indexers (DSA, DeepSeek-V4), with their prediction layer, between two nodes: the text does not depend on
drafts, hits, preemptions, moves, ranks or the place of a prompt. One of the models has layers that share picks.

What one node computes equals transformers: tests/engine/models/test_odd_shapes.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix import ASKS, CELLS, PAGE_SIZE, Plain, Watch, coach, run_cell
from node_pair import NodePair, node_pairs, params
from own_mtp import with_mtp
from thinned import is_whole, thinned

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.rounds import device_executor

FAMILIES = thinned(["glm_moe_dsa", "deepseek_v4", "deepseek_v32"], lambda i, _: i < 2)
SIZES = {"num_attention_heads": 6, "intermediate_size": 96, "hidden_size": 96}  # so that three ranks can share them
OWN_SIZES = {"deepseek_v4": {"o_groups": 6}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    source = checkpoint(request.param, **SIZES, **OWN_SIZES.get(request.param, {}))
    path = source.with_name(f"{source.name}-mtp")
    return path if path.exists() else with_mtp(source, path)


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain.of(model, ASKS if is_whole() else ASKS[:4])


@pytest.fixture
def make_pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodePair]]:
    """`make_pair(buckets, prefill=..., decode=...)`: a pair of nodes whose rounds use these buckets."""
    with node_pairs() as start:

        def make(buckets: tuple[int, ...] = (), *, prefill: Any = (), decode: Any = (), **both: Any) -> NodePair:
            monkeypatch.setattr(device_executor, "graph_sizes", lambda *_: list(buckets))
            both = {"page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10, "chunk_tokens": 5, **both}
            return start(model, prefill=both | dict(prefill), decode=both | dict(decode), overlaps=bool(buckets))

        yield make


DRAFTS = {
    "chain": ({"draft_steps": 3}, "local", (2, 5), 64),
    "one": ({"draft_steps": 1}, "zmq", (), PAGE_SIZE + 1),
    "ten": ({"draft_steps": 10}, "zmq", (), PAGE_SIZE),
    "tree": ({"draft_steps": 3, "draft_topk": 3, "draft_tokens": 10}, "local", (2, 5), PAGE_SIZE - 1),
}


def drafts_chains_only(model: Path) -> bool:
    return read_model_config(model).compressed is not None


@pytest.mark.parametrize("name", thinned(DRAFTS, lambda _, name: name == "tree"))
def test_output_is_that_of_speculation_off(
    name: str, model: Path, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    """Drafts are sometimes right, and the rows of those that are not are written again."""
    if name == "tree" and drafts_chains_only(model):
        name = "chain"
    shape, transport, buckets, chunk = DRAFTS[name]
    pair = make_pair(buckets, speculative="mtp", transport=transport, chunk_tokens=chunk, **shape)
    coach(pair.decode.executor.engine.drafter, plain.truths)
    watch = Watch.of(pair)
    for cell in CELLS if is_whole() else CELLS[4:]:
        run_cell(pair, cell, plain.cases)
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > stats.num_accepted > 0
    assert (watch.num_moves > 0) == (name == "tree")  # of accepted rows, to the slots behind the text


@pytest.mark.parametrize(
    ("prefill", "decode"),
    thinned([(1, 2), (2, 1), (3, 1), (1, 3), (1, "dp"), ("dp", "dp")], lambda *_: False),
)
def test_ranks_of_any_number_pick_the_same(
    prefill: Any, decode: Any, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    ranks = [{"dp_attention": 2} if each == "dp" else {"tp": each} for each in (prefill, decode)]
    pair = make_pair(prefill=ranks[0], decode=ranks[1], speculative="mtp", draft_steps=3)
    for case in plain.cases:
        pair.submit(case.ask.name, case.prompt, case.params, n=case.ask.n)
    results = pair.run()
    for case in plain.cases:
        case.check([results[case.ask.name, choice] for choice in range(case.ask.n)])
    assert pair.decode.stats().num_drafted > 0


def test_a_request_that_moved_has_the_same_text(plain: Plain, make_pair: Callable[..., NodePair]) -> None:
    pair, asked = make_pair(speculative="mtp", draft_steps=2), params(14, temperature=1.0, seed=3)
    prompt = plain.cases[0].prompt * 3  # more tokens than are picked
    pair.submit("three", prompt, asked, n=3)
    texts = [pair.run()["three", choice].ids for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    for is_local in (False, True):
        for num_received in (1, 4, 13):
            pair.prefill.cache.flush()
            pair.decode.cache.flush()
            rid = f"moved {is_local} {num_received}"
            pair.submit(rid, prompt, asked, received=texts[0][:num_received], is_local=is_local)
            assert pair.run()[rid, 0].ids[num_received:] == texts[0][num_received:]
