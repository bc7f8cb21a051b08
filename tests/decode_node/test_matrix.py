"""The output with speculation equals the output without it, token for token, however it is computed:

    {algorithm} x {chain, tree} x {bucket, direct} x {whole prompts, page-size chunks}     one pair of nodes each;
                                                          in half of them rounds overlap; prompts are computed on the
                                                          prefill node, on the decode node, or on either at random
    x {cold, prefix hit} x {alone, mixed batch with joins and finishes} x {preempted, not}  phases of that pair

A phase runs requests of support/oracles/matrix.py, greedy and seeded ones, and proves that it was of its kind. With
BATON_WHOLE_MATRIX=1 it runs all of them. Otherwise each algorithm has one of its pairs of nodes, with a tree if it has
trees, a pair runs half of the phases, and phases in which requests run alone share the requests. Every two values of
other dimensions still meet. test_s4_buckets.py and test_s6_chunk_tails.py (tests/seeds) compare buckets, chunks and
hits of more algorithms.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
from drawn_places import PLACES, Place
from heads import ALGORITHM, write_head
from matrix import PAGE_SIZE, Ask, Case, Cell, Plain, Watch, cells_of, coach, run_cell
from node_pair import NodePair, node_pairs, params, replace
from thinned import thinned

from baton.engine.rounds import device_executor

CHAINS = {
    "ngram": 3,
    "standalone": 4,
    "eagle": 3,
    "eagle3": 5,
    "mtp-deepseek": 3,
    "mtp3-deepseek": 3,
    "mtp3-mimo": 3,
    "frozen-kv-mtp": 4,
}  # steps
TREES = {"eagle": 3, "eagle3": 2, "mtp-mimo": 2, "frozen-kv-mtp": 3}  # topk, of three steps
DRAFTS = [(name, 1) for name in CHAINS] + list(TREES.items())
TREE_TOKENS = {2: 8, 3: 10}  # by topk
BUCKETS = {"buckets": (2, 5), "direct": ()}
CHUNKS = {"whole": 64, "pages": PAGE_SIZE}
IS_WHOLE = "BATON_WHOLE_MATRIX" in os.environ
IN_GATE = [(name, topk) for name, topk in DRAFTS if topk > 1 or name not in (*TREES, "mtp-deepseek")]
CONFIGURATIONS = [
    (*draft, buckets, chunk)
    for index, draft in enumerate(DRAFTS)
    for place, (buckets, chunk) in enumerate(itertools.product(BUCKETS, CHUNKS))
    if IS_WHOLE or (draft in IN_GATE and place == (index + index // 6) % 4)
]
NUM_PAGES = 190


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`settings(name, topk, model)`: the settings of both nodes. Each drafter is written once."""
    directory = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def draft_dir(name: str, model: Path) -> Path:
        if name == "standalone":
            return drafters.perturbed(model, directory / name, 0.03)
        unlike = {"hidden_size": 24} if name in ("eagle3", "frozen-kv-mtp") else {}
        return write_head(directory / name, name, model, **unlike)

    def get(name: str, topk: int, model: Path) -> dict[str, Any]:
        steps = CHAINS[name] if topk == 1 else 3
        if name == "ngram":
            return {"speculative": "ngram", "draft_steps": steps}
        shape = {"draft_steps": steps, "draft_topk": topk, "draft_tokens": steps if topk == 1 else TREE_TOKENS[topk]}
        return {"speculative": ALGORITHM.get(name, name), "draft_model": str(draft_dir(name, model)), **shape}

    return get


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodePair]]:
    """`make_pair(model, buckets, **settings)`: a pair of nodes whose rounds use these buckets."""
    with node_pairs() as start:

        def make(model: Path, buckets: tuple[int, ...] = (), *, overlaps: bool = False, **both: Any) -> NodePair:
            monkeypatch.setattr(device_executor, "graph_sizes", lambda *_: list(buckets))
            both = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "max_running": 10, **both}
            return start(model, prefill=both, decode=both, overlaps=overlaps)

        yield make


