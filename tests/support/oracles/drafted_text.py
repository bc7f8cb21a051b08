"""A pair of nodes that drafts serves the text of a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_pair import node_pairs, params
from ties import Reference

PROMPTS = ([5, 9, 300], list(range(40, 66)), [*list(range(40, 54)), 7, 8])  # the last shares pages with the one before


def check_drafted_text(
    model: Path, reference: Reference, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = 12, **settings: Any
) -> None:
    """Serve prompts through the handoff, with small pages and chunks. `settings` are those of both nodes."""
    both = {"page_size": 4, "num_pages": 160, "chunk_tokens": 9, **settings}
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for index, ids in enumerate(prompts):
            pair.submit(f"{index}", ids, params(num_tokens))
        results = pair.run()
        assert pair.decode.stats().num_drafted > 0
    for index, ids in enumerate(prompts):
        reference.assert_greedy(ids, results[f"{index}", 0].ids, reference.generate(ids, num_tokens))
    assert reference.num_compared == len(prompts)
