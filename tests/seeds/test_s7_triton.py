"""Ranks of a group compute by the kernels of a GPU, here in Triton's interpreter, also for zero rows.

tests/seeds/test_s7_idle_ranks.py runs the lives of ranks by the operations of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drafters import perturbed, settings, target_of
from node_pair import params
from rank_sequences import RankSequences
from solo import Solo
from thinned import every
from thread_ranks import ThreadRanks
from triton_device import IS_INTERPRETED

pytest.importorskip("triton")

from baton.decode_node.config import DecodeConfig
from baton.kernels.operations import preferring

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tests/gpu/test_rank_groups_cuda.py has ranks on GPUs")

FIRST = ([7, 8, 9, 7, 8], params(6, temperature=0.8, seed=4, top_k=20, num_logprobs=1))
SECOND = ([3, 5], params(4))


@pytest.mark.parametrize(
    ("name", "buckets"), every([("eagle3", ()), ("standalone", (1, 2))], 2, first=1), ids=["zero rows", "padding"]
)
def test_a_rank_is_idle_in_every_phase(
    name: str, buckets: tuple[int, ...], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint, num_hidden_layers=1)
    drafting = settings(name, model, tmp_path, steps=2)
    if name == "standalone":
        drafting["draft_model"] = str(perturbed(model, tmp_path / "often right", 0.05))
    one = Solo(model, **drafting)
    config = DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=32, **drafting)
    with ThreadRanks(2, config, num_slots=2, buckets=buckets, timeout_s=120.0) as ranks, preferring("triton"):
        world = RankSequences(ranks, num_pages=32)
        started = world.start({1: FIRST}, chunk=3)
        world.round(0)
        world.round(2)
        world.recompute(1, started[0])
        started += world.start({0: SECOND}, chunk=64)
        world.run(2, 0)
        assert all(steps.num_idle > 0 for steps in ranks.steps)
    for sequence, (ids, wanted) in zip(started, [FIRST, SECOND], strict=True):
        theirs = one.run(one.start(ids, wanted), wanted.max_tokens, 2)
        assert sequence.generated[: wanted.max_tokens] == theirs