def place_of(name: str, topk: int, buckets: str, chunk: str) -> Place:
    """Return who computes the prompts. An algorithm meets each place if it has all pairs of nodes."""
    at, chunk_at = list(BUCKETS).index(buckets), list(CHUNKS).index(chunk)
    return PLACES[(DRAFTS.index((name, topk)) + at + at * chunk_at) % len(PLACES)]


def overlaps_in(name: str, topk: int, buckets: str) -> bool:
    """Return whether rounds overlap. Each algorithm has both ways."""
    return (buckets == "buckets") == (DRAFTS.index((name, topk)) % 2 == 0)


def phases_of(chunk: str) -> list[Cell]:
    """Return the phases of a pair of nodes. Chunks of a page have the phase in which all requests share a round at
    once: other phases hardly fill a round while prompts take many steps."""
    return cells_of(chunk == "whole")


def test_every_two_values_meet() -> None:
    places = list(itertools.starmap(place_of, CONFIGURATIONS))
    overlaps = [overlaps_in(name, topk, buckets) for name, topk, buckets, _ in CONFIGURATIONS]
    names, topks, *others = zip(*CONFIGURATIONS, strict=True)
    assert set(zip(names, topks, strict=True)) == set(DRAFTS if IS_WHOLE else IN_GATE)
    assert {ALGORITHM.get(name, name) for name, _ in IN_GATE} == {ALGORITHM.get(name, name) for name, _ in DRAFTS}
    assert set(overlaps) == {False, True}
    drafts = [list(zip(names, topks, strict=True))] if IS_WHOLE else []
    for first, second in itertools.combinations((*drafts, *others, overlaps, places), 2):
        assert len(set(zip(first, second, strict=True))) == len(set(first)) * len(set(second))


@pytest.mark.parametrize(
    ("name", "topk", "buckets", "chunk"),
    CONFIGURATIONS,
    ids=[f"{name}-{'tree' if k > 1 else 'chain'}-{buckets}-{chunk}" for name, k, buckets, chunk in CONFIGURATIONS],
)
def test_output_is_that_of_speculation_off(
    name: str,
    topk: int,
    buckets: str,
    chunk: str,
    plain: Callable[[str], tuple[Path, Plain]],
    settings: Callable[..., dict[str, Any]],
    make_pair: Callable[..., NodePair],
) -> None:
    model, reference = plain(name)
    overlaps = overlaps_in(name, topk, buckets)
    pair = make_pair(
        model, BUCKETS[buckets], overlaps=overlaps, chunk_tokens=CHUNKS[chunk], **settings(name, topk, model)
    )
    truths = reference.truths
    if name == "standalone":  # it is often right by itself; what it is told is not what its own KV is of
        truths = {case.params.seed: truths[case.params.seed] for case in reference.cases if case.ask.name == "stopped"}
    coach(pair.decode.executor.engine.drafter, truths)
    watch = Watch.of(pair)
    place = place_of(name, topk, buckets, chunk)
    cells = phases_of(chunk)
    for cell in cells:
        run_cell(pair, cell, chosen(reference.cases, cell, cells), place)
    check_coverage(pair, watch, BUCKETS[buckets])
    assert watch.num_dead == 0 if not overlaps else watch.num_dead > 0 or name == "ngram", watch.num_dead


def chosen(cases: list[Case], cell: Cell, cells: list[Cell]) -> list[Case]:
    """Return the cases of a phase: half of them if requests run alone in two phases without hits, or if they find the
    pages of such a phase."""
    if cell.is_mixed or IS_WHOLE:
        return cases
    num_cold = sum(not each.is_mixed and not each.is_hit for each in cells)
    if num_cold == 1:
        return cases[1::2] if cell.is_hit else cases
    return cases[::2] if cell.is_preempted else cases[1::2]


# --- ends inside accepted runs ---

