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
