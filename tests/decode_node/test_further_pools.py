"""A model with a pool beside that of its KV, between two nodes. Its output depends on every row of that pool
(support/checkpoints/remembering.py). One of them has pools of KV by window, and of values, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
import remembering
from heads import write_head
from matrix import ASKS, PAGE_SIZE, Plain, Watch, cells_of, coach, run_cell
from node_pair import NodePair, node_pairs, params
from thinned import thinned

from baton.engine.rounds import device_executor

NUM_PAGES = 190


@pytest.fixture(scope="module", params=thinned(["llama", "mimo_v2_flash"], lambda i, _: i == 0))
def base(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Path]:
    with remembering.served(request.param):
        yield checkpoint(request.param, num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remembering.remembering(base, tmp_path_factory.mktemp("remembering") / "model")


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain.of(model, ASKS[:4])


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodePair]]:
    """`make_pair(model, buckets, prefill=..., decode=...)`: a pair of nodes whose rounds use these buckets."""
    with node_pairs() as start:

        def make(
            model: Path, buckets: tuple[int, ...] = (), *, prefill: Any = (), decode: Any = (), **both: Any
        ) -> NodePair:
            monkeypatch.setattr(device_executor, "graph_sizes", lambda *_: list(buckets))
            both = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "max_running": 10, **both}
            return start(model, prefill=both | dict(prefill), decode=both | dict(decode), overlaps=bool(buckets))

        yield make


def test_a_whole_text_recomputed_by_transformers_gives_the_same_tokens(plain: Plain, base: Path) -> None:
    greedy = [case for case in plain.cases if case.params.temperature == 0.0]
    for case in greedy:
        [expected] = case.expected
        logits = remembering.recomputed(base, case.prompt + expected.ids)
        assert logits.argmax(-1)[len(case.prompt) - 1 : -1].tolist() == expected.ids
    assert len(greedy) == 2


def test_an_older_router_refuses_the_nodes_by_their_protocols(
    model: Path, make_pair: Callable[..., NodePair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pair = make_pair(model)
    assert {hello.protocol_min for hello in pair.hellos.values()} == {8}
    assert "cannot name pools of this model: target.memory 2 layers x (memory: 1 heads x 16 float32)" in caplog.text


DRAFTS = {
    "standalone": ({"draft_steps": 4}, "zmq", (), 64),
    "eagle": ({"draft_steps": 3}, "zmq", (2, 5), PAGE_SIZE),
    "eagle tree": ({"draft_steps": 3, "draft_topk": 3, "draft_tokens": 10}, "local", (2, 5), PAGE_SIZE - 1),
}


@pytest.mark.parametrize("name", thinned(list(DRAFTS), lambda i, name: name != "eagle"))
def test_output_is_that_of_speculation_off(
    name: str, model: Path, plain: Plain, make_pair: Callable[..., NodePair], tmp_path: Path
) -> None:
    """Chains and trees with rejections, prefix hits, preemptions, mixed batches and two choices, by each
    transport of a CPU. The standalone drafter has such a pool, too."""
    shape, transport, buckets, chunk = DRAFTS[name]
    algorithm = name.split()[0]
    if algorithm == "standalone":
        draft = drafters.perturbed(model, tmp_path / "draft", 0.03)
    else:
        draft = write_head(tmp_path / "draft", algorithm, model)
    settings = {"speculative": algorithm, "draft_model": str(draft), "transport": transport, "chunk_tokens": chunk}
    pair = make_pair(model, buckets, **settings, **shape)
    coach(pair.decode.executor.engine.drafter, plain.truths)
    watch = Watch.of(pair)
    for cell in cells_of(1):
        run_cell(pair, cell, plain.cases)
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > stats.num_accepted > 0
    assert (watch.num_moves > 0) == (name == "eagle tree")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {"tp": 2}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.whole),
        pytest.param({}, {"dp_attention": 2}, marks=pytest.mark.whole),
    ],
    ids=["1-2", "2-1", "dp"],
)
def test_every_rank_holds_the_head_that_they_share(
    prefill: dict[str, int], decode: dict[str, int], model: Path, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair(model, prefill=prefill, decode=decode, chunk_tokens=PAGE_SIZE)
    for case in plain.cases:
        pair.submit(case.ask.name, case.prompt, case.params, n=case.ask.n)
    results = pair.run()
    for case in plain.cases:
        case.check([results[case.ask.name, choice] for choice in range(case.ask.n)])


def test_three_choices_and_a_request_that_moved_have_the_text_of_each_alone(
    model: Path, plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    pair, asked = make_pair(model), params(9, temperature=1.0, seed=3)
    prompt = plain.cases[0].prompt
    pair.submit("three", prompt, asked, n=3)
    pair.submit("alone", prompt, asked)
    results = pair.run()
    texts = [results["three", choice].ids for choice in range(3)]
    assert texts[0] == results["alone", 0].ids and len({tuple(text) for text in texts}) == 3
    for is_local in (False, True):
        pair.prefill.cache.flush()
        pair.decode.cache.flush()
        pair.submit(f"moved {is_local}", prompt, asked, received=texts[0][:4], is_local=is_local)
        assert pair.run()[f"moved {is_local}", 0].ids[4:] == texts[0][4:]