CONTEXT = 40
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "num_logprobs": 0},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "biased": {"temperature": 0.6, "logit_bias": {7: 2.0, 11: -3.0}, "num_logprobs": 2},
}
STOPS = [  # a stop token that first comes at index k ends the request if min_tokens is k, and does not if it is k + 1
    Ask(f"{kind} {k} {more}", 3 + k, params(k + 6, min_tokens=k + more, **fields), stop_at=k)
    for kind, fields in FIELDS.items()
    for k in (range(4, 9) if IS_WHOLE else (5, 7))
    for more in (0, 1)
]
LENGTHS = [
    Ask(f"{kind} {num}", 5, params(num, **FIELDS[kind])) for kind in ("greedy", "penalized") for num in (5, 6, 7)
]
NO_STOPS = [Ask(f"{kind} without stops", 6, params(12, min_tokens=6, **FIELDS[kind])) for kind in FIELDS]
CONTEXT_ENDS = [Ask(f"context of {num}", CONTEXT - num, params(num, **FIELDS["seeded"])) for num in (5, 6, 7)]


@pytest.fixture(scope="module")
def plain_ends() -> Callable[[Path], Plain]:
    return functools.cache(lambda model: Plain.of(model, [*STOPS, *LENGTHS, *NO_STOPS, *CONTEXT_ENDS]))


ENDS = {"ngram": 1, "eagle3": 2}  # a chain and a tree, with and without buckets; who drafted does not matter


@pytest.mark.parametrize(
    ("name", "topk"),
    thinned(DRAFTS, lambda i, name, topk: ENDS.get(name) == topk),
    ids=[f"{name}-{'tree' if k > 1 else 'chain'}" for name, k in DRAFTS],
)
def test_a_request_can_end_inside_an_accepted_run(
    name: str,
    topk: int,
    checkpoint: Callable[..., Path],
    plain_ends: Callable[[Path], Plain],
    settings: Callable[..., dict[str, Any]],
    make_pair: Callable[..., NodePair],
) -> None:
    """Every draft is right, also after the end of the request. Requests of all kinds share the rounds."""
    model, is_even = drafters.target_of(name, checkpoint), DRAFTS.index((name, topk)) % 2 == 0
    reference = plain_ends(model)
    buckets = BUCKETS["buckets" if is_even else "direct"]
    pair = make_pair(model, buckets, overlaps=is_even, context_len=CONTEXT, **settings(name, topk, model))
    coach(pair.decode.executor.engine.drafter, reference.truths, lambda *_: True)
    watch = Watch.of(pair)
    for case in reference.cases:
        wants = case.params if case.ask not in CONTEXT_ENDS else replace(case.params, max_tokens=CONTEXT)
        pair.submit(case.ask.name, case.prompt, wants)
    results = pair.run()
    for case in reference.cases:
        case.check([results[case.ask.name, 0]])
    crossed = {name.rsplit(" ", 2)[0] + name[-1] for name in watch.crossings}
    assert len(crossed) >= (2 * len(FIELDS) if topk == 1 else 7), crossed  # a tree is shallow if no token is likely
    assert {name[-1] for name in crossed} == {"0", "1"}
    for asks in (LENGTHS, CONTEXT_ENDS):
        assert max(watch.last_runs[ask.name] for ask in asks) > 2, watch.last_runs


def check_coverage(pair: NodePair, watch: Watch, buckets: tuple[int, ...]) -> None:
    """Check that every case that the matrix is about happened in some phase."""
    stats, shape = pair.decode.rounds.stats, pair.decode.rounds.shape
    assert stats.num_drafted > stats.num_accepted > 0 and stats.accepted_at[-1] > 0, stats
    assert watch.num_joins > 0 and watch.num_leaves > 2, (watch.num_joins, watch.num_leaves)
    assert any({0, 1, shape.num_steps} <= limits for limits in watch.limits), watch.limits
    assert watch.num_stops_inside > 0 and watch.crossings
    assert (watch.num_moves > 0) == (not shape.is_chain)
    sizes = set(watch.sizes)
    if buckets:
        assert {(1, 2), (2, 2)} <= sizes and ((3, 5) in sizes or (4, 5) in sizes) and max(sizes)[0] > 5, sizes
        assert all(size == min((bucket for bucket in buckets if bucket >= num), default=num) for num, size in sizes)
    else:
        assert all(num_seqs == size for num_seqs, size in sizes) and len(sizes) > 4, sizes
