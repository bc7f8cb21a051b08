"""Time the attention kernels on a GPU at the shapes of an 8B model: 32 heads, 8 KV heads of 128, bfloat16.

    python tests/benchmarks/bench_kernels_attention.py [--only decode|verify|extend|history|store] [--sweep]
    python tests/benchmarks/bench_kernels_attention.py --kv-dtype fp8 --only decode

A time is the median replay of a CUDA graph, divided by its number of layers. The graph has so many layers that their
data exceed the L2 cache several times. Decode is compared with reading its keys and values once at the bandwidth of a
streaming sum, extend with the rate of a large matrix product, both as measured on one H200; torch's attention over
contiguous keys is a further column. Outputs are compared with `paged_attention_ref` in the same run, which ends with an
error if they differ.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = map(str, (Path(__file__).parents[1] / "support").glob("*"))

from quantized import fp8_pool

from baton.kernels.attention import history
from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.triton_attention import DecodeTiles, TritonPlan, decode_attention
from baton.kernels.attention.triton_extend import ExtendTiles, extend_attention
from baton.kernels.products.fp8 import E4M3
from baton.kernels.state.triton_store import norm_rotate_store

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BYTES_PER_S, FLOP_PER_S = 4.7e12, 802e12
COLD_BYTES = 500e6  # ten times the L2 cache
CAPACITY = 4096  # tokens that a block table can hold
TOLERANCE = 2e-2
REPLAYS = 30


class Pool(NamedTuple):
    """Sequences of one length over scattered pages of several layers."""

    kv: torch.Tensor  # [num_layers, num_pages, 2, NUM_KV_HEADS, page_size, HEAD_DIM] bfloat16 or e4m3
    block_table: torch.Tensor  # [num_seqs, max_pages] int64
    seq_lens: torch.Tensor  # [num_seqs] int64

    @classmethod
    def make(cls, num_seqs: int, seq_len: int, page_size: int, min_layers: int = 2, *, is_fp8: bool = False) -> Pool:
        num_pages = -(-seq_len // page_size)
        num_bytes = (num_seqs * num_pages + 1) * 2 * NUM_KV_HEADS * page_size * HEAD_DIM * (1 if is_fp8 else 2)
        num_layers = max(min_layers, min(64, int(COLD_BYTES // num_bytes) + 1))
        shape = (num_layers, num_seqs * num_pages + 1, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
        kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        kv = fp8_pool(kv) if is_fp8 else kv
        table = torch.zeros(num_seqs, max(num_pages, CAPACITY // page_size), dtype=torch.int64, device="cuda")
        table[:, :num_pages] = torch.randperm(num_seqs * num_pages, device="cuda").view(num_seqs, -1) + 1
        return cls(kv, table, torch.full((num_seqs,), seq_len, device="cuda"))

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in a layer, scales included."""
        return 2 * NUM_KV_HEADS * (HEAD_DIM + 4 if self.kv.dtype == E4M3 else 2 * HEAD_DIM)

    def contiguous(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as torch wants them, each [num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM]."""
        seq_len, page_size = int(self.seq_lens[0]), self.kv.shape[4]
        pages = self.kv[layer][self.block_table[:, : -(-seq_len // page_size)]]
        k, v = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :seq_len].contiguous().unbind(0)
        return k, v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "verify", "extend", "history", "store"))
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of decode, verify and extend")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if args.only in (None, "decode"):
        for page_size, num_seqs in itertools.product((16, 64), (1, 8, 64, 256)):
            bench_decode(num_seqs, 1024, page_size, 1, False, args)
        bench_decode(8, 8192, 16, 1, False, args)
    if args.only in (None, "verify"):
        for num_seqs, (query_len, is_tree) in itertools.product((1, 32), ((6, False), (16, True), (61, True))):
            bench_decode(num_seqs, 1024, 16, query_len, is_tree, args)
    if args.only in (None, "extend"):
        for num_seqs, query_len, seq_len in ((1, 8192, 8192), (4, 2048, 2048), (1, 512, 8192), (1, 1024, 1024)):
            for page_size in (16, 64):
                bench_extend(num_seqs, query_len, seq_len, page_size, args)
    if args.only in (None, "history"):
        for query_len, num_before in (
            (8192, 8192), (8192, 57_344), (8192, 57_444), (8192, 112_000), (4096, 57_344), (2048, 57_344), (2048, 8192),
        ):  # fmt: skip
            bench_history(query_len, num_before)
    if args.only in (None, "store"):
        for num_tokens in (1, 64, 256, 8192):
            bench_store(num_tokens, args)


def bench_decode(
    num_seqs: int, seq_len: int, page_size: int, query_len: int, is_tree: bool, args: argparse.Namespace
) -> None:
    pool = Pool.make(num_seqs, seq_len, page_size, is_fp8=args.kv_dtype == "fp8")
    num_tokens = num_seqs * query_len
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q = qkv.view(num_tokens, -1, HEAD_DIM)[:, :NUM_HEADS]
    tree, positions = None, None
    if is_tree:
        visible = torch.rand(num_tokens, query_len, device="cuda") < 0.3
        visible |= torch.eye(query_len, dtype=torch.bool, device="cuda").repeat(num_seqs, 1)
        tree, positions = Tree(pool.seq_lens - query_len, visible), torch.zeros_like(qkv[:, 0], dtype=torch.int64)
    plan = TritonPlan.uniform(pool.block_table, pool.seq_lens, query_len, page_size, tree, positions, is_stored=True)
    chosen = DecodeTiles.choose(q, pool.kv[0], num_seqs)
    name = f"{'tree' if is_tree else 'decode'} {num_seqs} x {query_len} of {seq_len}, pages of {page_size}"
    num_bytes = num_seqs * seq_len * pool.token_bytes
    for tiles in [chosen, *(_other_decodes(chosen, is_tree) if args.sweep else ())]:
        out = decode_attention(q, pool.kv[0], plan, None, tiles)
        lens = (query_len,) * num_seqs
        expected = paged_attention_ref(
            q, pool.kv[0], pool.block_table[:, : -(-seq_len // page_size)], lens, pool.seq_lens.tolist(), None,
            positions, tree,
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
        seconds = per_layer(lambda layer, t=tiles: decode_attention(q, pool.kv[layer], plan, None, t), len(pool.kv))
        _tell(name, seconds, num_bytes / seconds / 1e9, "GB/s", num_bytes / BYTES_PER_S, str(tuple(tiles)))
    if not is_tree and query_len == 1 and pool.kv.dtype != E4M3:
        layers = [pool.contiguous(layer) for layer in range(len(pool.kv))]
        grouped = q.unsqueeze(2)  # [num_seqs, NUM_HEADS, 1, HEAD_DIM]
        seconds = per_layer(
            lambda layer: F.scaled_dot_product_attention(grouped, *layers[layer], enable_gqa=True), len(layers)
        )
        _tell("  torch, contiguous", seconds, num_bytes / seconds / 1e9, "GB/s", num_bytes / BYTES_PER_S)


def bench_extend(num_seqs: int, query_len: int, seq_len: int, page_size: int, args: argparse.Namespace) -> None:
    pool = Pool.make(num_seqs, seq_len, page_size, is_fp8=args.kv_dtype == "fp8")
    num_tokens = num_seqs * query_len
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q = qkv.view(num_tokens, -1, HEAD_DIM)[:, :NUM_HEADS]
    starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device="cuda")
    plan = TritonPlan.ragged(pool.block_table, pool.seq_lens, starts, num_tokens, page_size)
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    num_flops = 4 * NUM_HEADS * HEAD_DIM * pairs
    name = f"extend {num_seqs} x {query_len} of {seq_len}, pages of {page_size}"
    chosen = ExtendTiles.choose(q, pool.kv[0])
    expected = torch.cat([_extend_ref(q, pool, seq, query_len) for seq in range(num_seqs)])
    for tiles in [chosen, *(_other_extends(chosen) if args.sweep else ())]:
        out = extend_attention(q, pool.kv[0], plan, None, tiles)
        torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
        seconds = per_layer(lambda layer, t=tiles: extend_attention(q, pool.kv[layer], plan, None, t), len(pool.kv))
        _tell(name, seconds, num_flops / seconds / 1e12, "TFLOP/s", num_flops / FLOP_PER_S, str(tuple(tiles)))
    if query_len == seq_len and pool.kv.dtype != E4M3:
        layers = [pool.contiguous(layer) for layer in range(len(pool.kv))]
        batched = q.reshape(num_seqs, query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(batched, *layers[0], is_causal=True, enable_gqa=True)
                out = out.transpose(1, 2).reshape(num_tokens, NUM_HEADS, HEAD_DIM)
                torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
                seconds = per_layer(
                    lambda layer: F.scaled_dot_product_attention(
                        batched, *layers[layer], is_causal=True, enable_gqa=True
                    ),
                    len(layers),
                )
            note = f"torch, contiguous, {backend.name}"
            _tell(name, seconds, num_flops / seconds / 1e12, "TFLOP/s", num_flops / FLOP_PER_S, note)


def bench_history(query_len: int, num_before: int, page_size: int = 64) -> None:
    """Time a chunk behind a history, by the fused attention and by our kernel; also shorter chunks than it takes."""
    seq_len = num_before + query_len
    pool = Pool.make(1, seq_len, page_size)
    qkv = torch.randn(query_len, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q = qkv.view(query_len, -1, HEAD_DIM)[:, :NUM_HEADS]
    starts = torch.tensor([0, query_len], dtype=torch.int32, device="cuda")
    plan = TritonPlan.ragged(pool.block_table, pool.seq_lens, starts, query_len, page_size)
    num_flops = 4 * NUM_HEADS * HEAD_DIM * (query_len * num_before + query_len * (query_len + 1) // 2)
    found = history.history_attention(q, pool.kv[0], pool.block_table, 0, num_before)
    torch.testing.assert_close(found, extend_attention(q, pool.kv[0], plan), atol=TOLERANCE, rtol=TOLERANCE)
    name = f"history {query_len} behind {num_before}"
    seconds = per_layer(lambda i: history.history_attention(q, pool.kv[i], pool.block_table, 0, num_before), 2)
    _tell(name, seconds, num_flops / seconds / 1e12, "TFLOP/s", num_flops / FLOP_PER_S, "fused, joined")
    seconds = per_layer(lambda i: extend_attention(q, pool.kv[i], plan), 2)
    _tell(name, seconds, num_flops / seconds / 1e12, "TFLOP/s", num_flops / FLOP_PER_S, "extend_attention")


def bench_store(num_tokens: int, args: argparse.Namespace) -> None:
    """Time norm, rotation and store of query and key heads. Bytes: qkv read; q, k and v written."""
    pool = Pool.make(1, num_tokens, 16, min_layers=8)
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = torch.randn(len(pool.kv), num_tokens, width, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, num_tokens, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind(0)
    norms = (torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16),) * 2
    rows = TritonPlan.uniform(pool.block_table, pool.seq_lens, num_tokens, 16).rows
    assert rows is not None

    def store(layer: int) -> torch.Tensor:
        return norm_rotate_store(qkv[layer], cos, sin, pool.kv[layer], rows, norms, 1e-6)

    seconds = per_layer(store, len(pool.kv))
    num_bytes = num_tokens * width * 2 * 2
    _tell(f"store {num_tokens}", seconds, num_bytes / seconds / 1e9, "GB/s", num_bytes / BYTES_PER_S)


def per_layer(call: Callable[[int], object], num_layers: int) -> float:
    """Return the seconds of call(layer): the median replay of a graph over all layers, divided by their number."""
    torch.cuda.synchronize()  # inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            call(layer)
    times: list[float] = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:]) / num_layers


def _extend_ref(q: torch.Tensor, pool: Pool, seq: int, query_len: int, chunk: int = 512) -> torch.Tensor:
    """The specification, computed in parts because its float32 scores are large."""
    seq_len, page_size, parts = int(pool.seq_lens[seq]), pool.kv.shape[4], []
    for first in range(0, query_len, chunk):
        num, end = min(chunk, query_len - first), seq_len - query_len + min(first + chunk, query_len)
        rows = q[seq * query_len + first : seq * query_len + first + num]
        table = pool.block_table[seq : seq + 1, : -(-end // page_size)]
        parts.append(paged_attention_ref(rows, pool.kv[0], table, (num,), (end,), None))
    return torch.cat(parts)


def _other_decodes(chosen: DecodeTiles, is_tree: bool) -> list[DecodeTiles]:
    """Variants of decode that each change one thing."""
    changes: list[dict[str, int]] = [{"num_slots": max(1, chosen.num_slots // 2)}]
    changes += [{"num_slots": chosen.num_slots * 2}, {"num_warps": 2}, {"num_warps": 8}]
    changes += [{"num_stages": stages} for stages in (2, 3, 4)] + [{"block_n": 32}]
    changes += [] if is_tree else [{"block_n": 128, "num_stages": 2}, {"block_n": 128, "num_stages": 2, "num_warps": 8}]
    return [other for change in changes if (other := chosen._replace(**change)) != chosen]


def _other_extends(chosen: ExtendTiles) -> list[ExtendTiles]:
    options = ((64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (256, 64, 8, 3))
    names = ("block_m", "block_n", "num_warps", "num_stages")
    tiles = (chosen._replace(**dict(zip(names, each, strict=True))) for each in options)
    return [each for each in tiles if each != chosen]


def _tell(name: str, seconds: float, rate: float, unit: str, floor: float, note: str = "") -> None:
    print(f"{name:42} {seconds * 1e6:9.1f} us {rate:8.0f} {unit:8} {seconds / floor:6.2f} x floor  {note}", flush=True)


if __name__ == "__main__":
    main()
