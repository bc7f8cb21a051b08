"""Time attention to latents on a GPU at the shapes of DeepSeek's models: 16 and 128 heads, 512 + 64 numbers, bfloat16.

    python tests/benchmarks/kernel_times/bench_kernels_latents.py [--only decode verify chunk prompt heads] [--heads 16]

Decode and verify are compared with reading their latents once, prompts with the rate of a large matrix product. Outputs
are compared with `paged_attention_ref`. Prompts are timed in both forms (kernels/attention/latents.py), from queries
and latents before rotation to values of heads. Their floor is that of the expanded form without its products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from graph_times import Kernel, close, copies, each, measure, normal
from torch import Tensor

from baton.engine.attention.latent_pieces import LatentPieces
from baton.engine.checkpoint.model_config import LatentConfig
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import paged_attention_ref
from baton.kernels.attention.latents import LatentWeights, Turns
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_latent_heads import absorb_latents, latent_values, turn_latents
from baton.kernels.attention.triton_latents import latent_attention
from baton.kernels.products.norm import Norm

LATENT = LatentConfig(512, None, 128, 64, 128, is_interleaved=True, scale=0.1147)
RANK, ROPE_DIM, PAGE_SIZE = LATENT.rank, LATENT.rope_dim, 64
WIDTH, SCALE = RANK + ROPE_DIM, LATENT.scale
DECODES = ((1, 1100), (8, 1100), (64, 1100), (256, 1100), (1, 32_768), (8, 8192))
PROMPTS = ((1, 1024, 1024), (1, 8192, 8192), (16, 2048, 2048), (1, 1024, 9216))


class Pool(NamedTuple):
    """Sequences of one length over scattered pages of several layers."""

    kv: Tensor  # [num_layers, num_pages, 1, 1, PAGE_SIZE, WIDTH] bfloat16
    block_table: Tensor  # [num_seqs, max_pages] int64
    seq_lens: Tensor  # [num_seqs] int64

    @classmethod
    def make(cls, num_seqs: int, seq_len: int) -> Pool:
        num_pages = num_seqs * -(-seq_len // PAGE_SIZE)
        kv = normal(copies((num_pages + 1) * PAGE_SIZE * WIDTH * 2), num_pages + 1, 1, 1, PAGE_SIZE, WIDTH)
        table = torch.randperm(num_pages, device="cuda").view(num_seqs, -1) + 1
        return cls(kv, table, torch.full((num_seqs,), seq_len, device="cuda"))


class Inputs(NamedTuple):
    """What the first product of a layer makes of new tokens, and weights of several layers."""

    q: Tensor  # [num_tokens, num_heads, plain_dim + ROPE_DIM]
    stored: Tensor  # [num_tokens, WIDTH]
    turns: Turns
    layers: list[LatentWeights]

    @classmethod
    def make(cls, num_heads: int, rows: Tensor, num_layers: int) -> Inputs:
        sizes = (num_heads * (LATENT.plain_dim + ROPE_DIM), WIDTH)
        q, stored = normal(len(rows), sum(sizes)).split(sizes, dim=1)
        angle = torch.randn(len(rows), 1, ROPE_DIM // 2, device="cuda")
        cos, sin = torch.cat((angle.cos(),) * 2, -1).bfloat16(), torch.cat((-angle.sin(), angle.sin()), -1).bfloat16()
        norm = Norm(torch.ones(RANK, device="cuda", dtype=torch.bfloat16), 1e-6)
        ups = normal(num_layers, num_heads, LATENT.plain_dim + LATENT.value_dim, RANK, scale=RANK**-0.5)
        layers = [LatentWeights(norm, up, LATENT.plain_dim, is_interleaved=True) for up in ups]
        return cls(q.unflatten(1, (num_heads, -1)), stored, Turns(cos, sin, rows), layers)


def pairs(num_seqs: int, query_len: int, seq_len: int) -> int:
    return num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)


def of_attention(num_heads: int, num_seqs: int, query_len: int, seq_len: int) -> Kernel:
    pool, q = Pool.make(num_seqs, seq_len), normal(num_seqs * query_len, num_heads, WIDTH)
    plan = PagedPlan.uniform(pool.block_table, pool.seq_lens, query_len, PAGE_SIZE)
    some = min(query_len, 64)  # tokens of the last sequence that the specification computes

    def ours(layer: Tensor) -> Tensor:
        return latent_attention(q, layer, plan, RANK, SCALE)

    def expected() -> Tensor:
        table = pool.block_table[-1:]
        return paged_attention_ref(q[-some:], pool.kv[0], table, [some], [seq_len], None, scale=SCALE)[..., :RANK]

    num_flop = 2 * num_heads * (WIDTH + RANK) * pairs(num_seqs, query_len, seq_len)
    name, check = (
        f"{num_heads} heads, {num_seqs} x {query_len} of {seq_len}",
        close(lambda: ours(pool.kv[0])[-some:], expected),
    )
    return Kernel(name, each(ours, pool.kv), num_seqs * seq_len * WIDTH * 2, num_flop, check)


def of_prompts(num_heads: int, num_seqs: int, query_len: int, seq_len: int) -> Iterator[Kernel]:
    """Yield the last tokens of prompts in both forms."""
    pool = Pool.make(num_seqs, seq_len)
    rows = [BatchRow([0] * query_len, seq_len - query_len, pages) for pages in pool.block_table.tolist()]
    batch = ForwardBatch.build(rows, PAGE_SIZE, "cuda")
    assert batch.starts is not None
    plan = PagedPlan.ragged(batch.block_table, batch.seq_lens, batch.starts, batch.num_tokens, PAGE_SIZE)
    assert plan.rows is not None
    inputs, pieces = Inputs.make(num_heads, plan.rows, 2), LatentPieces.of(batch, LATENT, num_heads, 2)
    assert pieces is not None
    of_pair = LATENT.plain_dim + ROPE_DIM + LATENT.value_dim
    num_flop = 2 * num_heads * of_pair * pairs(num_seqs, query_len, seq_len)
    name = f"{num_heads} heads, {num_seqs} x {query_len} of {seq_len}"

    def absorbed(layer: int) -> Tensor:
        weights = inputs.layers[layer]
        heads = absorb_latents(inputs.q, inputs.stored, weights, inputs.turns, pool.kv[layer])
        return latent_values(latent_attention(heads, pool.kv[layer], plan, RANK, SCALE), weights)

    def expanded(layer: int, q: Tensor = inputs.q) -> Tensor:
        weights = inputs.layers[layer]
        latents = turn_latents(q, inputs.stored, weights, inputs.turns, pool.kv[layer])
        return pieces.attend(q, latents, pool.kv[layer], weights, SCALE)

    check = close(lambda: expanded(0, inputs.q.clone()), lambda: absorbed(0))
    yield Kernel(f"{name}, absorbed", each(absorbed, range(2)), num_flop=num_flop, check=check)
    yield Kernel(f"{name}, expanded", each(expanded, range(2)), num_flop=num_flop)


def of_heads(num_heads: int, num_tokens: int) -> Iterator[Kernel]:
    """Yield the launches around attention: queries and latents, and values."""
    pool = Pool.make(num_tokens, PAGE_SIZE)
    plan = PagedPlan.uniform(pool.block_table, pool.seq_lens, 1, PAGE_SIZE)
    assert plan.rows is not None
    num_bytes = num_heads * (LATENT.plain_dim + LATENT.value_dim) * RANK * 2
    inputs, attended = Inputs.make(num_heads, plan.rows, copies(num_bytes)), normal(num_tokens, num_heads, RANK)
    moved = num_bytes / 2 + inputs.q.nbytes + attended.nbytes

    def before(layer: int) -> None:
        absorb_latents(inputs.q, inputs.stored, inputs.layers[layer], inputs.turns, pool.kv[layer % len(pool.kv)])

    layers = range(len(inputs.layers))
    yield Kernel(f"{num_heads} heads, queries of {num_tokens}", each(before, layers), moved)
    values = each(lambda layer: latent_values(attended, inputs.layers[layer]), layers)
    yield Kernel(f"{num_heads} heads, values of {num_tokens}", values, moved)


if __name__ == "__main__":
    parts = {
        "decode": lambda o: (of_attention(heads, num, 1, length) for heads in o.heads for num, length in DECODES),
        "verify": lambda o: (of_attention(heads, num, 4, 1100) for heads in o.heads for num in (1, 32)),
        "chunk": lambda o: (
            of_attention(heads, 1, *sizes) for heads in o.heads for sizes in ((1024, 1024), (512, 8192))
        ),
        "prompt": lambda o: (
            kernel
            for heads in o.heads
            for sizes in PROMPTS
            if sizes[0] * sizes[1] * heads <= 1 << 20
            for kernel in of_prompts(heads, *sizes)
        ),
        "heads": lambda o: (kernel for heads in o.heads for num in (1, 8, 64, 256) for kernel in of_heads(heads, num)),
    }
    measure(__doc__, "latents-kernels", parts, heads=(16, 128))
