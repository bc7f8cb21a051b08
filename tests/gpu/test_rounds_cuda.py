"""Rounds as CUDA graphs bring what the same function brings when it is called, whatever lies in padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import CASES, MEMBERS, PARAMS
from cuda_cases import kernels as kernels
from drafters import settings, target_of
from heads import write_head
from node_pair import params
from solo import Solo, spoil
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROMPTS = [random.Random(i).choices(range(512), k=num) for i, num in enumerate((7, 12, 3))]


def run(solo: Solo) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and accepted counts of three sequences in batches that grow and shrink, with other limits in each."""
    sequences = [solo.start(prompt, params(90, seed=i, **PARAMS[i])) for i, prompt in enumerate(PROMPTS)]
    most = solo.rounds.shape.num_steps
    for turn in range(18):
        for _ in range(15 * (turn == 9)):  # the next round that drafts catches up on more rows than a round brings
            solo.round(sequences[:2], 0)
        members, share = MEMBERS[turn % 6], (2, 0, 1)[(turn + turn // 6) % 3]
        num_steps = most if share == 2 or not solo.rounds.shape.is_chain else share
        limits = [(num_steps, num_steps // 2, 0)[(i + turn) % 3] for i in members]
        spoil(solo, sequences[0])
        solo.round([sequences[i] for i in members], num_steps if share else 0, limits if share else None)
    return [each.token_ids for each in sequences], [each.num_accepted for each in sequences]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_graphs_bring_what_direct_calls_bring(
    name: str, shape: dict[str, int], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    drafting = settings(name, model, tmp_path) | shape
    direct = run(Solo(model, device="cuda", num_pages=200, **drafting))
    captured = Solo(model, device="cuda", num_pages=200, num_slots=5, buckets=(1, 2), **drafting)
    captured.rounds.executor.warm_up()
    assert run(captured) == direct


@pytest.mark.parametrize("shape", [{}, {"draft_topk": 3, "draft_tokens": 8}], ids=["chain", "tree"])
def test_graphs_over_latents_bring_what_direct_calls_bring(
    shape: dict[str, int], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("deepseek_v3", q_lora_rank=48)
    drafting = {"speculative": "eagle", "draft_model": str(write_head(tmp_path, "eagle", model)), **shape}
    direct = run(Solo(model, device="cuda", num_pages=200, **drafting))
    captured = Solo(model, device="cuda", num_pages=200, num_slots=5, buckets=(1, 2), **drafting)
    captured.rounds.executor.warm_up()
    assert run(captured) == direct


class Operations(TorchDispatchMode):
    """Records torch's operations on CUDA tensors, with the dtypes of these."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = tuple(each.dtype for each in tree_leaves(args) if isinstance(each, torch.Tensor) and each.is_cuda)
        if dtypes:
            self.met.add((func, *dtypes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_the_first_request_of_a_kind_runs_no_kernel_for_the_first_time(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The device would load it meanwhile, which takes up to 70 ms."""
    model = target_of(name, checkpoint)
    solo = Solo(model, device="cuda", num_pages=200, num_slots=5, buckets=(1, 2), **settings(name, model, tmp_path))

    def serve(kind: dict[str, Any]) -> None:
        sequence = solo.start(PROMPTS[0], params(20, seed=1, **kind))
        solo.run(sequence, 8, 2)
        solo.rounds.release(sequence)

    with Operations() as before:
        solo.engine.warm_up(16)
        solo.rounds.executor.warm_up()
        serve({})
    stops = {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "min_tokens": 4, "stop_ids": (3, 4)}
    for kind in (*PARAMS, stops, {"frequency_penalty": 0.4, "top_p": 0.8, "num_logprobs": 3}):
        with Operations() as service:
            serve(kind)
        assert service.met <= before.met, (kind, service.met - before.met)


STEPS = (5, 0, 0, 5, 1, *[0] * 15, 5, 5, 0, 3, *[0] * 6, 2, 0, 5)


@pytest.mark.parametrize("name", ["standalone", "eagle3", "mtp3-deepseek"])
def test_rounds_that_overlap_bring_what_rounds_alone_bring(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each is submitted before the one before is read, and catches up on rows of rounds that nobody has read."""
    model = target_of(name, checkpoint)
    found: list[Any] = []
    for overlaps in (False, True):
        drafting = settings(name, model, tmp_path / str(overlaps))
        solo = Solo(model, device="cuda", num_pages=400, num_slots=4, buckets=(1, 4), **drafting)
        solo.rounds.executor.warm_up()
        sequences = [solo.start(prompt, params(300, seed=i, **PARAMS[i])) for i, prompt in enumerate(PROMPTS)]
        under_way: list[Any] = []
        for num_steps in STEPS * 2:
            shape = solo.rounds.shape.with_steps(min(num_steps, solo.rounds.shape.num_steps))
            under_way.append(solo.rounds.submit(sequences, shape, [shape.num_steps] * 3))
            while len(under_way) > overlaps:
                solo.take(sequences, solo.rounds.collect(under_way.pop(0)))
        for submitted in under_way:
            solo.take(sequences, solo.rounds.collect(submitted))
        state = [value for each in sequences for _, value in solo.draft(each).present()]
        state += [kv for each in sequences if (kv := solo.draft_kv(each)) is not None]
        found.append(([each.token_ids for each in sequences], [each.num_accepted for each in sequences], state))
    assert found[0][:2] == found[1][:2]
    assert len(found[0][2]) == len(found[1][2]) > 0
    assert all(torch.equal(one, two) for one, two in zip(found[0][2], found[1][2], strict=True))
