"""Time attention to latents on a GPU at the shapes of DeepSeek's models: 16 and 128 heads, 512 + 64 numbers, bfloat16.

    python tests/benchmarks/kernel_times/bench_kernels_latents.py [--only decode|verify|chunk|prompt|heads]
        [--heads 16] [--sweep]

Times are those of bench_kernels_attention.py: the median replay of a CUDA graph over layers that exceed the L2 cache.
Decode and verify are compared with reading their latents once, prompts with the rate of a large matrix product. Outputs
are compared with `paged_attention_ref` in the same run, which ends with an error if they differ.

Prompts are timed in both forms (kernels/attention/latents.py), from queries and latents before rotation to values of
heads. Their floor is that of the expanded form without its products.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rooms  # noqa: F401
from bench_kernels_attention import BYTES_PER_S, COLD_BYTES, FLOP_PER_S, TOLERANCE, per_layer

from baton.engine.attention.latent_pieces import LatentPieces
from baton.engine.checkpoint.model_config import LatentConfig
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import paged_attention_ref
from baton.kernels.attention.latents import LatentWeights
from baton.kernels.attention.triton_attention import TritonPlan, num_sms
from baton.kernels.attention.triton_expanded import ExpandedTiles
from baton.kernels.attention.triton_latent_heads import Turns, absorb_latents, latent_values, turn_latents
from baton.kernels.attention.triton_latents import LatentTiles, latent_attention
from baton.kernels.products.norm import Norm

LATENT = LatentConfig(512, None, 128, 64, 128, is_interleaved=True, scale=0.1147)
RANK, ROPE_DIM, PAGE_SIZE = LATENT.rank, LATENT.rope_dim, 64
WIDTH = RANK + ROPE_DIM
SCALE = LATENT.scale
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


class Inputs(NamedTuple):
    """What the first product of a layer makes of new tokens, and weights of several layers."""

    q: torch.Tensor  # [num_tokens, num_heads, plain_dim + ROPE_DIM]
    stored: torch.Tensor  # [num_tokens, WIDTH]
    turns: Turns
    layers: list[LatentWeights]

    @classmethod
    def make(cls, num_heads: int, rows: torch.Tensor, num_layers: int) -> Inputs:
        num_tokens, sizes = len(rows), (num_heads * (LATENT.plain_dim + ROPE_DIM), WIDTH)
        down = torch.randn(num_tokens, sum(sizes), device="cuda", dtype=torch.bfloat16)
        q, stored = down.split(sizes, dim=1)
        angle = torch.randn(num_tokens, 1, ROPE_DIM // 2, device="cuda")
        cos, sin = torch.cat((angle.cos(),) * 2, -1).bfloat16(), torch.cat((-angle.sin(), angle.sin()), -1).bfloat16()
        norm = Norm(torch.ones(RANK, device="cuda", dtype=torch.bfloat16), 1e-6)
        ups = torch.randn(
            num_layers, num_heads, LATENT.plain_dim + LATENT.value_dim, RANK, device="cuda", dtype=torch.bfloat16
        )
        layers = [LatentWeights(norm, up, LATENT.plain_dim, is_interleaved=True) for up in ups.mul_(RANK**-0.5)]
        return cls(q.unflatten(1, (num_heads, -1)), stored, Turns(cos, sin, rows), layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("decode", "verify", "chunk", "prompt", "heads"))
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for num_heads in args.heads:
        if args.only is None or "decode" in args.only:
            for num_seqs, seq_len in ((1, 1100), (8, 1100), (64, 1100), (256, 1100), (1, 32_768), (8, 8192)):
                bench_attention(num_heads, num_seqs, 1, seq_len, args)
        if args.only is None or "verify" in args.only:
            for num_seqs in (1, 32):
                bench_attention(num_heads, num_seqs, 4, 1100, args)
        if args.only is None or "chunk" in args.only:
            for query_len, seq_len in ((1024, 1024), (512, 8192)):
                bench_attention(num_heads, 1, query_len, seq_len, args)
        if args.only is None or "prompt" in args.only:
            for num_seqs, query_len, seq_len in ((1, 1024, 1024), (1, 8192, 8192), (16, 2048, 2048), (1, 1024, 9216)):
                if num_seqs * query_len * num_heads <= 1 << 20:
                    bench_prompts(num_heads, num_seqs, query_len, seq_len, args)
        if args.only is None or "heads" in args.only:
            for num_tokens in (1, 8, 64, 256):
                bench_heads(num_heads, num_tokens)


def bench_attention(num_heads: int, num_seqs: int, query_len: int, seq_len: int, args: argparse.Namespace) -> None:
    pool, num_tokens = Pool.make(num_seqs, seq_len), num_seqs * query_len
    q = torch.randn(num_tokens, num_heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    plan = TritonPlan.uniform(pool.block_table, pool.seq_lens, query_len, PAGE_SIZE)
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
        _tell(f"{num_heads} heads, {num_seqs} x {query_len} of {seq_len}", seconds, floor, str(tuple(tiles)))


def _others(chosen: LatentTiles) -> Iterator[LatentTiles]:
    sizes = itertools.product((16, 32, 64), (4, 8), (2, 3, 4, 5), (1, 2), (False, True))
    for block_n, num_warps, num_stages, per_sm, keys_first in sizes:
        tiles = LatentTiles(
            chosen.block_m, block_n, per_sm * num_sms(torch.device("cuda")), num_warps, num_stages, keys_first
        )
        num_tiles = num_stages if keys_first else num_stages - 1  # under way
        if tiles != chosen and per_sm * (num_tiles * block_n + chosen.block_m) * WIDTH * 2 <= 220_000:
            yield tiles


def bench_prompts(num_heads: int, num_seqs: int, query_len: int, seq_len: int, args: argparse.Namespace) -> None:
    """The last tokens of prompts in both forms."""
    pool = Pool.make(num_seqs, seq_len)
    table = pool.block_table.tolist()
    rows = [BatchRow([0] * query_len, seq_len - query_len, pages) for pages in table]
    batch = ForwardBatch.build(rows, PAGE_SIZE, "cuda")
    assert batch.starts is not None
    plan = TritonPlan.ragged(batch.block_table, batch.seq_lens, batch.starts, batch.num_tokens, PAGE_SIZE)
    assert plan.rows is not None
    inputs = Inputs.make(num_heads, plan.rows, 2)
    pieces = LatentPieces.of(batch, LATENT, num_heads, 2)
    assert pieces is not None
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    of_pair = LATENT.plain_dim + ROPE_DIM + LATENT.value_dim
    floor = 2 * num_heads * of_pair * pairs / FLOP_PER_S
    name = f"{num_heads} heads, {num_seqs} x {query_len} of {seq_len}"

    def absorbed(layer: int) -> torch.Tensor:
        weights = inputs.layers[layer]
        heads = absorb_latents(inputs.q, inputs.stored, weights, inputs.turns, pool.kv[layer])
        return latent_values(latent_attention(heads, pool.kv[layer], plan, RANK, SCALE), weights)

    def expanded(layer: int, q: torch.Tensor, tiles: ExpandedTiles | None) -> torch.Tensor:
        weights = inputs.layers[layer]
        latents = turn_latents(q, inputs.stored, weights, inputs.turns, pool.kv[layer])
        return pieces.attend(q, latents, pool.kv[layer], weights, SCALE, tiles)

    expected = absorbed(0)
    torch.testing.assert_close(expanded(0, inputs.q.clone(), None), expected, atol=TOLERANCE, rtol=TOLERANCE)
    _tell(name, per_layer(absorbed, 2), floor, "absorbed")
    chosen = ExpandedTiles.choose(inputs.q)
    others = [ExpandedTiles(128, 128, 8, 2), ExpandedTiles(64, 64, 4, 2)]
    for tiles in [chosen, *(others if args.sweep else ())]:
        found = expanded(0, inputs.q.clone(), tiles)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
        seconds = per_layer(lambda layer, t=tiles: expanded(layer, inputs.q, t), 2)
        _tell(name, seconds, floor, f"expanded {tuple(tiles)}")


def bench_heads(num_heads: int, num_tokens: int) -> None:
    """The launches around attention: queries and latents, and values."""
    pool = Pool.make(num_tokens, PAGE_SIZE)
    plan = TritonPlan.uniform(pool.block_table, pool.seq_lens, 1, PAGE_SIZE)
    assert plan.rows is not None
    num_bytes = num_heads * (LATENT.plain_dim + LATENT.value_dim) * RANK * 2
    inputs = Inputs.make(num_heads, plan.rows, min(64, int(COLD_BYTES // num_bytes) + 1))
    attended = torch.randn(num_tokens, num_heads, RANK, device="cuda", dtype=torch.bfloat16)

    def before(layer: int) -> None:
        kv_layer = pool.kv[layer % len(pool.kv)]
        absorb_latents(inputs.q, inputs.stored, inputs.layers[layer], inputs.turns, kv_layer)

    def after(layer: int) -> None:
        latent_values(attended, inputs.layers[layer])

    for name, call in (("queries", before), ("values", after)):
        moved = num_bytes / 2 + inputs.q.nbytes + attended.nbytes
        _tell(f"{num_heads} heads, {name} of {num_tokens}", per_layer(call, len(inputs.layers)), moved / BYTES_PER_S)


def _tell(name: str, seconds: float, floor: float, note: str = "") -> None:
    print(f"{name:36} {seconds * 1e6:9.1f} us {seconds / floor:6.2f} x floor  {note}", flush=True)


if __name__ == "__main__":
    main()
