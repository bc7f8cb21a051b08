"""Time attention to latents on a GPU at the shapes of DeepSeek's models: 16 and 128 heads, 512 + 64 numbers, bfloat16.

    python tests/benchmarks/bench_kernels_latents.py [--only decode|verify|chunk|heads] [--sweep]

Times are those of bench_kernels_attention.py: the median replay of a CUDA graph over layers that exceed the L2 cache.
Decode and verify are compared with reading their latents once, chunks with the rate of a large matrix product. Outputs
are compared with `paged_attention_ref` in the same run, which ends with an error if they differ.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from bench_kernels_attention import BYTES_PER_S, COLD_BYTES, FLOP_PER_S, TOLERANCE, per_layer

from baton.kernels.attention import paged_attention_ref
from baton.kernels.norm import Norm
from baton.kernels.triton_attention import TritonPlan
from baton.kernels.triton_latents import LatentTiles, join_latents, latent_attention, rotate_store

RANK, ROTARY_DIM, PAGE_SIZE = 512, 64, 16
WIDTH = RANK + ROTARY_DIM
SCALE = 0.1147
HEADS = (16, 128)


class Pool(NamedTuple):
    """Sequences of one length over scattered pages of several layers."""

    kv: torch.Tensor  # [num_layers, num_pages, 1, 1, PAGE_SIZE, WIDTH] bfloat16
    block_table: torch.Tensor  # [num_seqs, max_pages] int64
    seq_lens: torch.Tensor  # [num_seqs] int64

    @classmethod
    def make(cls, num_seqs: int, seq_len: int) -> Pool:
        num_pages = -(-seq_len // PAGE_SIZE)
        num_bytes = (num_seqs * num_pages + 1) * PAGE_SIZE * WIDTH * 2
        num_layers = max(2, min(64, int(COLD_BYTES // num_bytes) + 1))
        shape = (num_layers, num_seqs * num_pages + 1, 1, 1, PAGE_SIZE, WIDTH)
        kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(num_seqs * num_pages, device="cuda").view(num_seqs, -1) + 1
        return cls(kv, table, torch.full((num_seqs,), seq_len, device="cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "verify", "chunk", "heads"))
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for num_heads in HEADS:
        if args.only in (None, "decode"):
            for num_seqs, seq_len in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32_768), (8, 8192)):
                bench_attention(num_heads, num_seqs, 1, seq_len, args)
        if args.only in (None, "verify"):
            for num_seqs in (1, 32):
                bench_attention(num_heads, num_seqs, 4, 1024, args)
        if args.only in (None, "chunk"):
            for query_len, seq_len in ((1024, 1024), (512, 8192), (4096, 4096)):
                bench_attention(num_heads, 1, query_len, seq_len, args)
        if args.only in (None, "heads"):
            for num_tokens in (1, 64, 1024):
                bench_heads(num_heads, num_tokens)


def bench_attention(num_heads: int, num_seqs: int, query_len: int, seq_len: int, args: argparse.Namespace) -> None:
    pool, num_tokens = Pool.make(num_seqs, seq_len), num_seqs * query_len
    heads = torch.randn(num_tokens, num_heads + 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    q = heads[:, :-1]
    starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device="cuda")
    plan = TritonPlan.ragged(pool.block_table, pool.seq_lens, starts, num_tokens, PAGE_SIZE)
    some = min(query_len, 64)  # tokens that the specification computes
    expected = paged_attention_ref(
        q[-some:], pool.kv[0], pool.block_table[-1:], [some], [seq_len], None, scale=SCALE
    )  # of the last sequence
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    floor = max(num_seqs * seq_len * WIDTH * 2 / BYTES_PER_S, 2 * num_heads * (WIDTH + RANK) * pairs / FLOP_PER_S)
    chosen = LatentTiles.choose(q, num_seqs)
    for tiles in [chosen, *(_others(chosen) if args.sweep else ())]:
        out = latent_attention(q, pool.kv[0], plan, RANK, SCALE, tiles)
        torch.testing.assert_close(out[-some:], expected[..., :RANK], atol=TOLERANCE, rtol=TOLERANCE)
        seconds = per_layer(
            lambda layer, t=tiles: latent_attention(q, pool.kv[layer], plan, RANK, SCALE, t), len(pool.kv)
        )
        name = f"{num_heads} heads, {num_seqs} x {query_len} of {seq_len}"
        print(f"{name:34} {seconds * 1e6:9.1f} us {seconds / floor:6.2f} x floor  {tuple(tiles)}", flush=True)


def _others(chosen: LatentTiles) -> Iterator[LatentTiles]:
    sizes = itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2, 3))
    for block_m, block_n, num_warps, num_stages in sizes:
        tiles = chosen._replace(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if tiles != chosen and num_stages * block_n <= 96:
            yield tiles


def bench_heads(num_heads: int, num_tokens: int) -> None:
    """The two launches before attention."""
    pool = Pool.make(1, num_tokens)
    plan = TritonPlan.uniform(pool.block_table, pool.seq_lens, num_tokens, PAGE_SIZE)
    assert plan.rows is not None
    rows, turns = plan.rows, torch.randn(2, num_tokens, 1, ROTARY_DIM, device="cuda", dtype=torch.bfloat16)
    absorbed = torch.randn(num_tokens, num_heads, RANK, device="cuda", dtype=torch.bfloat16)
    rotary = torch.randn(num_tokens, num_heads, ROTARY_DIM, device="cuda", dtype=torch.bfloat16)
    stored = torch.randn(num_tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    norm = Norm(torch.ones(RANK, device="cuda", dtype=torch.bfloat16), 1e-6)

    def run(layer: int) -> None:
        heads = join_latents(absorbed, rotary, stored, norm, is_interleaved=True)
        rotate_store(heads, turns[0], turns[1], pool.kv[layer], rows)

    seconds = per_layer(run, len(pool.kv))
    floor = 2 * absorbed.nbytes / BYTES_PER_S
    print(
        f"{num_heads} heads of {num_tokens} tokens {seconds * 1e6:9.1f} us {seconds / floor:6.2f} x floor", flush=True
    )


if __name__ == "__main__":
    main()
