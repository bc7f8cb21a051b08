"""The attention of one forward, layer by layer: from fused q, k, v to the attended values, with KV in pages.

There are three ways to the same numbers. Compiled kernels read pages in place: Triton on CUDA, and numba on a CPU in
float32 for few new tokens per sequence. Torch operations gather the pages first: on a CPU in 16 bits and for prefill
chunks, where the copy is small beside the products. On CUDA, torch's fused attention takes prompts and chunks of many
tokens: whole prompts from their queries, keys and values (prompt_attention.py), and chunks behind others from gathered
pages (history.py).

If pages are in FP8, a token sees its own keys and values as they are stored, or the text would depend on the division
into chunks. So a CPU gathers all pages. On CUDA the store of a whole prompt's keys and values also writes the stored
numbers over them, and the copy of pages behind which a chunk stands returns these numbers. They are exact in 16 bits
(kernels/state/fp8_pages.py), so all ways see the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.attention import history, prompt_attention
from ...kernels.attention.attention import AttentionPlan, clear_fresh_pages, paged_attention, store_kv
from ...kernels.attention.latents import LatentWeights, join_latents, latent_values
from ...kernels.attention.paged_rows import PagedRows, attend
from ...kernels.operations import captures, reads_pages
from ...kernels.products.norm import rms_norm
from ...kernels.products.rotary import apply_rotary_
from ..checkpoint.model_config import ModelConfig
from ..rounds.batch import ForwardBatch, JointBatch, upload
from .latent_pieces import LatentPieces
from .rope import RotaryEmbedding

if TYPE_CHECKING:
    from ...kernels.attention.triton_attention import TritonPlan
    from ...kernels.attention.triton_latent_heads import Turns

_MAX_COMPILED_QUERY_LEN = 16  # beyond, torch's matrix products win


class HeadNorms(NamedTuple):
    """Weights that norm q and k per head before their rotation."""

    q: torch.Tensor  # [head_dim]
    k: torch.Tensor  # [head_dim]


class AttentionContext(Protocol):
    """State that the attention layers of one forward share: positions, pages, masks, plans of kernels."""

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in layer `index` of the pool: `qkv` [num_tokens, q_size + num_planes * kv_size] -> [num_tokens,
        q_size].

        `qkv` may be overwritten. `window`: positions that a query sees, its own included; None: all. `sinks`: scores of
        query heads that have no value, [num_heads] float32. On return the new tokens' KV is stored."""
        ...


def begin_attention(
    config: ModelConfig,
    rotary: RotaryEmbedding,
    batch: ForwardBatch | JointBatch,
    kv: torch.Tensor,
    dtype: torch.dtype,
) -> AttentionContext:
    """Return the context of a forward over `kv` [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim],
    of the model's device, and of `dtype` or e4m3 (kernels/state/fp8_pages.py). `dtype` is that of the model."""
    if isinstance(batch, JointBatch):
        first, second = (begin_attention(config, rotary, part, kv, dtype) for part in (batch.first, batch.second))
        if isinstance(first, _TritonAttention) and isinstance(second, _TritonAttention):
            return _JointTritonAttention.of(first, second)
        return _JointAttention(first, second, batch.first.num_tokens)
    if batch.attention is not None:
        return batch.attention(config, rotary)
    num_planes = 2 if config.latent is None else 1
    shape = (config.num_layers, num_planes, config.num_kv_heads, batch.page_size, config.head_dim)
    assert (kv.shape[0], *kv.shape[2:]) == shape, (kv.shape, shape)
    if batch.num_tokens == 0:
        return _NoAttention(config.q_size)
    cos_sin = rotary(batch.positions, dtype)
    if captures(kv.device) and config.latent is not None:
        return _TritonLatents.of(config, batch, kv, *cos_sin)
    if captures(kv.device):
        prompts = PromptPieces.of(batch, kv, dtype) if set(config.sliding_window) == {None} else None
        return _TritonAttention(config, triton_plan(batch), prompts, kv.unbind(0), *cos_sin)
    is_short = batch.tree is not None or max(batch.query_lens) <= _MAX_COMPILED_QUERY_LEN
    if is_short and reads_pages(kv.device, kv.dtype):
        rows = PagedRows.build(
            cos_sin, batch.block_table, batch.query_lens, batch.seq_lens, batch.positions, batch.tree
        )
        return _CompiledAttention(config, rows, kv.numpy())
    plan = batch.attention_plan(config.num_kv_heads, config.sliding_window, dtype, num_planes)
    clear_fresh_pages(kv, plan)
    return _GatheredAttention(config, plan, kv.unbind(0), *cos_sin)


