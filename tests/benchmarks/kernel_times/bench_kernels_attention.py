"""Time the attention kernels on a GPU at the shapes of an 8B model: 32 heads, 8 KV heads of 128, bfloat16.

    python tests/benchmarks/kernel_times/bench_kernels_attention.py [--only decode verify extend history store]
    python tests/benchmarks/kernel_times/bench_kernels_attention.py --only decode-fp8 verify-fp8 extend-fp8

Decode is compared with reading its keys and values once, extend with the rate of a large matrix product; torch's
attention over contiguous keys has rows of its own. Outputs are compared with `paged_attention_ref`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from graph_times import Kernel, close, copies, each, measure, normal
from quantized import fp8_pool
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.kernels.attention import history
from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_attention import decode_attention
from baton.kernels.attention.triton_extend import extend_attention
from baton.kernels.products.fp8 import E4M3
from baton.kernels.state.triton_store import norm_rotate_store

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
CAPACITY = 4096  # tokens that a block table can hold


class Pool(NamedTuple):
    """Sequences of one length over scattered pages of several layers."""

    kv: Tensor  # [num_layers, num_pages, 2, NUM_KV_HEADS, page_size, HEAD_DIM] bfloat16 or e4m3
    block_table: Tensor  # [num_seqs, max_pages] int64
    seq_lens: Tensor  # [num_seqs] int64

    @classmethod
    def make(cls, num_seqs: int, seq_len: int, page_size: int, min_layers: int = 2, *, is_fp8: bool = False) -> Pool:
        num_pages = -(-seq_len // page_size)
        num_bytes = (num_seqs * num_pages + 1) * 2 * NUM_KV_HEADS * page_size * HEAD_DIM * (1 if is_fp8 else 2)
        shape = (num_seqs * num_pages + 1, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
        kv = normal(copies(num_bytes, min_layers), *shape)
        table = torch.zeros(num_seqs, max(num_pages, CAPACITY // page_size), dtype=torch.int64, device="cuda")
        table[:, :num_pages] = torch.randperm(num_seqs * num_pages, device="cuda").view(num_seqs, -1) + 1
        return cls(fp8_pool(kv) if is_fp8 else kv, table, torch.full((num_seqs,), seq_len, device="cuda"))

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in a layer, scales included."""
        return 2 * NUM_KV_HEADS * (HEAD_DIM + 4 if self.kv.dtype == E4M3 else 2 * HEAD_DIM)

    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer as torch wants them, [num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM]."""
        seq_len, page_size = int(self.seq_lens[0]), self.kv.shape[4]
        pages = (layer[self.block_table[:, : -(-seq_len // page_size)]] for layer in self.kv)
        return [
            tuple(each.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :seq_len].contiguous().unbind(0))
            for each in pages
        ]


def queries(num_tokens: int) -> Tensor:
    return normal(num_tokens, WIDTH).view(num_tokens, -1, HEAD_DIM)[:, :NUM_HEADS]


def of_decode(
    num_seqs: int, seq_len: int, page_size: int, query_len: int = 1, *, is_tree: bool = False, is_fp8: bool = False
) -> Iterator[Kernel]:
    pool, num_tokens = Pool.make(num_seqs, seq_len, page_size, is_fp8=is_fp8), num_seqs * query_len
    q, tree, positions = queries(num_tokens), None, None
    if is_tree:
        visible = torch.rand(num_tokens, query_len, device="cuda") < 0.3
        visible |= torch.eye(query_len, dtype=torch.bool, device="cuda").repeat(num_seqs, 1)
        tree, positions = Tree(pool.seq_lens - query_len, visible), torch.zeros(num_tokens, dtype=torch.int64).cuda()
    plan = PagedPlan.uniform(pool.block_table, pool.seq_lens, query_len, page_size, tree, positions, is_stored=True)
    table, lens = pool.block_table[:, : -(-seq_len // page_size)], (query_len,) * num_seqs
    name, num_bytes = (
        f"{num_seqs} x {query_len} of {seq_len}, pages of {page_size}",
        num_seqs * seq_len * pool.token_bytes,
    )

    def expected() -> Tensor:
        return paged_attention_ref(q, pool.kv[0], table, lens, pool.seq_lens.tolist(), None, positions, tree)

    def ours(layer: Tensor) -> Tensor:
        return decode_attention(q, layer, plan, None)

    yield Kernel(name, each(ours, pool.kv), num_bytes, check=close(lambda: ours(pool.kv[0]), expected))
    if not is_tree and query_len == 1 and not is_fp8:
        grouped = q.unsqueeze(2)  # [num_seqs, NUM_HEADS, 1, HEAD_DIM]
        torchs = each(lambda kv: F.scaled_dot_product_attention(grouped, *kv, enable_gqa=True), pool.contiguous())
        yield Kernel(f"{name}: torch, contiguous", torchs, num_bytes)


def of_extend(num_seqs: int, query_len: int, seq_len: int, page_size: int, *, is_fp8: bool = False) -> Iterator[Kernel]:
    pool, num_tokens = Pool.make(num_seqs, seq_len, page_size, is_fp8=is_fp8), num_seqs * query_len
    q, starts = queries(num_tokens), torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device="cuda")
    plan = PagedPlan.ragged(pool.block_table, pool.seq_lens, starts, num_tokens, page_size)
    num_flop, name = flop(num_seqs, query_len, seq_len), f"{num_seqs} x {query_len} of {seq_len}, pages of {page_size}"
    expected = torch.cat([_extend_ref(q, pool, seq, query_len) for seq in range(num_seqs)])

    def ours(layer: Tensor) -> Tensor:
        return extend_attention(q, layer, plan, None)

    check = close(lambda: ours(pool.kv[0]), lambda: expected)
    yield Kernel(name, each(ours, pool.kv), num_flop=num_flop, check=check)
    if query_len < seq_len or is_fp8:
        return
    layers, batched = pool.contiguous(), q.reshape(num_seqs, query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def theirs(kv: tuple[Tensor, Tensor], backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(batched, *kv, is_causal=True, enable_gqa=True)

        check = close(lambda theirs=theirs: theirs(layers[0]).transpose(1, 2).reshape_as(expected), lambda: expected)
        yield Kernel(f"{name}: torch, {backend.name}", each(theirs, layers), num_flop=num_flop, check=check)


def flop(num_seqs: int, query_len: int, seq_len: int) -> int:
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    return 4 * NUM_HEADS * HEAD_DIM * pairs


def _extend_ref(q: Tensor, pool: Pool, seq: int, query_len: int, chunk: int = 512) -> Tensor:
    """Compute the specification in parts, because its float32 scores are large."""
    seq_len, page_size, parts = int(pool.seq_lens[seq]), pool.kv.shape[4], []
    for first in range(0, query_len, chunk):
        num, end = min(chunk, query_len - first), seq_len - query_len + min(first + chunk, query_len)
        rows = q[seq * query_len + first : seq * query_len + first + num]
        table = pool.block_table[seq : seq + 1, : -(-end // page_size)]
        parts.append(paged_attention_ref(rows, pool.kv[0], table, (num,), (end,), None))
    return torch.cat(parts)


def of_history(query_len: int, num_before: int, page_size: int = 64) -> Iterator[Kernel]:
    """Yield a chunk behind a history, by the fused attention and by our kernel; also shorter chunks than it takes."""
    seq_len = num_before + query_len
    pool, q = Pool.make(1, seq_len, page_size), queries(query_len)
    starts = torch.tensor([0, query_len], dtype=torch.int32, device="cuda")
    plan = PagedPlan.ragged(pool.block_table, pool.seq_lens, starts, query_len, page_size)
    num_flop, name = flop(1, query_len, seq_len), f"{query_len} behind {num_before}"

    def fused(layer: Tensor) -> Tensor:
        return history.history_attention(q, layer, pool.block_table, 0, num_before)

    def ours(layer: Tensor) -> Tensor:
        return extend_attention(q, layer, plan)

    check = close(lambda: fused(pool.kv[0]), lambda: ours(pool.kv[0]))
    yield Kernel(f"{name}: fused, joined", each(fused, pool.kv[:2]), num_flop=num_flop, check=check)
    yield Kernel(f"{name}: extend_attention", each(ours, pool.kv[:2]), num_flop=num_flop)


def of_store(num_tokens: int) -> Kernel:
    """Return norm, rotation and store of query and key heads. Bytes: qkv read; q, k and v written."""
    pool = Pool.make(1, num_tokens, 16, min_layers=8)
    qkv = normal(len(pool.kv), num_tokens, WIDTH)
    cos, sin = normal(2, num_tokens, 1, HEAD_DIM).unbind(0)
    norms = (torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16),) * 2
    rows = PagedPlan.uniform(pool.block_table, pool.seq_lens, num_tokens, 16).rows
    assert rows is not None
    calls = each(
        lambda layer: norm_rotate_store(qkv[layer], cos, sin, pool.kv[layer], rows, norms, 1e-6), range(len(pool.kv))
    )
    return Kernel(f"{num_tokens} tokens", calls, num_tokens * WIDTH * 2 * 2)


def decodes(*, is_fp8: bool) -> Iterator[Kernel]:
    for page_size, num_seqs in itertools.product((16, 64), (1, 8, 64, 256)):
        yield from of_decode(num_seqs, 1024, page_size, is_fp8=is_fp8)
    yield from of_decode(8, 8192, 16, is_fp8=is_fp8)


def verifies(*, is_fp8: bool) -> Iterator[Kernel]:
    for num_seqs, (query_len, is_tree) in itertools.product((1, 32), ((6, False), (16, True), (61, True))):
        yield from of_decode(num_seqs, 1024, 16, query_len, is_tree=is_tree, is_fp8=is_fp8)


def extends(*, is_fp8: bool) -> Iterator[Kernel]:
    for sizes in ((1, 8192, 8192), (4, 2048, 2048), (1, 512, 8192), (1, 1024, 1024)):
        for page_size in (16, 64):
            yield from of_extend(*sizes, page_size, is_fp8=is_fp8)


def histories() -> Iterator[Kernel]:
    for query_len, num_before in ((8192, 8192), (8192, 57_344), (8192, 112_000), (4096, 57_344), (2048, 8192)):
        yield from of_history(query_len, num_before)


if __name__ == "__main__":
    kinds = {"decode": decodes, "verify": verifies, "extend": extends}
    parts = {
        f"{name}{'-fp8' * is_fp8}": lambda _, make=make, is_fp8=is_fp8: make(is_fp8=is_fp8)
        for is_fp8 in (False, True)
        for name, make in kinds.items()
    }
    parts |= {"history": lambda _: histories(), "store": lambda _: map(of_store, (1, 64, 256, 8192))}
    measure(__doc__, "attention-kernels", parts)
