"""Time the operations around the layers of a round, in CUDA graphs: Triton kernels against their torch references.

    python tests/benchmarks/kernel_times/bench_kernels_round.py [--only round sampling] [--rows 1 8 64]
                                                                [--sampled-rows 64 384]

    round      growing trees, choosing their nodes, ancestry, the walk, moving accepted KV in all layers, rows of slots
               with their hidden states, the end of a round, the rotations of positions
    sampling   tokens of verified rows and of a draft head's rows with 32,000 logits: every kind of sampling over logits
               like a planted model's (a peak, groups, a flat tail), like a real model's (Zipf), and of nearly equal
               likelihood. They are called as engine/sampling/sampling.py calls them

Shapes are those of Llama-3.1-8B. Without a GPU, small results are compared in the interpreter and nothing is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from graph_times import IS_TIMED, Kernel, measure, same

from baton.engine.pace.draft_length import DraftShape
from baton.kernels.operations import preferring
from baton.kernels.products import triton_rotary
from baton.kernels.products.rotary import turns_ref
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.processors import History, TokenColumns, process_logits
from baton.kernels.sampling.sample import Draws, perturbed_argmax
from baton.kernels.state import triton_growth, triton_rows, triton_trees
from baton.kernels.state.rows import Columns, advance_ref_
from baton.kernels.state.trees import (
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
VOCAB_SIZE, DRAFT_VOCAB_SIZE = (128_256, 32_000) if IS_TIMED else (700, 300)
PAGE_SIZE, NUM_CALLS = 64, 20
SHAPE = DraftShape(5, 4, 16)


def both(
    name: str, kernel: Callable[[], Any], reference: Callable[[], Any], changed: Sequence[Tensor] = ()
) -> Iterator[Kernel]:
    """Yield a kernel and its reference. Either gives a tensor, tensors, or None if it changed `changed`."""
    tolerance = 0.0 if not name.startswith("turns") else 2e-2 if DTYPE is torch.bfloat16 else 1e-5
    yield Kernel(name, [kernel] * NUM_CALLS, check=same(kernel, reference, changed, tolerance))
    yield Kernel(f"{name}: torch", [reference] * NUM_CALLS)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high)).to(DEVICE)


def tree_cases(num_seqs: int, shape: DraftShape) -> Iterator[Kernel]:
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
    yield from both("tree: grow a step", lambda: triton_growth.grow_(*middle), lambda: grow_ref_(*middle), candidates)
    num_drafts, num_steps = shape.num_tokens, shape.num_steps
    yield from both(
        "tree: choose nodes",
        lambda: triton_growth.choose(candidates, num_drafts),
        lambda: choose_ref(candidates, num_drafts),
    )
    tokens, parents = choose_ref(candidates, num_drafts)
    yield from both(
        "tree: ancestry",
        lambda: triton_trees.ancestry(parents, num_steps),
        lambda: ancestry_ref(parents, num_steps),
    )
    targets = torch.cat([tokens[:, :1], tokens], dim=1)  # the first child of the root, at least
    limits = torch.full((num_seqs,), num_steps, device=DEVICE)
    walk = (tokens, parents, targets, limits, num_steps)
    yield from both("tree: walk", lambda: triton_trees.walk_tree(*walk), lambda: walk_tree_ref(*walk))
    num_columns = 2
    kv = normal(NUM_LAYERS, 1 + num_seqs * num_columns, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    table = torch.arange(1, 1 + num_seqs * num_columns, device=DEVICE).view(num_seqs, num_columns)
    starts = torch.full((num_seqs, 1), PAGE_SIZE - 3, device=DEVICE) + torch.arange(num_steps, device=DEVICE)
    slots = (starts + torch.arange(num_steps, device=DEVICE), starts)
    yield from both(
        "tree: move accepted KV",
        lambda: triton_trees.move_slots_(kv, table, *slots),
        lambda: move_slots_ref_(kv, table, *slots),
        [kv],
    )


def row_cases(num_seqs: int, num_steps: int) -> Iterator[Kernel]:
    """Cases of rows: a draft state per slot, nodes on a path, the end of a round, rotations."""
    num_slots = num_seqs + 9
    state = [integers(128_000, num_slots, 4), normal(num_slots, 4, dtype=torch.float32), normal(num_slots, WIDTH)]
    index = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[:num_seqs].to(DEVICE)
    rows = [table.index_select(0, index) for table in state]

    def gather() -> list[Tensor]:
        new = [torch.empty_like(each) for each in rows]
        triton_rows.copy_rows_(new, state, of=index)
        return new

    yield from both("rows: gather of 3 tensors", gather, lambda: [table.index_select(0, index) for table in state])
    yield from both(
        "rows: assign to 3 tensors",
        lambda: triton_rows.copy_rows_(state, rows, to=index),
        lambda: [table.index_copy_(0, index, new) for table, new in zip(state, rows, strict=True)][:0],
        state,
    )
    table, columns = integers(1000, 7, num_slots), Columns((0, 2, 3), 1)
    targets, accepted = integers(128_000, num_seqs, num_steps + 1), integers(num_steps, num_seqs)
    resting = table[:, -1].clone()
    end = (table, columns, index, targets, torch.ones_like(targets, dtype=torch.bool), accepted, resting)
    yield from both("end of a round", lambda: triton_rows.advance_(*end), lambda: advance_ref_(*end), [table])
    positions, frequencies = integers(8000, num_seqs * (num_steps + 1)), normal(2, HEAD_DIM, dtype=torch.float32)
    turns = (positions, frequencies, 1.0, DTYPE)
    yield from both("turns of positions", lambda: triton_rotary.turns(*turns), lambda: turns_ref(*turns))


class Kind(NamedTuple):
    """Parameters of sampling, as a request states them."""

    temperature: float
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    repetition: float = 1.0


KINDS = {
    "greedy": None,
    "temperature": Kind(1.0),
    "top_p": Kind(0.6, top_p=0.9),
    "top_k": Kind(1.0, top_k=50),
    "mix": Kind(0.6, top_k=50, top_p=0.9, repetition=1.1),
    "wide": Kind(1.5, top_k=20_000, top_p=0.99),
}


def logits_like(name: str, num_rows: int, num_logits: int) -> Tensor:
    """Return logits [num_rows, num_logits] of a distribution: "planted", "zipf" or "flat"."""
    generator = torch.Generator().manual_seed(num_logits)
    noise = torch.randn(num_logits, generator=generator)
    if name == "planted":  # planted.py: the right low digit of 31 gains 2.5, each of ten right bits 1.25
        codes = torch.arange(min(num_logits, 31_744))
        num_wrong = (codes.unsqueeze(1) // 31 >> torch.arange(10) & 1).sum(1)
        row = noise * 0.05
        row[: len(codes)] += 2.5 * (codes % 31 == 7) + 1.25 * (10 - 2 * num_wrong)
    elif name == "zipf":
        row = noise * 0.3 - 1.3 * torch.arange(1, num_logits + 1).log()
    else:
        row = noise
    orders = [torch.randperm(num_logits, generator=generator) for _ in range(min(num_rows, 16))]
    rows = torch.stack([row[order] for order in orders]).to(DEVICE, DTYPE)
    return rows.repeat(-(-num_rows // len(orders)), 1)[:num_rows].contiguous()


def sampling_cases(num_rows: int, num_logits: int, vocab_size: int) -> Iterator[Kernel]:
    """Cases of tokens of rows with `num_logits` logits each, of all tokens of the vocabulary or of some."""
    seeds, positions = integers(2**62, num_rows), integers(8000, num_rows)
    logit_ids = None
    if num_logits < vocab_size:
        logit_ids = (torch.arange(num_logits, device=DEVICE) * vocab_size // num_logits).to(torch.int32)
    num_seqs = min(num_rows, 64)
    columns = TokenColumns(integers(2, num_seqs, vocab_size).bool(), integers(2, num_seqs, vocab_size).to(torch.int32))
    history = History.of(columns, torch.arange(num_rows, device=DEVICE) % num_seqs)
    bans_now = torch.zeros(num_rows, dtype=torch.bool, device=DEVICE)
    for distribution in ("planted", "zipf", "flat"):
        logits = logits_like(distribution, num_rows, num_logits)
        for name, kind in KINDS.items():
            draws, penalties = None, None
            if kind is not None:
                off = torch.full((num_rows,), -torch.inf, device=DEVICE)
                shares = torch.full((num_rows,), kind.top_p, dtype=torch.float64, device=DEVICE)
                filters = Filters(off, torch.full_like(seeds, kind.top_k), shares) if name != "temperature" else None
                draws = Draws(seeds, positions, torch.full_like(off, kind.temperature), filters)
                if kind.repetition != 1:
                    penalties = torch.tensor([kind.repetition, 0.0, 0.0], device=DEVICE).repeat_interleave(num_rows)

            def sampled(
                by: Any, logits: Tensor = logits, draws: Draws | None = draws, penalties: Tensor | None = penalties
            ) -> Tensor:
                with preferring(by):
                    if penalties is not None:
                        logits = process_logits(logits, history, penalties.view(3, -1), bans_now, logit_ids)
                    return perturbed_argmax(logits, draws, logit_ids).token_ids

            yield from both(
                f"{name} {distribution} of {num_logits}",
                lambda sampled=sampled: sampled("triton"),
                lambda sampled=sampled: sampled("reference"),
            )


def rounds(options: argparse.Namespace) -> Iterator[Kernel]:
    for num_seqs in options.rows:
        for kernel in (*tree_cases(num_seqs, SHAPE), *row_cases(num_seqs, SHAPE.num_steps)):
            yield kernel._replace(name=f"{kernel.name}, {num_seqs} sequences")


def sampling(options: argparse.Namespace) -> Iterator[Kernel]:
    sizes = [(num_rows, VOCAB_SIZE) for num_rows in options.sampled_rows]
    for num_rows, num_logits in (*sizes, (min(options.sampled_rows), DRAFT_VOCAB_SIZE)):
        for kernel in sampling_cases(num_rows, num_logits, VOCAB_SIZE):
            yield kernel._replace(name=f"{kernel.name}, {num_rows} rows")


if __name__ == "__main__":
    numbers = {"rows": (1, 8, 64), "sampled_rows": (64, 384)} if IS_TIMED else {"rows": (2,), "sampled_rows": (2,)}
    measure(__doc__, "round-kernels", {"round": rounds, "sampling": sampling}, **numbers)
