"""Attention by kernels that read KV in its pages (kernels/attention/paged_plan.py, latents.py), on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...kernels.attention.latents import (
    LatentWeights,
    Turns,
    absorb_latents,
    latent_attention,
    latent_values,
    turn_latents,
)
from ...kernels.attention.paged_plan import PagedPlan, decode_attention, extend_attention, norm_rotate_store
from ...kernels.attention.picks import PagedSight, PickedRows, paged_index_scores, paged_picks
from ..checkpoint.model_config import INDEX, IndexConfig, ModelConfig
from ..rounds.batch import ForwardBatch
from ..state.model_pools import ModelPools
from .context import AttentionContext, CosSin, LayerHeads
from .latent_pieces import LatentPieces
from .picked import rotate_index_
from .prompt_pieces import PromptPieces

_SCORE_BYTES = 256 << 20  # of the index scores of a piece of a prompt


def begin_paged(config: ModelConfig, batch: ForwardBatch, pools: ModelPools, cos_sin: CosSin) -> AttentionContext:
    """Return the context by kernels that read pages in place. Arguments are as in `begin_compiled`."""
    kv, (cos, sin) = pools.kv, cos_sin
    kv_layers = kv.unbind(0)
    if config.latent is not None:
        plan = paged_plan(batch)
        if config.index is not None:
            turns, sight = Turns(cos, sin, plan.new_rows), PagedSight.of(plan, batch.num_tokens)
            return _PagedPicks(config, plan, turns, sight, kv_layers, pools.further[INDEX])
        pieces = LatentPieces.of(batch, config.latent, config.num_heads, kv.itemsize)
        return _PagedLatents(config.latent.scale, plan, Turns(cos, sin, plan.new_rows), pieces, kv_layers)
    fuses = set(config.sliding_window) == {None} and not config.has_sinks
    prompts = PromptPieces.of(batch, kv, cos.dtype) if fuses else None
    return _PagedAttention(config, paged_plan(batch), prompts, kv_layers, pools.values, cos, sin)


def longest_rehearsal(index: IndexConfig, num_tokens: int, rate: int = 1) -> int:
    """Return how many tokens a chunk of `num_tokens` sees when its picks need most working memory: more do not add to
    it. `rate`: tokens of an index key."""
    return max(index.num_picks, _SCORE_BYTES // (4 * num_tokens)) * rate + num_tokens


def paged_queries(batch: ForwardBatch, kv: torch.Tensor, _: torch.dtype) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Do the work of `begin_queries` by kernels that read pages in place."""
    plan = paged_plan(batch, is_stored=True)
    return lambda q, layer: decode_attention(q, kv[layer], plan)


