"""What a captured round leaves behind does not stand in the way of sequences that come later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo


def test_columns_that_a_round_allocated_take_sequences(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Rounds run in inference mode, where graphs allocate all columns at once; a node admits outside of it."""
    model = target_of("eagle", checkpoint)
    solo, other = (Solo(model, num_pages=40, **settings("eagle", model, tmp_path / each)) for each in ("a", "b"))
    with torch.inference_mode():
        solo.rounds.slots.allocate_all()
    wants = params(20, temperature=0.8, seed=3, repetition_penalty=1.3, logit_bias={5: 1.5}, min_tokens=4)
    outputs = [each.run(each.start([1, 2, 3, 4], wants), 16, 2) for each in (solo, other)]
    assert outputs[0] == outputs[1]


def test_a_bucket_takes_the_columns_that_a_round_may_reach(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its inputs are static: what a round before left beyond is not copied, and what it left in these is cleared."""
    model = target_of("eagle", checkpoint)
    solo = Solo(model, num_pages=60, context_len=400, buckets=(3,), **settings("eagle", model, tmp_path))
    long, short = (solo.start(list(range(1, num_tokens)), params(4)) for num_tokens in (40, 4))
    for _ in range(2):  # both of a bucket's inputs
        solo.rounds._fill([long, short], [0, 0], solo.rounds.shape)
    inputs = solo.rounds._fill([short], [0], solo.rounds.shape)
    page_size = solo.engine.pool.page_size
    reach = -(-(len(short.pages) * page_size + 2 * solo.rounds.shape.num_slots) // page_size)
    table = inputs.block[:, : inputs.num_used][:, 3 + inputs.proposed.shape[1] :]
    assert len(short.pages) < reach <= table.shape[1] < inputs.block_table.shape[1]
    assert table[0].tolist() == [*short.pages, *[0] * (table.shape[1] - len(short.pages))]
    assert not table[1:].any()
