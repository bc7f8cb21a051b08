"""A kind of layer that one file and one line add (support/checkpoints/polynomial.py), between two nodes: running
polynomials of token ids and positions, kept at edges of 8 tokens. Its pools have kept pages or tail pages.

S8: a state stands at its edge. Each defect of the last tests changes one number, and the text shows it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import polynomial
import pytest
import torch
from heads import write_head
from matrix import ASKS, CELLS, Plain, Watch, coach, run_cell
from node_pair import NodePair, check_moves, node_pairs, params
from polynomial import EDGE, IDS, VALUES, Polynomials
from thinned import halved, is_whole, thinned
from ties import Reference

from baton.engine.attention.pool_rows import PoolRows
from baton.engine.rounds import device_executor
from baton.metadata.handoff.schema.schema import handoff_bytes
from baton.metadata.handoff.transports.base import Landed
from baton.metadata.handoff.transports.local import LocalTransport

PROMPT = random.Random(8).choices(range(1, 512), k=41)
NUM_TOKENS = 36


@pytest.fixture(scope="module", params=thinned(["tail", "kept"], lambda _, kind: kind == "tail"))
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with polynomial.served_model(checkpoint, tmp_path_factory.mktemp("polynomial"), request.param) as directory:
        yield directory


@pytest.fixture(scope="module")
def reference(model: Path, checkpoint: Callable[..., Path]) -> Reference:
    reference = Reference(checkpoint("llama", num_hidden_layers=3))
    reference.model = copy.deepcopy(reference.model)  # other references share it
    polynomial.add_polynomials(reference.model)
    return reference


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain.of(model, ASKS if is_whole() else ASKS[:4], page_size=EDGE)


@pytest.fixture
def make_pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodePair]]:
    """`make_pair(buckets, prefill=..., decode=...)`: a pair of nodes whose rounds use these buckets."""
    with node_pairs() as start:

        def make(buckets: tuple[int, ...] = (), *, prefill: Any = (), decode: Any = (), **both: Any) -> NodePair:
            monkeypatch.setattr(device_executor, "graph_sizes", lambda *_: list(buckets))
            both = {"page_size": EDGE, "num_pages": 150, "max_running": 10, **both}
            return start(model, prefill=both | dict(prefill), decode=both | dict(decode), overlaps=bool(buckets))

        yield make


def test_an_older_router_refuses_the_nodes_by_their_protocols(
    make_pair: Callable[..., NodePair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert {hello.protocol_min for hello in make_pair().hellos.values()} == {8}
    words = (
        "peers that do not know protocol 8 cannot name pools of this model: target.token_ids 2 layers x (token_ids: 1"
    )
    assert words in caplog.text


DRAFTS: dict[str, tuple[str, dict[str, int], str, tuple[int, ...], int, Any]] = {
    "tree": ("eagle", {"draft_steps": 3, "draft_topk": 3, "draft_tokens": 10}, "local", (2, 5), EDGE - 1, "mixed"),
    "wide tree": ("eagle", {"draft_steps": 9, "draft_topk": 2, "draft_tokens": 20}, "zmq", (), 64, "remote"),
    "chain": ("eagle", {"draft_steps": 3}, "zmq", (2, 5), 64, "remote"),
    "ten": ("eagle", {"draft_steps": 10}, "local", (), EDGE, "mixed"),
    "standalone": ("standalone", {"draft_steps": 4}, "zmq", (), EDGE + 1, "mixed"),  # its drafter has them, too
}


@pytest.mark.parametrize("name", thinned(DRAFTS, lambda _, name: name == "tree"))
def test_output_is_that_of_speculation_off(
    name: str, model: Path, plain: Plain, make_pair: Callable[..., NodePair], tmp_path: Path
) -> None:
    """Chains and trees with rejections, prefix hits, preemptions, mixed batches and choices, local prompts, and each
    transport of a CPU."""
    algorithm, shape, transport, buckets, chunk, place = DRAFTS[name]
    if algorithm == "standalone":
        draft = drafters.perturbed(model, tmp_path / "draft", 0.03)
    else:
        draft = write_head(tmp_path / "draft", algorithm, model)
    settings = {"speculative": algorithm, "draft_model": str(draft), "transport": transport, "chunk_tokens": chunk}
    pair = make_pair(buckets, **settings, **shape)
    coach(pair.decode.executor.engine.drafter, plain.truths)
    watch = Watch.of(pair)
    for cell in CELLS if is_whole() else CELLS[4:]:
        run_cell(pair, cell, plain.cases, place)
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > stats.num_accepted > 0
    assert (watch.num_moves > 0) == ("tree" in name)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    thinned([({}, {"tp": 2}), ({}, {"dp_attention": 2}), ({"tp": 2}, {}), ({}, {"tp": 4})], lambda i, *_: i == 0),
    ids=["1-2", "1-dp", "2-1", "1-4"],
)
def test_ranks_of_any_number_have_the_same_text(
    prefill: dict[str, int], decode: dict[str, int], plain: Plain, make_pair: Callable[..., NodePair]
) -> None:
    """Ranks divide the heads, or share one of them."""
    pair = make_pair(prefill=prefill, decode=decode, chunk_tokens=EDGE, speculative="ngram")
    for case in plain.cases:
        pair.submit(case.ask.name, case.prompt, case.params, n=case.ask.n)
    results = pair.run()
    for case in plain.cases:
        case.check([results[case.ask.name, choice] for choice in range(case.ask.n)])


def test_three_choices_and_a_request_that_moved_have_the_same_text(make_pair: Callable[..., NodePair]) -> None:
    """The prompt is computed by the prefill node, or locally."""
    check_moves(make_pair(), PROMPT)


@pytest.fixture(scope="module")
def truth(reference: Reference) -> list[int]:
    """The text after PROMPT by a Llama of transformers that computes the polynomials token after token."""
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(reference.logits(ids).argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture
def run(make_pair: Callable[..., NodePair], truth: list[int]) -> Callable[..., list[int] | str]:
    """A function that returns the text of a pair of nodes, about half of whose drafts are accepted, or why it failed.
    The prompt is computed in chunks, and handed over to the byte."""

    def run(**settings: Any) -> list[int] | str:
        pair = make_pair(chunk_tokens=7, speculative="ngram", draft_steps=3, transport="local", **settings)
        coach(pair.decode.executor.engine.drafter, {0: PROMPT + truth}, lambda _, position: position % 5 > 1)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        result, stats = pair.run()["a", 0], pair.decode.rounds.stats
        if result.failed is not None:
            return result.failed.message
        assert stats.num_drafted > stats.num_accepted > 0 or result.ids != truth
        assert pair.decode.stats().bytes_moved == handoff_bytes(pair.hellos["decode"].layout, len(PROMPT)).target_kv
        return result.ids

    return run


def test_the_text_is_that_of_polynomials_computed_token_by_token(run: Callable[..., Any], truth: list[int]) -> None:
    assert run() == truth


def test_values_that_are_shifted_by_one_token_are_noticed(
    run: Callable[..., Any], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the values after one token more are kept as those at an edge."""
    keep = Polynomials._keep

    def late(self: Polynomials, rows: Any, pages: Any, edge: int, block: int, values: Any) -> None:
        keep(self, rows, pages, edge, block, polynomial.moved(values, 1, edge, self.heads))

    monkeypatch.setattr(Polynomials, "_keep", late)
    assert run() != truth