def attend_latents(
    context: AttentionContext, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights
) -> torch.Tensor:
    """Attend in layer `index` of a pool of latents, and store the new tokens' latents: return the values, [num_tokens,
    num_heads * value_dim].

    `q` [num_tokens, num_heads, plain_dim + rope_dim] and `stored` [num_tokens, rank + rope_dim], the latents before
    their norm, are not rotated yet. They may be views, and may be overwritten."""
    if isinstance(context, _TritonLatents):
        return context.attend(index, q, stored, weights)
    if isinstance(context, _JointAttention):
        (q, other_q), (stored, other) = q.tensor_split((context.num_first,)), stored.tensor_split((context.num_first,))
        of_second = attend_latents(context.second, index, other_q, other, weights)
        return torch.cat([attend_latents(context.first, index, q, stored, weights), of_second])
    heads = join_latents(q, stored, weights)
    attended = context(index, heads.flatten(1), None, None).unflatten(1, (q.shape[1], -1))
    return latent_values(attended[..., : weights.rank], weights)


@dataclass(frozen=True, slots=True, eq=False)
class _NoAttention:
    """The attention of a rank without rows: it stores nothing and returns no rows, of the usual width."""

    q_size: int

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        del index, norms, window, sinks
        assert len(qkv) == 0, qkv.shape
        return qkv[:, : self.q_size]


@dataclass(frozen=True, slots=True, eq=False)
class _JointAttention:
    """The attention of two batches of one forward, each by its own way. The first may see tokens of the second, so the
    KV of the second is stored first."""

    first: AttentionContext
    second: AttentionContext
    num_first: int  # tokens of the first batch

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        first, second = qkv.tensor_split((self.num_first,))
        of_second = self.second(index, second, norms, window, sinks)
        return torch.cat([self.first(index, first, norms, window, sinks), of_second])


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledAttention:
    config: ModelConfig
    rows: PagedRows
    kv: np.ndarray  # [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim] float32

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config = self.config
        return attend(
            qkv, self.kv, index, self.rows, window, norms, config.rms_norm_eps, config.softmax_scale, sinks=sinks
        )


def triton_plan(batch: ForwardBatch, *, is_stored: bool = False) -> TritonPlan:
    """Return the plan of the kernels on CUDA. Prompts and chunks of any lengths share one kernel; rounds have another.

    `is_stored`: the queries have no KV of their own, all that they see is in pages already."""
    from ...kernels.attention.triton_attention import TritonPlan

    table, seq_lens = batch.block_table, batch.seq_lens
    if batch.starts is not None:
        return TritonPlan.ragged(table, seq_lens, batch.starts, batch.num_tokens, batch.page_size)
    query_len = batch.query_lens[0]
    return TritonPlan.uniform(
        table, seq_lens, query_len, batch.page_size, batch.tree, batch.positions, is_stored=is_stored
    )


