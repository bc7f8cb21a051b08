"""Time the kernels of sparse attention (DSA) on a GPU at the shapes of DeepSeek-V3.2: 64 index heads of 128, 2,048
picks, 128 heads that attend to latents of 512 + 64, bfloat16.

    python tests/benchmarks/kernel_times/bench_kernels_index.py [--only scores prompts picks sparse dense] \
        [--heads 64] [--sequences 1 64] [--context 8192 32768 131072] [--chunk 1024]

Scores are compared with reading the index keys once, those of prompts (a chunk at the end of a context) with their
products, picks with reading the scores once, and attention with reading the
latents that it attends to. Picks are compared with `pick` exactly, the others nearly.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from graph_times import Kernel, close, copies, each, measure, normal
from torch import Tensor

from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.picks import PagedSight, PickedRows, Sight, index_scores_ref, pick
from baton.kernels.attention.triton_latents import latent_attention
from baton.kernels.attention.triton_picks import paged_index_scores, paged_picks

HEAD_DIM, NUM_PICKS = 128, 2048  # of the index
NUM_HEADS, RANK, ROTARY_DIM = 128, 512, 64  # of attention
PAGE_SIZE, SCALE = 64, 192**-0.5
_CALLS = 64  # of a choice in a graph, at least: to begin a graph takes about as long as a choice


class Steps(NamedTuple):
    """A forward of sequences of one length with as many new tokens each, over scattered pages."""

    plan: PagedPlan
    sight: PagedSight

    @classmethod
    def make(cls, num_seqs: int, context: int, query_len: int = 1) -> Steps:
        num_pages = context // PAGE_SIZE
        table = (torch.randperm(num_seqs * num_pages, device="cuda") + 1).view(num_seqs, -1)
        lens = torch.full((num_seqs,), context, device="cuda")
        plan = PagedPlan.uniform(table, lens, query_len, PAGE_SIZE)
        return cls(plan, PagedSight.of(plan, num_seqs * query_len))

    def pool(self, width: int) -> Tensor:
        """Return copies of a pool of one plane, [num_copies, num_pages, 1, 1, PAGE_SIZE, width] bfloat16."""
        num_pages = self.plan.block_table.numel() + 1
        return normal(copies(num_pages * PAGE_SIZE * width * 2), num_pages, 1, 1, PAGE_SIZE, width)

    @property
    def tokens(self) -> range:
        return range(len(self.sight.ends))

    def out(self) -> PickedRows:
        num, num_slots = len(self.tokens), self.plan.block_table.shape[1] * PAGE_SIZE
        rows = torch.empty((num, min(NUM_PICKS, num_slots)), dtype=torch.int64, device="cuda")
        return PickedRows(rows, torch.empty(num, dtype=torch.int64, device="cuda"))


def sizes(options: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    for num_seqs, context in itertools.product(options.sequences, options.context):
        yield num_seqs, context, f"{num_seqs} x {context}"


def scores(options: argparse.Namespace) -> Iterator[Kernel]:
    for heads, (num_seqs, context, name) in itertools.product(options.heads, sizes(options)):
        yield _scores(f"{name}, {heads} heads", Steps.make(num_seqs, context), heads, context)


def prompts(options: argparse.Namespace) -> Iterator[Kernel]:
    for heads, chunk, context in itertools.product(options.heads, options.chunk, options.context):
        yield _scores(f"{chunk} of {context}, {heads} heads", Steps.make(1, context, chunk), heads, context)


def _scores(name: str, steps: Steps, heads: int, context: int) -> Kernel:
    (num_seqs, num_tokens), keys = (len(steps.plan.seq_lens), len(steps.tokens)), steps.pool(HEAD_DIM)
    q = normal(num_tokens, heads, HEAD_DIM)
    weights = torch.randn(num_tokens, heads, device="cuda") * (heads * HEAD_DIM) ** -0.5

    def ours(layer: Tensor) -> Tensor:
        return paged_index_scores(q, weights, layer, steps.plan, steps.sight, steps.tokens)

    def seen() -> Tensor:
        return torch.where(torch.arange(context, device="cuda") < steps.sight.ends[:, None], ours(keys[0]), -torch.inf)

    def expected() -> Tensor:
        sight = Sight.of(steps.plan.block_table, [num_tokens // num_seqs] * num_seqs, steps.plan.seq_lens)
        return index_scores_ref(q, weights, keys[0], sight)

    num_flop = 2 * num_tokens * context * heads * HEAD_DIM
    return Kernel(name, each(ours, keys), num_seqs * context * HEAD_DIM * 2, num_flop, close(seen, expected))


def picks(options: argparse.Namespace) -> Iterator[Kernel]:
    for num_seqs, context, name in sizes(options):
        steps = Steps.make(num_seqs, context)
        found = torch.randn(copies(num_seqs * context * 4, most=8), num_seqs, context, device="cuda")
        found[:, :, ::7] = 0.0  # equal ones, as relu makes them
        calls, check = each(_choose(steps), found), _same_picks(steps, found[0])
        yield Kernel(name, calls, num_seqs * context * 4, check=check, num_rounds=-(-_CALLS // len(calls)))


def _choose(steps: Steps) -> Callable[[Tensor], PickedRows]:
    def choose(own: Tensor) -> PickedRows:
        out = steps.out()
        paged_picks(own, steps.plan, steps.sight, steps.tokens, PAGE_SIZE, NUM_PICKS, out)
        return out

    return choose


def _same_picks(steps: Steps, own: Tensor) -> Callable[[], None]:
    def check() -> None:
        out, slots = _choose(steps)(own), pick(own, NUM_PICKS).long()
        assert (slots >= 0).all(), "the context is shorter than the picks"
        rows = steps.plan.block_table.gather(1, slots // PAGE_SIZE) * PAGE_SIZE + slots % PAGE_SIZE
        assert torch.equal(out.rows, rows) and (out.counts == rows.shape[1]).all(), "the picks differ"

    return check


def attention(options: argparse.Namespace, *, is_sparse: bool) -> Iterator[Kernel]:
    for num_seqs, context, name in sizes(options):
        steps, width = Steps.make(num_seqs, context), RANK + ROTARY_DIM
        pool, q = steps.pool(width), normal(num_seqs, NUM_HEADS, width)
        plan, num_keys = steps.plan, context
        if is_sparse:
            out, num_keys = steps.out(), min(NUM_PICKS, context)
            own = torch.randn(num_seqs, context, device="cuda")
            paged_picks(own, plan, steps.sight, steps.tokens, PAGE_SIZE, NUM_PICKS, out)
            plan = PagedPlan(out.rows, out.counts, None, 1, None, None, None, None)

        def ours(layer: Tensor, q: Tensor = q, plan: PagedPlan = plan) -> Tensor:
            pages = layer.view(-1, 1, 1, 1, layer.shape[4]) if is_sparse else layer
            return latent_attention(q, pages, plan, RANK, SCALE)

        def expected(q: Tensor = q, plan: PagedPlan = plan, pool: Tensor = pool) -> Tensor:
            found: list[Tensor] = []
            for seq, table in enumerate(plan.block_table):
                rows = pool[0].view(-1, pool.shape[-1])[table] if is_sparse else pool[0][table].flatten(0, 3)
                keys = rows.float()
                found.append((q[seq].float() @ keys.T * SCALE).softmax(-1) @ keys[:, :RANK])
            return torch.stack(found).to(q.dtype)

        num_bytes = num_seqs * num_keys * width * 2
        num_flop = 2 * num_seqs * num_keys * NUM_HEADS * (width + RANK)
        check = close(lambda ours=ours, pool=pool: ours(pool[0]), expected)
        yield Kernel(name, each(ours, pool), num_bytes, num_flop, check)


if __name__ == "__main__":
    measure(
        __doc__,
        "index-kernels",
        {
            "scores": scores,
            "prompts": prompts,
            "picks": picks,
            "sparse": lambda options: attention(options, is_sparse=True),
            "dense": lambda options: attention(options, is_sparse=False),
        },
        heads=(64, 32),
        chunk=(1024,),
        sequences=(1, 64),
        context=(8192, 32_768, 131_072),
    )
