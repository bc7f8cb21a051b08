"""A kind of layer that one file and one line add, on CUDA: its pools go from GPU to GPU. Text is that of a CPU, which
tests/decode_node/test_added_layer.py compares with transformers. The layer reads its states on the host, so rounds and
prompts have no graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polynomial
import pytest
from heads import write_head
from matrix import CELLS, Place, Plain, coach, run_cell
from node_pair import NodePair, check_moves
from polynomial import EDGE

from baton.engine import engine
from baton.engine.rounds import device_executor, graphs


@pytest.fixture(autouse=True)
def _plain(no_tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are float32, and nothing is captured."""
    for module in (engine, device_executor, graphs):
        monkeypatch.setattr(module, "captures", lambda device: False)


@pytest.fixture(scope="module", params=["tail", "kept"])
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with polynomial.served_model(checkpoint, tmp_path_factory.mktemp("polynomial"), request.param) as directory:
        yield directory


@pytest.fixture(scope="module")
def reference(model: Path) -> Plain:
    """The text of a CPU."""
    return Plain.of(model, page_size=EDGE)


def settings(transport: str, **more: Any) -> dict[str, Any]:
    both = {"device": "cuda", "dtype": "float32", "page_size": EDGE, "num_pages": 150, "max_running": 10}
    return both | {"transport": transport, "tune": False, **more}


@pytest.mark.parametrize(
    ("place", "drafter", "transport", "chunk"),
    [("remote", "chain", "cuda", 64), ("mixed", "tree", "cuda", EDGE - 1), ("local", "chain", "local", EDGE)],
)
def test_text_of_both_nodes_is_that_of_the_cpu(
    place: Place, drafter: str, transport: str, chunk: int, model: Path, reference: Plain, tmp_path: Path
) -> None:
    """With rejected drafts; cold and with prefix hits, alone and mixed, preempted and not."""
    drafts: dict[str, Any] = {"speculative": "eagle", "draft_model": str(write_head(tmp_path / "head", "eagle", model))}
    drafts |= {"draft_steps": 3} | ({"draft_topk": 3, "draft_tokens": 10} if drafter == "tree" else {})
    both = settings(transport, chunk_tokens=chunk, **drafts)
    with closing(NodePair(model, prefill=both, decode=both)) as pair:
        coach(pair.decode.executor.engine.drafter, reference.truths)
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, place)
        pair.check_books()
        assert pair.decode.rounds.stats.num_drafted > pair.decode.rounds.stats.num_accepted > 0


def test_three_choices_and_a_request_that_moved_have_the_same_text(model: Path) -> None:
    """The prompt is computed by the prefill node, or locally."""
    both = settings("cuda")
    with closing(NodePair(model, prefill=both, decode=both)) as pair:
        check_moves(pair, random.Random(8).choices(range(1, 512), k=41))
        pair.check_books()
