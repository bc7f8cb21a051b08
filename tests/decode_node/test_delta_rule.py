"""Models with layers of a gated delta rule, with their prediction layer, between two nodes: the text does not depend on
drafts, on hits, preemptions, moves, ranks or the place of a prompt. A block is a page of four tokens, so most rounds
pass an edge, and rejected drafts lie on both sides of it.

What one node computes equals transformers: tests/engine/models/test_odd_shapes.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix import ASKS, CELLS, PAGE_SIZE, Plain, coach, run_cell
from node_pair import NodePair, check_moves, node_pairs
from own_mtp import with_qwen_mtp
from thinned import is_whole, thinned

from baton.engine.rounds import device_executor

FAMILIES = thinned(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"], lambda i, _: i == 0)
SIZES = {  # so that two and three ranks can share them
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 96,
    "hidden_size": 96,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}
SHARED = {"shared_expert_intermediate_size": 48}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    source = checkpoint(request.param, **SIZES, **({} if request.param == "qwen3_5_text" else SHARED))
    path = source.with_name(f"{source.name}-mtp")
    return path if path.exists() else with_qwen_mtp(source, path)


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
    "chain": (3, "local", (2, 5), 64),
    "one": (1, "zmq", (), PAGE_SIZE + 1),
    "ten": (10, "zmq", (), PAGE_SIZE),
}


@pytest.mark.parametrize("name", thinned(DRAFTS, lambda _, name: name == "chain"))
def test_output_is_that_of_speculation_off(name: str, plain: Plain, make_pair: Callable[..., NodePair]) -> None:
    """Drafts are sometimes right, and the rows of those that are not are written again, with the states behind them."""
    num_steps, transport, buckets, chunk = DRAFTS[name]
    pair = make_pair(buckets, speculative="mtp", transport=transport, chunk_tokens=chunk, draft_steps=num_steps)
    coach(pair.decode.executor.engine.drafter, plain.truths)
    for cell in CELLS if is_whole() else CELLS[4:]:
        run_cell(pair, cell, plain.cases)
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > stats.num_accepted > 0


@pytest.mark.whole
@pytest.mark.parametrize("page_size", [1, 2, 3, 6])
def test_a_convolution_may_read_more_rows_than_a_block_has(
    page_size: int, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    """Its four rows lie in as many blocks. Pages of three or six tokens have blocks of one or two."""
    pair = make_pair(page_size=page_size)
    for cell in CELLS[:2]:
        run_cell(pair, cell, plain.cases)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    thinned([(1, 2), (2, 1), (3, 1), (1, 3), (1, "dp"), ("dp", "dp")], lambda *_: False),
)
def test_ranks_of_any_number_have_the_same_text(
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
    check_moves(make_pair(speculative="mtp", draft_steps=2), plain.cases[0].prompt * 3)
