"""S8 for tail pages: a row of a layer with a window stands at its position. If one is shifted, if a rejected draft is
left in, or if one number is wrong on the wire, it is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import write_head
from node_pair import NodePair, node_pairs, params
from ties import Reference

from baton.metadata.handoff.transports.base import Landed
from baton.metadata.handoff.transports.local import LocalTransport

PAGE_SIZE, WINDOW, NUM_NEW = 4, 9, 12
PROMPT = random.Random(41).choices(range(1, 512), k=41)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("gpt_oss", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return Reference(model).generate(PROMPT, NUM_NEW)


@pytest.fixture
def run(model: Path) -> Iterator[Callable[..., list[int] | str]]:
    """A function that returns the text of a pair of nodes, or why it failed. It calls `fault` with the pair after each
    step in which the sequence runs."""

    with node_pairs() as start:

        def run(fault: Callable[[NodePair], None] = lambda _: None, **both: Any) -> list[int] | str:
            both = {"page_size": PAGE_SIZE, "num_pages": 60, "chunk_tokens": 16, **both}
            pair = start(model, prefill=both, decode=both)
            pair.submit("it", PROMPT, params(NUM_NEW))
            while not pair.is_done:
                pair.step()
                pair.decode.settle()
                if pair.decode.scheduler.running:
                    fault(pair)
            result = pair.results["it", 0]
            return result.ids if result.failed is None else result.failed.message

        yield run


def rows_of(pair: NodePair, position: int) -> torch.Tensor:
    """Return the rows of a position in all layers with tail pages, as a view."""
    [sequence] = pair.decode.scheduler.running
    assert sequence.tail is not None
    engine = pair.decode.executor.engine  # pyright: ignore[reportAttributeAccessIssue]
    page = sequence.tail.pages[position // PAGE_SIZE]
    return engine.target_pools.by_window[1].kv[:, page, ..., position % PAGE_SIZE, :]


def test_a_row_that_is_shifted_by_one_token_is_noticed(run: Callable[..., Any], expected: list[int]) -> None:
    assert run() == expected

    def shift(pair: NodePair) -> None:
        [sequence] = pair.decode.scheduler.running
        last = sequence.num_computed - 1
        rows_of(pair, last)[:] = rows_of(pair, last - 1)

    assert run(shift) != expected


def test_a_rejected_draft_that_is_left_in_is_noticed(
    run: Callable[..., Any], expected: list[int], model: Path, tmp_path: Path
) -> None:
    drafting = {"speculative": "eagle", "draft_model": str(write_head(tmp_path, "eagle", model)), "draft_steps": 3}
    assert run(**drafting) == expected
    left: dict[int, torch.Tensor] = {}  # by position: what the draft wrote

    def leave(pair: NodePair) -> None:
        [sequence] = pair.decode.scheduler.running
        for position in [each for each in left if each < sequence.num_computed]:
            rows_of(pair, position)[:] = left.pop(position)
        if sequence.num_drafted:
            left[sequence.num_computed] = rows_of(pair, sequence.num_computed).clone()

    assert run(leave, **drafting) != expected


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("checksums", [True, False])
def test_one_wrong_number_on_the_wire_is_noticed(
    checksums: bool, times: int, run: Callable[..., Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the page is wrong: the page is pulled again, and the handoff fails if it stays wrong. Without
    digests the text differs, so the number mattered."""
    step, num_wrong = LocalTransport.step, 0

    def wrong(self: LocalTransport, max_bytes: int) -> Iterator[Landed]:
        nonlocal num_wrong
        for landed in step(self, max_bytes):
            for pool in self.memory:
                if pool.first and pool.holds(landed.move.target) and num_wrong < times:
                    numbers = pool.pages[:, landed.move.target - pool.first].view("<f4")
                    numbers[:, -1] += 100.0
                    num_wrong += 1
            yield landed

    monkeypatch.setattr(LocalTransport, "step", wrong)
    text = run(transport="local", checksums=checksums)
    assert num_wrong > 0
    if not checksums:
        assert text != expected
    elif times == 1:
        assert text == expected
    else:
        assert "checksum" in str(text), text