def test_ids_that_are_shifted_by_one_token_are_noticed(
    run: Callable[..., Any], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PoolRows.read

    def early(self: PoolRows, name: str, place: int, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        off = 1 if name == IDS and first > 0 else 0
        return read(self, name, place, pages, first - off, stop - off)

    monkeypatch.setattr(PoolRows, "read", early)
    assert run() != truth


@pytest.mark.parametrize("kind", [IDS, VALUES])
def test_a_rejected_draft_that_is_left_in_is_noticed(
    kind: str, run: Callable[..., Any], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: what a round has written is not written again by the round that takes another token."""
    write, written = PoolRows.write, set[Any]()

    def is_new(rows: PoolRows, *key: int) -> bool:
        is_known = (rows.pools[kind].data_ptr(), *key) in written
        written.add((rows.pools[kind].data_ptr(), *key))
        return not is_known

    def store_once(self: PoolRows, name: str, place: int, rows: torch.Tensor) -> None:
        positions = torch.cat([batch.positions for batch in self.batches]).tolist()
        pages, slots = self.slots
        for row, (page, slot, position) in enumerate(zip(pages.tolist(), slots.tolist(), positions, strict=True)):
            if name != kind or is_new(self, place, page, position):
                self.pools[name][place][page, :, :, slot] = rows[row]

    def write_once(self: PoolRows, name: str, place: int, pages: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        if name != kind or is_new(self, place, int(pages[first // EDGE]), first):
            write(self, name, place, pages, first, rows)

    monkeypatch.setattr(PoolRows, "store", store_once)
    monkeypatch.setattr(PoolRows, "write", write_once)
    assert run(prefix_cache=False) != truth


@pytest.mark.parametrize(("kind", "checksums"), halved([IDS, VALUES], [True, False]))
def test_one_wrong_number_on_the_wire_is_noticed(
    kind: str, checksums: bool, run: Callable[..., Any], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the page is wrong, so the handoff fails. Without digests the text differs, so the number
    mattered."""
    step, pool = LocalTransport.step, 1 if kind == IDS else 2

    def wrong(self: LocalTransport, max_bytes: int) -> Iterator[Landed]:
        for landed in step(self, max_bytes):
            memory = self.memory[pool]
            if memory.holds(landed.move.target):
                memory.pages[0, landed.move.target - memory.first].view("<i8")[0] += 1
            yield landed

    monkeypatch.setattr(LocalTransport, "step", wrong)
    text = run(checksums=checksums)
    assert "checksum" in str(text) if checksums else text != truth
