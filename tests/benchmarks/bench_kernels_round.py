"""Time the operations around the layers of a round, in CUDA graphs: Triton kernels against their torch references.

    python tests/benchmarks/bench_kernels_round.py [--rows 1 8 64] [--topk 4 --steps 5 --drafts 16] [--json FILE]

The operations: growing trees, choosing their nodes, ancestry, the walk, moving accepted KV in all layers, rows of slots
with their hidden states, the end of a round, the rotations of positions. Shapes are those of Llama-3.1-8B.

Each result is compared with the reference before it is timed. A time is that of a graph of twenty calls, divided by
twenty. Without a GPU, small results are compared in Triton's interpreter and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

IS_TIMED = torch.cuda.is_available()
if not IS_TIMED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bench_kernels_dense import microseconds

from baton.engine.draft_shape import DraftShape
from baton.kernels import triton_advance, triton_growth, triton_rotary, triton_rows, triton_trees
from baton.kernels.advance import Columns, advance_ref_
from baton.kernels.rotary import turns_ref
from baton.kernels.trees import (
    Candidates,
    Frontier,
    ancestry_ref,
    choose_ref,
    grow_ref_,
    move_slots_ref_,
    walk_tree_ref,
)

DEVICE = torch.device("cuda" if IS_TIMED else "cpu")
DTYPE = torch.bfloat16 if IS_TIMED else torch.float32
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, WIDTH = (32, 8, 128, 4096) if IS_TIMED else (2, 2, 16, 64)
PAGE_SIZE, NUM_CALLS = 64, 20


class Case(NamedTuple):
    name: str
    kernel: Callable[[], Any]  # either gives a tensor, tensors, or None where it changed `changed`
    reference: Callable[[], Any]
    changed: Sequence[Tensor] = ()


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high)).to(DEVICE)


def tree_cases(num_seqs: int, shape: DraftShape) -> Iterator[Case]:
    """Cases of trees: a step in the middle of a tree, and the steps once it is complete."""
    candidates = Candidates.allocate(num_seqs, shape.max_drafts, DEVICE)
    steps: list[tuple[Candidates, Frontier, Tensor, Tensor]] = []
    frontier = Frontier.root(normal(num_seqs, WIDTH))
    for step in range(shape.num_steps):
        size = (num_seqs * (shape.topk if step else 1), shape.topk)
        scores = normal(*size, dtype=torch.float32).abs().neg()
        steps.append((candidates, frontier, integers(128_000, *size), scores))
        frontier = grow_ref_(*steps[-1])
    middle = steps[shape.num_steps // 2]
    yield Case("tree: grow a step", lambda: triton_growth.grow_(*middle), lambda: grow_ref_(*middle), candidates)
    num_drafts, num_steps = shape.num_tokens, shape.num_steps
    yield Case(
        "tree: choose nodes",
        lambda: triton_growth.choose(candidates, num_drafts),
        lambda: choose_ref(candidates, num_drafts),
    )
    tokens, parents = choose_ref(candidates, num_drafts)
    yield Case(
        "tree: ancestry",
        lambda: triton_trees.ancestry(parents, num_steps),
        lambda: ancestry_ref(parents, num_steps),
    )
    targets = torch.cat([tokens[:, :1], tokens], dim=1)  # the first child of the root, at least
    limits = torch.full((num_seqs,), num_steps, device=DEVICE)
    walk = (tokens, parents, targets, limits, num_steps)
    yield Case("tree: walk", lambda: triton_trees.walk_tree(*walk), lambda: walk_tree_ref(*walk))
    num_columns = 2
    kv = normal(NUM_LAYERS, 1 + num_seqs * num_columns, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    table = torch.arange(1, 1 + num_seqs * num_columns, device=DEVICE).view(num_seqs, num_columns)
    starts = torch.full((num_seqs, 1), PAGE_SIZE - 3, device=DEVICE) + torch.arange(num_steps, device=DEVICE)
    slots = (starts + torch.arange(num_steps, device=DEVICE), starts)
    yield Case(
        "tree: move accepted KV",
        lambda: triton_trees.move_slots_(kv, table, *slots),
        lambda: move_slots_ref_(kv, table, *slots),
        [kv],
    )


def row_cases(num_seqs: int, num_steps: int) -> Iterator[Case]:
    """Cases of rows: a draft state per slot, nodes on a path, the end of a round, rotations."""
    num_slots = num_seqs + 9
    state = [integers(128_000, num_slots, 4), normal(num_slots, 4, dtype=torch.float32), normal(num_slots, WIDTH)]
    index = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[:num_seqs].to(DEVICE)
    rows = [table.index_select(0, index) for table in state]

    def gather() -> list[Tensor]:
        new = [torch.empty_like(each) for each in rows]
        triton_rows.copy_rows_(new, state, of=index)
        return new

    yield Case("rows: gather of 3 tensors", gather, lambda: [table.index_select(0, index) for table in state])
    yield Case(
        "rows: assign to 3 tensors",
        lambda: triton_rows.copy_rows_(state, rows, to=index),
        lambda: [table.index_copy_(0, index, new) for table, new in zip(state, rows, strict=True)][:0],
        state,
    )
    table, columns = integers(1000, 7, num_slots), Columns((0, 2, 3), 1)
    targets, accepted = integers(128_000, num_seqs, num_steps + 1), integers(num_steps, num_seqs)
    resting = table[:, -1].clone()
    end = (table, columns, index, targets, torch.ones_like(targets, dtype=torch.bool), accepted, resting)
    yield Case("end of a round", lambda: triton_advance.advance_(*end), lambda: advance_ref_(*end), [table])
    positions, frequencies = integers(8000, num_seqs * (num_steps + 1)), normal(2, HEAD_DIM, dtype=torch.float32)
    turns = (positions, frequencies, 1.0, DTYPE)
    yield Case("turns of positions", lambda: triton_rotary.turns(*turns), lambda: turns_ref(*turns))


def check(case: Case) -> None:
    """Run both from the same start. Raises AssertionError if the results differ."""
    before = [each.clone() for each in case.changed]
    results: list[list[Tensor]] = []
    for call in (case.reference, case.kernel):
        for each, start in zip(case.changed, before, strict=True):
            each.copy_(start)
        result = call()
        given = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        results.append([*given, *(each.clone() for each in case.changed)])
    for ours, theirs in zip(results[1][-len(results[0]) :], results[0], strict=True):
        tolerance = 2e-2 if ours.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance if case.name.startswith("turns") else 0, equal_nan=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64] if IS_TIMED else [2], help="sequences")
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=16, help="nodes of a tree that are verified")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if IS_TIMED else "none",
        "torch": torch.__version__,
    }
    report["cases"] = []
    with torch.inference_mode():
        for num_seqs in args.rows:
            cases = [
                *tree_cases(num_seqs, DraftShape(args.steps, args.topk, args.drafts)),
                *row_cases(num_seqs, args.steps),
            ]
            for case in cases:
                check(case)
                row: dict[str, Any] = {"name": case.name, "sequences": num_seqs}
                if IS_TIMED:
                    calls = {"us": case.kernel, "torch_us": case.reference}
                    row |= {name: microseconds([call] * NUM_CALLS) for name, call in calls.items()}
                report["cases"].append(row)
                sys.stdout.write(", ".join(f"{key} {value}" for key, value in row.items()) + "\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
