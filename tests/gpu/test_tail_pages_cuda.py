"""Models of which some layers have a window, on CUDA: these layers have tail pages. Text is that of a CPU, and graphs
bring what direct calls bring."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_nodes import gpu_client, gpu_prefill, make_pool, poll_until
from handoff_nodes import unit
from heads import write_head
from matrix import CELLS, PAGE_SIZE, Place, Plain, run_cell
from node_pair import NodePair, params
from solo import Solo

from baton.kernels.operations import preferring
from baton.metadata.handoff.schema.schema import make_schema, on_gpu
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.node_info import FurtherPool, KvPlane, PoolLayout

WINDOW = 9
PLANES = tuple(KvPlane(name, 4, 64, "bfloat16") for name in ("k", "v"))
SCHEMA = on_gpu(make_schema(PoolLayout(6, 4, 64, "bfloat16", further=(FurtherPool("window", 5, PLANES, WINDOW),))))
NUM_PAGES = 200


@pytest.fixture(autouse=True)
def _no_tf32(no_tf32: None) -> None:
    """Products are float32."""


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("gpt_oss", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def reference(model: Path) -> Plain:
    """The text of a CPU."""
    return Plain.of(model)


@pytest.mark.parametrize(
    ("place", "drafter", "transport", "chunk"),
    [
        ("remote", "none", "cuda", 64),
        ("remote", "tree", "cuda", 7),
        ("remote", "ngram", "zmq", PAGE_SIZE),
        ("remote", "tree", "local", 64),
        ("local", "none", "cuda", 7),
        ("local", "tree", "cuda", 64),
        ("mixed", "ngram", "cuda", 64),
    ],
)
def test_text_of_both_nodes_is_that_of_the_cpu(
    place: Place, drafter: str, transport: str, chunk: int, model: Path, reference: Plain, tmp_path: Path
) -> None:
    """Cold and with prefix hits, alone and mixed, preempted and not; chunks of several pages and rounds are graphs."""
    both: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 190}
    both |= {"max_running": 10, "chunk_tokens": chunk, "transport": transport, "speculative": "none"}
    if drafter == "ngram":
        both |= {"speculative": "ngram", "draft_steps": 3}
    elif drafter == "tree":
        head = write_head(tmp_path / "head", "eagle", model)
        both |= {"speculative": "eagle", "draft_model": str(head), "draft_topk": 2, "draft_tokens": 8}
    with preferring("triton"), closing(NodePair(model, prefill=both, decode=both)) as pair:
        assert pair.decode.executor.tail_window == WINDOW
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, place)
        pair.check_books()


@pytest.mark.parametrize("shape", [{}, {"draft_topk": 3, "draft_tokens": 8}], ids=["chain", "tree"])
def test_rounds_in_graphs_bring_what_direct_calls_bring(shape: dict[str, int], model: Path, tmp_path: Path) -> None:
    drafting = {"speculative": "eagle", "draft_model": str(write_head(tmp_path, "eagle", model)), **shape}

    def run(solo: Solo) -> list[list[int]]:
        prompts = [random.Random(i).choices(range(512), k=num) for i, num in enumerate((7, 22, 40))]
        sequences = [solo.start(prompt, params(60, seed=i)) for i, prompt in enumerate(prompts)]
        for turn in range(12):
            solo.round([sequences[i] for i in ((0, 1), (2,), (0,), (1, 2))[turn % 4]], solo.rounds.shape.num_steps)
        return [each.token_ids for each in sequences]

    with preferring("triton"):
        direct = run(Solo(model, device="cuda", num_pages=200, page_size=PAGE_SIZE, **drafting))
        captured = Solo(
            model, device="cuda", num_pages=200, page_size=PAGE_SIZE, num_slots=5, buckets=(1, 2), **drafting
        )
        captured.rounds.executor.warm_up()
        assert run(captured) == direct


@pytest.mark.parametrize("transport", ["cuda", "local", "zmq"])
def test_kept_pages_and_tail_pages_arrive_from_another_process(transport: str) -> None:
    ours, theirs = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, 1)
    client = gpu_client(SCHEMA, ours, transport)
    sources, targets = [5, 3, NUM_PAGES + 9, 2 * NUM_PAGES - 1], [7, 198, NUM_PAGES + 1, NUM_PAGES + 30]
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), 4)
        client.claim(unit(), prefill.peer, 0, targets)
        prefill.tell("offer", unit(), [0, 1, 2, 3], sources, [1, 1, 2, 3])
        prefill.tell("finish", unit())
        arrived = poll_until(client, (Arrived, TransferFailed))
        assert isinstance(arrived, Arrived) and arrived.times.transport == transport, arrived
        client.close()
    for first, place in ((0, 0), (NUM_PAGES, 1)):
        own = [page - first for page in targets if (page >= NUM_PAGES) == bool(first)]
        their = [page - first for page in sources if (page >= NUM_PAGES) == bool(first)]
        assert torch.equal(ours.kvs[place][:, own], theirs.kvs[place][:, their])
        others = [page for page in range(NUM_PAGES) if page not in own]
        assert not ours.kvs[place][:, others].any(), "other pages are untouched"
