"""DeepSeek-V4: a tail page keeps what entries are made of for its last tokens alone.

Pages and the rows that they keep are short here, so that a text passes many pages, and chunks and rounds write rows
over others. Texts are compared with those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drafters import STREAM_MTP, target_of
from node_pair import NodePair, node_pairs, params
from solo import caught, coach
from thinned import is_whole, thinned
from ties import Reference

from baton.engine.attention.pool_rows import PoolRows
from baton.engine.checkpoint import read_compressed
from baton.metadata.handoff.schema.schema import handoff_bytes, kv_layouts, pools

PAGE_SIZE, MOST_STEPS, NUM_TOKENS = 16, 2, 20
LENGTHS = range(1, 70) if is_whole() else (3, 16, 18, 47)
CASES = [
    ({"chunk_tokens": 5}, {"draft_steps": 2}, False),
    ({"chunk_tokens": 64}, {"draft_steps": 1}, False),
    ({"chunk_tokens": 17, "transport": "zmq"}, {}, False),
    ({"chunk_tokens": 13}, {"draft_steps": 2}, True),
]
MakePair = Callable[..., NodePair]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return target_of(STREAM_MTP, checkpoint)


class Texts(NamedTuple):
    """The text of transformers after each prompt."""

    reference: Reference
    texts: dict[int, list[int]]  # by the length of the prompt


@pytest.fixture(scope="module")
def texts(model: Path) -> Iterator[Texts]:
    reference = Reference(model)
    yield Texts(reference, {num: reference.generate(prompt(num), NUM_TOKENS) for num in LENGTHS})
    assert reference.num_ties <= 1, reference.num_ties


@pytest.fixture
def make_pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    monkeypatch.setattr(read_compressed, "MAX_DRAFT_STEPS", MOST_STEPS)
    with node_pairs() as start:

        def make(both: dict[str, Any], drafts: dict[str, Any]) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 200, "transport": "local", **both}
            both |= {"speculative": "mtp", **drafts} if drafts else {"speculative": "none"}
            return start(model, prefill=both, decode=both)

        yield make


def prompt(num_tokens: int) -> list[int]:
    """Return a prompt whose pages are those of longer ones."""
    return random.Random(4).choices(range(1, 512), k=100)[:num_tokens]


def check(pair: NodePair, texts: Texts, *, is_local: bool = False) -> None:
    for num, text in texts.texts.items():  # each hits the pages of the one before
        pair.submit(f"{num}", prompt(num), params(NUM_TOKENS, seed=num), is_local=is_local)
        result = pair.run()[f"{num}", 0]
        assert result.failed is None, result.failed
        texts.reference.assert_greedy(prompt(num), result.ids, text)


def tell(monkeypatch: pytest.MonkeyPatch, texts: Texts) -> None:
    """Let rounds accept none, some or all of their drafts."""
    known = {num: prompt(num) + text for num, text in texts.texts.items()}
    coach(monkeypatch, known, lambda _, position: position % 7 not in (2, 3))


@pytest.mark.parametrize(("both", "drafts", "is_local"), thinned(CASES, lambda i, *_: i in (0, 3)))
def test_texts_are_those_of_transformers(
    both: dict[str, Any],
    drafts: dict[str, Any],
    is_local: bool,
    make_pair: MakePair,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if drafts:
        tell(monkeypatch, texts)
    pair = make_pair(both, drafts)
    schema = pair.hellos["decode"].layout
    rows = {name: layout.page_size for name, layout in zip(pools(schema), kv_layouts(schema), strict=True)}
    read = {"target.index_inputs": 8, "target.sparse_inputs": 8, "target.heavy_sums": 2}
    kept = {name: num for name, num in rows.items() if num != PAGE_SIZE}
    assert kept == {name: num + MOST_STEPS + 1 for name, num in read.items()}
    check(pair, texts, is_local=is_local)
    if not is_local and is_whole():
        cold = make_pair({**both, "prefix_cache": False}, drafts)
        check(cold, texts)
        sizes = [handoff_bytes(schema, num) for num in LENGTHS]
        assert cold.decode.stats().bytes_moved == sum(each.target_kv + each.draft_kv for each in sizes)


def _keeps_first(patch: pytest.MonkeyPatch) -> None:
    """Of the tokens that share a row, the first one has it."""
    write = PoolRows.write

    def first(self: PoolRows, name: str, place: int, pages: Any, start: int, rows: Any) -> None:
        num_rows = self.pools[name][place].shape[2]
        for at in range(len(rows) - 1, -1, -1) if num_rows < self.page_size else (-1,):
            write(self, name, place, pages, *((start, rows) if at < 0 else (start + at, rows[at : at + 1])))

    patch.setattr(PoolRows, "write", first)


def _keeps_too_few(patch: pytest.MonkeyPatch) -> None:
    """The rows of a round that are rejected lie over those that are read."""
    patch.setattr(read_compressed, "MAX_DRAFT_STEPS", -3)


@pytest.mark.parametrize("defect", [_keeps_first, _keeps_too_few])
def test_each_defect_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None],
    make_pair: MakePair,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(monkeypatch, texts)
    defect(monkeypatch)
    pair = make_pair({"chunk_tokens": 64}, {"draft_steps": 2})
    with caught():
        check(pair, texts)