def pick_rows(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, plan: PagedPlan, sight: PagedSight, num_picks: int
) -> PickedRows:
    """Return the rows of `keys` that each token takes. Arguments are as for `paged_index_scores`. Long prompts are
    computed in pieces."""
    num_tokens, num_slots = len(q), plan.block_table.shape[1] * keys.shape[3]
    out = PickedRows(
        torch.empty((num_tokens, min(num_picks, num_slots)), dtype=torch.int64, device=q.device),
        torch.empty(num_tokens, dtype=torch.int64, device=q.device),
    )
    piece = max(1, _SCORE_BYTES // (4 * num_slots))
    for first in range(0, num_tokens, piece):
        tokens = range(first, min(first + piece, num_tokens))
        scores = paged_index_scores(q, weights, keys, plan, sight, tokens)
        paged_picks(scores, plan, sight, tokens, keys.shape[3], num_picks, out)
    return out


def paged_plan(batch: ForwardBatch, *, is_stored: bool = False) -> PagedPlan:
    """Return the plan of the kernels. Prompts and chunks of any lengths share one kernel; rounds have another.

    `is_stored`: the queries have no KV of their own, all that they see is in pages already."""
    table, seq_lens = batch.block_table, batch.seq_lens
    if batch.starts is not None:
        return PagedPlan.ragged(table, seq_lens, batch.starts, batch.num_tokens, batch.page_size)
    query_len = batch.query_lens[0]
    return PagedPlan.uniform(
        table, seq_lens, query_len, batch.page_size, batch.tree, batch.positions, is_stored=is_stored
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PagedAttention(AttentionContext):
    config: ModelConfig
    plan: PagedPlan
    prompts: PromptPieces | None
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 2, num_kv_heads, page_size, head_dim]
    values: torch.Tensor | None  # [num_layers, num_pages, 1, num_kv_heads, page_size, value_dim]; None: beside keys
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        kv_layer, rows, eps = self.kv_layers[heads.layer], self.plan.new_rows, self.config.rms_norm_eps
        prompts = self.prompts if heads.sinks is None else None  # torch's fused attention has none
        fuses = prompts is not None
        values = self.values_of(heads)
        q = norm_rotate_store(
            qkv, self.cos, self.sin, kv_layer, rows, heads.norms, eps, writes_back=fuses, values=values
        )
        if prompts is not None:
            return prompts.attend(q, qkv, kv_layer, values)
        return self.attend(q, heads).flatten(1)

    def attend(self, q: torch.Tensor, heads: LayerHeads, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention of `q` [num_tokens, num_heads, head_dim], whose KV is stored: `out`, or a new tensor of
        q's shape."""
        attend = decode_attention if self.plan.starts is None else extend_attention
        kv_layer, values = self.kv_layers[heads.layer], self.values_of(heads)
        return attend(q, kv_layer, self.plan, heads.window, out=out, sinks=heads.sinks, values=values)

    def values_of(self, heads: LayerHeads) -> torch.Tensor | None:
        """Return the layer of the pool of values; None: they lie beside the keys."""
        return None if self.values is None else self.values[heads.layer]

    def joined(self, second: AttentionContext, num_first: int) -> AttentionContext:
        if isinstance(second, _PagedAttention):
            return _MixedPagedAttention(self, second, *map(torch.cat, zip(self._tokens, second._tokens, strict=True)))
        return AttentionContext.joined(self, second, num_first)

    @property
    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that have a row per token: slots, cosines and sines."""
        return self.plan.new_rows, self.cos, self.sin


@dataclass(frozen=True, slots=True, eq=False)
class _MixedPagedAttention(AttentionContext):
    """The attention of two batches of one forward. One launch stores the new tokens of both. Prompts of the batches
    read their keys in pages."""

    first: _PagedAttention
    second: _PagedAttention
    rows: torch.Tensor  # [num_tokens] int64, where new KV of both goes
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        kv_layer, eps = self.first.kv_layers[heads.layer], self.first.config.rms_norm_eps
        values = self.first.values_of(heads)
        q = norm_rotate_store(qkv, self.cos, self.sin, kv_layer, self.rows, heads.norms, eps, values=values)
        out, num_first = torch.empty_like(q, memory_format=torch.contiguous_format), len(self.first.cos)
        self.first.attend(q[:num_first], heads, out[:num_first])
        self.second.attend(q[num_first:], heads, out[num_first:])
        return out.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _PagedLatents(AttentionContext):
    scale: float
    plan: PagedPlan
    turns: Turns
    pieces: LatentPieces | None  # keys of prompts in the expanded form; None: all is in the absorbed form
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 1, 1, page_size, rank + rope_dim]

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a layer of latents asks `attend_latents`")

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        kv_layer = self.kv_layers[index]
        if self.pieces is not None:
            latents = turn_latents(q, stored, weights, self.turns, kv_layer)
            return self.pieces.attend(q, latents, kv_layer, weights, self.scale)
        heads = absorb_latents(q, stored, weights, self.turns, kv_layer)
        return latent_values(latent_attention(heads, kv_layer, self.plan, weights.rank, self.scale), weights)


@dataclass(slots=True, eq=False)
class _PagedPicks(AttentionContext):
    """Sparse attention: to each token, the slots that it takes are a sequence of pages of one slot."""

    config: ModelConfig
    plan: PagedPlan
    turns: Turns
    sight: PagedSight
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 1, 1, page_size, rank + rope_dim]
    keys: torch.Tensor  # the pool of index keys, [num_index_layers, num_pages, 1, 1, page_size, index_head_dim]
    _picked: PagedPlan | None = field(default=None, init=False)

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        assert self.config.index is not None, self.config
        keys, num_picks = self.keys[index], self.config.index.num_picks
        rotate_index_(q, k, (self.turns.cos, self.turns.sin))
        rows = self.plan.new_rows.clamp(min=0)  # a token without a place goes to the padding page
        keys.view(-1, keys.shape[-1]).index_copy_(0, rows, k)
        out = pick_rows(q, weights, keys, self.plan, self.sight, num_picks)
        self._picked = PagedPlan(out.rows, out.counts, None, 1, None, None, None, None)

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a layer of latents asks `attend_latents`")

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        assert self._picked is not None and self.config.latent is not None, "a layer without an indexer is the first"
        kv_layer = self.kv_layers[index]
        heads = absorb_latents(q, stored, weights, self.turns, kv_layer)
        slots = kv_layer.view(-1, 1, 1, 1, kv_layer.shape[4])
        attended = latent_attention(heads, slots, self._picked, weights.rank, self.config.latent.scale)
        return latent_values(attended, weights)
