"""Pages of prefix caches on GPUs are lent and borrowed, with checksums and without: the text stays the same."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from node_pair import NodePair, params

from baton.kernels.operations import preferring

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
PAGE = 16


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("transport", ["cuda", "local", "zmq"])
@pytest.mark.parametrize("checksums", [True, False])
def test_the_next_turn_borrows_the_pages_of_the_last_one(*, checksums: bool, transport: str, is_local: bool) -> None:
    """Three prompts borrow side by side, while the lender's device may still have work to do."""
    torch.backends.cuda.matmul.allow_tf32 = False
    both: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": 400, "max_running": 4}
    both |= {"chunk_tokens": 64, "speculative": "none", "tune": False, "transport": transport, "checksums": checksums}
    rng = random.Random(1)
    texts = [[rng.randrange(10, 1000) for _ in range(200)] for _ in range(3)]
    with preferring("triton"), closing(NodePair(DEMO, prefill=dict(both), decode=dict(both))) as pair:
        lender, node = (pair.prefill, pair.decode) if is_local else (pair.decode, pair.prefill)
        assert node._borrower is not None
        node._borrower._token_s = lambda: 1.0
        for number, text in enumerate(texts):
            pair.submit(f"first {number}", text, params(24), is_local=not is_local)
        turns = [text + pair.run()[f"first {number}", 0].ids + [7, 8, 9] for number, text in enumerate(texts)]
        for number, turn in enumerate(turns):
            pair.submit(f"plain {number}", turn, params(16), is_local=not is_local)
        expected = [pair.run()[f"plain {number}", 0].ids for number in range(len(turns))]
        node.cache.flush()
        before = node.stats().borrowed_tokens
        for number, turn in enumerate(turns):
            pair.submit(f"lent {number}", turn, params(16), is_local=is_local, num_lent=13)
        assert [pair.run()[f"lent {number}", 0].ids for number in range(len(turns))] == expected
        assert node.stats().borrowed_tokens - before >= len(turns) * 12 * PAGE
        assert lender.stats().checksum_failures == node.stats().checksum_failures == 0
        pair.check_books()