class Piece(NamedTuple):
    """Consecutive tokens of a batch."""

    seq: int  # the first sequence that they belong to
    first: int
    num_tokens: int
    num_prompts: int  # prompts of one length that begin here; 0: the tokens see others in their pages
    num_before: int = 0  # tokens before them, if `history_attention` takes them; 0: it does not

    @property
    def is_rest(self) -> bool:
        """Whether `extend_attention` takes the tokens."""
        return self.num_prompts == self.num_before == 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptPieces:
    """Division of a batch of prompts into pieces for `prompt_attention`, pieces for `history_attention`, and a rest for
    `extend_attention`."""

    pieces: tuple[Piece, ...]  # all tokens, in order
    block_table: torch.Tensor  # [num_seqs, max_pages] int64, of the batch
    rest: TritonPlan | None  # plan of the rest, end to end
    index: torch.Tensor | None  # [num_rest] int64, these tokens

    @classmethod
    def of(cls, batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype) -> PromptPieces | None:
        """Return None if the whole batch is the rest, or fused attention does not serve on this device. Arguments are
        as in `begin_attention`."""
        from ...kernels.attention.triton_attention import TritonPlan

        if not batch.prefix_lens:  # a round
            return None
        pieces, kind = _pieces(batch.query_lens, batch.prefix_lens), (kv.device, dtype, kv.shape[-1])
        if any(piece.num_before for piece in pieces) and not history.serves(*kind):
            pieces = [piece._replace(num_before=0) for piece in pieces]
        if all(piece.is_rest for piece in pieces) or not prompt_attention.serves(*kind):
            return None
        rests = [piece for piece in pieces if piece.is_rest]
        if not rests:
            return cls(tuple(pieces), batch.block_table, None, None)
        starts = [0, *itertools.accumulate(piece.num_tokens for piece in rests)]
        tokens = [token for piece in rests for token in range(piece.first, piece.first + piece.num_tokens)]
        seqs, new, index = upload([[piece.seq for piece in rests], starts, tokens], batch.seq_lens.device)
        table, seq_lens = batch.block_table.index_select(0, seqs), batch.seq_lens.index_select(0, seqs)
        plan = TritonPlan(table, seq_lens, None, None, new.int(), None, None, None)
        return cls(tuple(pieces), batch.block_table, plan, index)


