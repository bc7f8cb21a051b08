"""Time the kernels of DeepSeek-V4 on a GPU at the shapes of V4-Flash: four streams of 4,096 numbers, 64 heads of 512
that share one key, a window of 128, entries of 4 and 128 tokens, an index of 64 heads of 128 that picks 512, bfloat16.

    python tests/benchmarks/kernel_times/bench_kernels_entries.py \
        [--only streams heads compress choose attend prompts] [--rows 1 8 64 8192] [--sequences 1 8 64] \
        [--context 8192 131072] [--chunk 2048]

Every kernel is compared with plain torch. Its time is compared with reading what it must read, once; that of prompts
with their products.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from graph_times import Kernel, copies, measure, normal
from torch import Tensor

from baton.engine.attention.compressed import KV, EntryPool, WindowHeads
from baton.engine.attention.gathered_entries import GatheredEntries
from baton.engine.attention.paged_entries import PagedEntries
from baton.engine.attention.pool_rows import PoolRows
from baton.engine.rounds.batch import ForwardBatch
from baton.kernels.attention.picks import PickedRows
from baton.kernels.entries.entries import attend_rows, rotate_pairs_
from baton.kernels.products.norm import Norm
from baton.kernels.streams.streams import (
    PendingStreams,
    StreamRules,
    StreamShares,
    StreamWeights,
    cross_streams,
    cross_streams_ref,
)
from baton.metadata.wire.request import MAX_DRAFT_STEPS

SIZE, HC = 4096, 4
NUM_HEADS, HEAD_DIM, WINDOW, PAIRS = 64, 512, 128, 32
INDEX_HEADS, INDEX_DIM, NUM_PICKS = 64, 128, 512
PAGE_SIZE, TAILS = 128, 3  # tail pages of a sequence
KINDS = {"sparse": (4, HEAD_DIM, 2), "heavy": (128, HEAD_DIM, 1), "index": (4, INDEX_DIM, 2)}  # rate, width, windows
TOLERANCE = 1e-2  # both sides round to bfloat16


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> float:
    """Return the norm of the difference over that of the expected numbers."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < tolerance, error
    return error


def streams(options: argparse.Namespace) -> Iterator[Kernel]:
    norm, rules = Norm(torch.ones(SIZE, device="cuda"), 1e-6), StreamRules(20, 1e-6, 1e-6)
    for num in options.rows:
        num_shares = (2 + HC) * HC
        sites = [
            StreamWeights(
                normal(num_shares, HC * SIZE, scale=0.02, dtype=torch.float32),
                normal(num_shares, dtype=torch.float32),
                normal(3, dtype=torch.float32),
            )
            for _ in range(64)
        ]
        mix = torch.rand(num, HC, HC, device="cuda")
        shares = StreamShares(torch.rand(num, HC, device="cuda"), mix / mix.sum(1, keepdim=True))
        pending = PendingStreams(normal(num, HC, SIZE), normal(num, SIZE), shares)

        def check(pending: PendingStreams = pending, site: StreamWeights = sites[0]) -> float:
            found = cross_streams(pending, site, norm, rules)
            expected = cross_streams_ref(pending, site, norm, rules)
            return max(near(*both) for both in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True))

        calls = [lambda site=site, pending=pending: cross_streams(pending, site, norm, rules) for site in sites]
        moved = 2 * num * SIZE * (2 * HC + 2) + num_shares * HC * SIZE * 4
        yield Kernel(f"{num} rows", calls, num_bytes=moved, check=check)


class Steps(NamedTuple):
    """A forward of sequences of one length with as many new tokens each, over scattered pages."""

    batch: ForwardBatch
    tails: ForwardBatch

    @classmethod
    def make(cls, num_seqs: int, context: int, query_len: int = 1) -> Steps:
        num_pages = context // PAGE_SIZE
        table = (torch.randperm(num_seqs * num_pages, device="cuda") + 1).view(num_seqs, -1)
        tails = torch.arange(num_seqs, device="cuda").unsqueeze(1) * cls._tails(query_len)
        tails = 1 + tails + torch.arange(num_pages, device="cuda") % cls._tails(query_len)
        positions = torch.arange(context - query_len, context, device="cuda").repeat(num_seqs, 1)
        lens = torch.full((num_seqs,), context, device="cuda")
        batch = ForwardBatch.uniform(torch.zeros_like(positions), positions, lens, table, PAGE_SIZE, tail_table=tails)
        return cls(batch, batch.of_tails())

    @staticmethod
    def _tails(query_len: int) -> int:
        return TAILS + query_len // PAGE_SIZE

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    def pool(
        self, width: int, *, is_tail: bool, dtype: torch.dtype = torch.bfloat16, num_rows: int = PAGE_SIZE
    ) -> Tensor:
        """Return copies of a pool of one plane, [num_copies, num_pages, 1, 1, num_rows, width]."""
        num_pages = int((self.tails if is_tail else self.batch).block_table.max()) + 1
        num_copies = copies(num_pages * num_rows * width * dtype.itemsize)
        return normal(num_copies, num_pages, 1, 1, num_rows, width, dtype=dtype)

    def contexts(self, pools: dict[str, Tensor]) -> tuple[PagedEntries, GatheredEntries]:
        kept, tails = PoolRows.of(self.batch, pools), PoolRows.of(self.tails, pools)
        return PagedEntries.of(kept, tails), GatheredEntries(kept, tails)


def heads_of() -> WindowHeads:
    frequencies = 1e4 ** -(torch.arange(PAIRS, device="cuda") / PAIRS)
    norm = Norm(1 + normal(HEAD_DIM, scale=0.1, dtype=torch.float32), 1e-6)
    return WindowHeads(0, WINDOW, 1e-6, norm, frequencies, normal(NUM_HEADS, dtype=torch.float32))


def entry_pool(kind: str) -> EntryPool:
    rate, width, num_windows = KINDS[kind]
    bias = normal(rate, num_windows * width, dtype=torch.float32)
    norm = Norm(1 + normal(width, scale=0.1, dtype=torch.float32), 1e-6)
    return EntryPool(f"{kind}_inputs", f"{kind}_entries", 0, bias, norm, heads_of().frequencies)


def sizes(options: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    for num_seqs, context in itertools.product(options.sequences, options.context):
        yield num_seqs, context, f"{num_seqs} x {context}"


def heads(options: argparse.Namespace) -> Iterator[Kernel]:
    rules = heads_of()
    for num in options.sequences:
        steps = Steps.make(num, 512)
        keys, q, key = steps.pool(HEAD_DIM, is_tail=True)[:1], normal(num, NUM_HEADS, HEAD_DIM), normal(num, HEAD_DIM)
        paged, gathered = steps.contexts({KV: keys})

        def check(paged: Any = paged, gathered: Any = gathered, keys: Tensor = keys, q: Tensor = q, key: Tensor = key):
            start = keys.clone()
            expected = gathered.store(rules, q.clone(), key), keys.clone()
            keys.copy_(start)
            found = paged.store(rules, q.clone(), key), keys.clone()
            return max(near(*both) for both in zip(found, expected, strict=True))

        calls = [lambda paged=paged, q=q, key=key: paged.store(rules, q, key)] * 20
        yield Kernel(f"{num} tokens", calls, num_bytes=4 * (q.numel() + key.numel()), check=check)


def compress(options: argparse.Namespace) -> Iterator[Kernel]:
    for kind in KINDS:
        for num in options.sequences:
            yield _compress(f"{kind}, {num} tokens that end windows", kind, num, 512, 1)
            yield _compress(f"{kind}, {num} tokens that end none", kind, num, 511, 1)
        for chunk in options.chunk:
            yield _compress(f"{kind}, prompt of {chunk}", kind, 1, chunk, chunk)


def _compress(name: str, kind: str, num_seqs: int, context: int, query_len: int) -> Kernel:
    rate, width, num_windows = KINDS[kind]
    steps, pool = Steps.make(num_seqs, -(-context // PAGE_SIZE) * PAGE_SIZE, query_len), entry_pool(kind)
    steps.batch.seq_lens.fill_(context)
    steps.batch.positions.copy_(torch.arange(context - query_len, context, device="cuda").repeat(num_seqs))
    num_read = 2 if kind == "heavy" else num_windows * rate  # rows before a token, its own included
    num_kept = num_read + MAX_DRAFT_STEPS + 1
    inputs = steps.pool(2 * num_windows * width, is_tail=True, dtype=torch.float32, num_rows=num_kept)
    entries = steps.pool(-(-width // rate), is_tail=False)[:1].zero_()
    rows = normal(steps.num_tokens, 2 * num_windows * width)
    contexts = [steps.contexts({pool.inputs: each[None], pool.entries: entries}) for each in inputs]

    def check() -> float:
        paged, gathered = contexts[0]
        gathered.compress(pool, rows)
        expected = entries.clone()
        entries.zero_()
        paged.compress(pool, rows)
        return near(entries, expected) if expected.any() else float(entries.abs().max())

    num_ends = num_seqs * (context // rate - (context - query_len) // rate)
    num_read = num_seqs if kind == "heavy" else num_ends * num_read
    moved = rows.numel() * 2 + (min(query_len, num_kept) * num_seqs + num_read) * num_windows * width * 8
    return Kernel(name, [lambda paged=paged: paged.compress(pool, rows) for paged, _ in contexts], moved, check=check)


def choose(options: argparse.Namespace) -> Iterator[Kernel]:
    pool = entry_pool("index")
    for num_seqs, context, name in sizes(options):
        steps = Steps.make(num_seqs, context)
        keys = steps.pool(INDEX_DIM // 4, is_tail=False)
        q, weights = normal(num_seqs, INDEX_HEADS, INDEX_DIM), torch.randn(num_seqs, INDEX_HEADS, device="cuda")
        contexts = [steps.contexts({pool.entries: each[None]})[0] for each in keys]
        calls = [lambda paged=paged: paged.choose(pool, q, weights, NUM_PICKS) for paged in contexts]  # noqa: B023
        yield Kernel(name, calls, num_seqs * context // 4 * (INDEX_DIM * 2 + 8))


def attend(options: argparse.Namespace) -> Iterator[Kernel]:
    for kind, (num_seqs, context, name) in itertools.product(("window", "sparse", "heavy"), sizes(options)):
        yield _attend(f"{kind}, {name}", kind, num_seqs, context, 1)


def prompts(options: argparse.Namespace) -> Iterator[Kernel]:
    for kind in ("window", "sparse", "heavy"):
        for chunk in options.chunk:
            yield _attend(f"{kind}, {chunk} of 8192", kind, 1, 8192, chunk)


def _attend(name: str, kind: str, num_seqs: int, context: int, query_len: int) -> Kernel:
    steps, rules = Steps.make(num_seqs, context, query_len), heads_of()
    q = normal(steps.num_tokens, NUM_HEADS, HEAD_DIM, scale=2.0)
    keys = steps.pool(HEAD_DIM, is_tail=True)
    pool = None if kind == "window" else entry_pool(kind)
    chosen, entries, num_seen = None, None, WINDOW
    if pool is not None:
        entries = steps.pool(HEAD_DIM // pool.rate, is_tail=False)
        num_entries = context // pool.rate
        num_seen += min(NUM_PICKS, num_entries) if kind == "sparse" else num_entries
        if kind == "sparse":
            chosen = [_picks(steps, entries)]

    def context_of(copy: int) -> tuple[PagedEntries, GatheredEntries]:
        pools = {KV: keys[copy % len(keys)][None]}
        if pool is not None and entries is not None:
            pools[pool.entries] = entries[copy % len(entries)][None]
        return steps.contexts(pools)

    contexts = [context_of(copy) for copy in range(max(len(keys), 1 if entries is None else len(entries)))]

    def check() -> float:
        paged, gathered = contexts[0]
        found = paged.attend(rules, q, pool, chosen)
        if kind != "sparse":
            return near(found, gathered.attend(rules, q, pool))
        assert chosen is not None and entries is not None
        last = steps.num_tokens - 1
        return near(found[last], _expected(q[last], steps, keys[0], entries[0], chosen[0], rules))

    calls = [lambda paged=paged: paged.attend(rules, q, pool, chosen) for paged, _ in contexts]
    moved = steps.num_tokens * (num_seen * HEAD_DIM * 2 + NUM_HEADS * HEAD_DIM * 4) if query_len == 1 else 0
    flop = 4.0 * steps.num_tokens * num_seen * NUM_HEADS * HEAD_DIM if query_len > 1 else 0
    return Kernel(name, calls, num_bytes=moved, num_flop=flop, check=check)


def _picks(steps: Steps, entries: Tensor) -> PickedRows:
    """Return random rows in ascending order of slots, which each token sees."""
    num_rows = entries.shape[1] * PAGE_SIZE // 4
    rows = torch.randint(0, num_rows, (steps.num_tokens, NUM_PICKS), device="cuda").sort(1).values
    return PickedRows(rows, torch.full((steps.num_tokens,), NUM_PICKS, device="cuda"))


def _expected(q: Tensor, steps: Steps, keys: Tensor, entries: Tensor, chosen: PickedRows, rules: WindowHeads) -> Tensor:
    """Return the attention of the last token, [num_heads, head_dim]."""
    end = int(steps.batch.seq_lens[-1])
    slots = torch.arange(end - WINDOW, end, device="cuda")
    pages = steps.tails.block_table[-1][slots // PAGE_SIZE]
    own = keys[pages, 0, 0, slots % PAGE_SIZE]
    kv = torch.cat([own, entries.reshape(-1, HEAD_DIM)[chosen.rows[-1]]])
    is_seen = torch.ones(1, len(kv), dtype=torch.bool, device="cuda")
    out = attend_rows(q[None], kv, is_seen, rules.sinks, HEAD_DIM**-0.5)
    angles = ((end - 1) * rules.frequencies).view(1, 1, -1)
    rotate_pairs_(out, angles.cos(), -angles.sin())
    return out[0]


if __name__ == "__main__":
    measure(
        __doc__,
        "entries",
        {
            "streams": streams,
            "heads": heads,
            "compress": compress,
            "choose": choose,
            "attend": attend,
            "prompts": prompts,
        },
        rows=(1, 8, 64, 8192),
        sequences=(1, 8, 64),
        context=(8192, 131072),
        chunk=(2048,),
    )