def _pieces(query_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[Piece]:
    """Return the pieces of a batch in order; neighbours of one length go together."""
    pieces: list[Piece] = []
    seq = first = 0
    for (query_len, prefix_len), same in itertools.groupby(zip(query_lens, prefix_lens, strict=True)):
        num_seqs = len(list(same))
        if prefix_len == 0 and prompt_attention.takes(num_seqs, query_len):
            pieces.append(Piece(seq, first, num_seqs * query_len, num_seqs))
        else:
            num_before = prefix_len if history.takes(query_len, prefix_len) else 0
            num_whole = prompt_attention.whole_part(query_len) if prefix_len == 0 else 0
            for i in range(num_seqs):
                start = first + i * query_len
                whole = Piece(seq + i, start, num_whole, 1)
                other = Piece(seq + i, start + num_whole, query_len - num_whole, 0, num_before)
                pieces += [part for part in (whole, other) if part.num_tokens]
        seq, first = seq + num_seqs, first + num_seqs * query_len
    return pieces


@dataclass(frozen=True, slots=True, eq=False)
class _TritonAttention:
    config: ModelConfig
    plan: TritonPlan
    prompts: PromptPieces | None
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 2, num_kv_heads, page_size, head_dim]
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from ...kernels.state.triton_store import norm_rotate_store

        assert self.plan.rows is not None
        kv_layer, eps = self.kv_layers[index], self.config.rms_norm_eps
        prompts = self.prompts if sinks is None else None  # torch's fused attention has none
        fuses = prompts is not None
        q = norm_rotate_store(qkv, self.cos, self.sin, kv_layer, self.plan.rows, norms, eps, writes_back=fuses)
        if prompts is not None:
            return self._attend_prompts(prompts, q, qkv, kv_layer)
        return self.attend(q, kv_layer, window, sinks).flatten(1)

    def attend(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of `q` [num_tokens, num_heads, head_dim], whose KV is stored: `out`, or a new tensor of
        q's shape."""
        from ...kernels.attention.triton_attention import decode_attention
        from ...kernels.attention.triton_extend import extend_attention

        attend = decode_attention if self.plan.starts is None else extend_attention
        return attend(q, kv_layer, self.plan, window, out=out, sinks=sinks)

    def _attend_prompts(
        self, prompts: PromptPieces, q: torch.Tensor, qkv: torch.Tensor, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        from ...kernels.attention.triton_extend import extend_attention

        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        k, v = qkv.unflatten(1, (-1, self.config.head_dim))[:, num_heads:].split(num_kv_heads, dim=1)
        rest: Iterator[torch.Tensor] = iter(())
        if prompts.rest is not None and prompts.index is not None:
            out = extend_attention(q.index_select(0, prompts.index), kv_layer, prompts.rest)
            rest = iter(out.split([piece.num_tokens for piece in prompts.pieces if piece.is_rest]))
        outs: list[torch.Tensor] = []
        for piece in prompts.pieces:
            tokens = slice(piece.first, piece.first + piece.num_tokens)
            if piece.num_prompts:
                found = prompt_attention.prompt_attention(q[tokens], k[tokens], v[tokens], piece.num_prompts)
            elif piece.num_before:
                found = history.history_attention(q[tokens], kv_layer, prompts.block_table, piece.seq, piece.num_before)
            else:
                found = next(rest)
            outs.append(found)
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _TritonLatents:
    """The attention to latents on CUDA, for `attend_latents` alone."""

    scale: float
    plan: TritonPlan
    turns: Turns
    pieces: LatentPieces | None  # keys of prompts in the expanded form; None: all is in the absorbed form
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 1, 1, page_size, rank + rope_dim]

    @classmethod
    def of(
        cls, config: ModelConfig, batch: ForwardBatch, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> _TritonLatents:
        from ...kernels.attention.triton_latent_heads import Turns

        latent, plan = config.latent, triton_plan(batch)
        assert latent is not None and plan.rows is not None, config
        pieces = LatentPieces.of(batch, latent, config.num_heads, kv.itemsize)
        return cls(latent.scale, plan, Turns(cos, sin, plan.rows), pieces, kv.unbind(0))

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a layer of latents asks `attend_latents`")

    def attend(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        """Do the work of `attend_latents`."""
        from ...kernels.attention.triton_latent_heads import absorb_latents, turn_latents
        from ...kernels.attention.triton_latents import latent_attention

        kv_layer = self.kv_layers[index]
        if self.pieces is not None:
            latents = turn_latents(q, stored, weights, self.turns, kv_layer)
            return self.pieces.attend(q, latents, kv_layer, weights, self.scale)
        heads = absorb_latents(q, stored, weights, self.turns, kv_layer)
        return latent_values(latent_attention(heads, kv_layer, self.plan, weights.rank, self.scale), weights)


@dataclass(frozen=True, slots=True, eq=False)
class _JointTritonAttention:
    """The attention of two batches of one forward on CUDA. One launch stores the new tokens of both. Prompts of the
    batches read their keys in pages."""

    first: _TritonAttention
    second: _TritonAttention
    rows: torch.Tensor  # [num_tokens] int64, where new KV of both goes
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    @classmethod
    def of(cls, first: _TritonAttention, second: _TritonAttention) -> _JointTritonAttention:
        assert first.plan.rows is not None and second.plan.rows is not None
        rows = torch.cat([first.plan.rows, second.plan.rows])
        cos, sin = torch.cat([first.cos, second.cos]), torch.cat([first.sin, second.sin])
        return cls(first, second, rows, cos, sin)

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from ...kernels.state.triton_store import norm_rotate_store

        kv_layer, eps = self.first.kv_layers[index], self.first.config.rms_norm_eps
        q = norm_rotate_store(qkv, self.cos, self.sin, kv_layer, self.rows, norms, eps)
        out, num_first = torch.empty_like(q, memory_format=torch.contiguous_format), len(self.first.cos)
        self.first.attend(q[:num_first], kv_layer, window, sinks, out[:num_first])
        self.second.attend(q[num_first:], kv_layer, window, sinks, out[num_first:])
        return out.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _GatheredAttention:
    config: ModelConfig
    plan: AttentionPlan
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, num_planes, num_kv_heads, page_size, head_dim]
    cos: torch.Tensor  # [num_tokens, 1, rotary_dim]
    sin: torch.Tensor  # [num_tokens, 1, rotary_dim], signed

    def __call__(
        self,
        index: int,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config = self.config
        num_tokens, num_heads, num_rotated = qkv.shape[0], config.num_heads, config.num_heads + config.num_kv_heads
        qkv = qkv.view(num_tokens, -1, config.head_dim)
        q, k = qkv[:, :num_heads], qkv[:, num_heads:num_rotated]
        if norms is not None:
            q.copy_(rms_norm(q, norms.q, config.rms_norm_eps))
            k.copy_(rms_norm(k, norms.k, config.rms_norm_eps))
        apply_rotary_(qkv[:, :num_rotated, config.head_dim - config.rotated_size :], self.cos, self.sin)
        kv_layer = self.kv_layers[index]
        store_kv(qkv[:, num_heads:], kv_layer, self.plan)
        out = paged_attention(q, kv_layer, self.plan, window, config.softmax_scale, sinks=sinks)
        return out.reshape(num_tokens, -1)
