"""Attention of a batch of prompts to latents in the expanded form (kernels/attention/latents.py), on CUDA.

All keys that the batch sees, sequence after sequence, are cut into pieces. The keys and values of one piece are made of
latents, and all tokens attend to them, before those of the next piece are made. So the working memory has a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention.latents import Keys, LatentWeights, expanded_attention
from ..checkpoint.model_config import LatentConfig
from ..rounds.batch import ForwardBatch, upload

_LEAST = 64  # tokens of a batch; for fewer, launches take longer than what they save
_PIECE_BYTES = 256 << 20  # of the keys and values of a piece
_UNIT = 64  # keys


class LatentPiece(NamedTuple):
    """Keys first .. stop - 1 of all keys of a batch."""

    first: int
    stop: int
    starts: Tensor  # [num_seqs + 1] int32, first key of each sequence in the piece, and the end
    offsets: Tensor  # [num_seqs] int32: token t of a sequence sees the first t + offset + 1 of these keys
    rows: Tensor | None  # [num_keys] int64, where latents lie in pages; None: those of the batch's own tokens in order


@dataclass(frozen=True, slots=True, eq=False)
class LatentPieces:
    """The keys of a batch of prompts in pieces."""

    pieces: tuple[LatentPiece, ...]
    starts: Tensor  # [num_seqs + 1] int32, first token of each sequence, and the end

    @classmethod
    def of(cls, batch: ForwardBatch, latent: LatentConfig, num_heads: int, itemsize: int) -> LatentPieces | None:
        """Return None if the absorbed form is faster, or if the host does not know the lengths: in rounds and graphs.
        Shapes alone decide."""
        starts = batch.starts
        if not batch.prefix_lens or starts is None or not is_faster(latent, batch.query_lens, batch.prefix_lens):
            return None
        return cls(_pieces(batch, piece_size(latent, num_heads, itemsize)), starts)

    def attend(
        self,
        q: Tensor,
        latents: Tensor,
        kv_layer: Tensor,
        weights: LatentWeights,
        scale: float,
        tiles: Any = None,
    ) -> Tensor:
        """Return the values of all tokens, [num_tokens, num_heads * value_dim].

        `q` [num_tokens, num_heads, plain_dim + rope_dim] is rotated. The latents of the batch, `latents` [num_tokens,
        rank + rope_dim], are stored in `kv_layer` [num_pages, 1, 1, page_size, rank + rope_dim]."""
        rank, is_whole = weights.rank, len(self.pieces) == 1
        shape = (*q.shape[:2], weights.up.shape[1] - weights.plain_dim)
        out, lse = q.new_empty(shape), None
        if not is_whole:
            out = torch.zeros(shape, dtype=torch.float32, device=q.device)
            lse = torch.full(shape[:2], float("-inf"), device=q.device)
        stored = kv_layer.view(-1, kv_layer.shape[-1])
        for piece in self.pieces:
            own = latents[piece.first : piece.stop] if piece.rows is None else stored.index_select(0, piece.rows)
            keys = Keys(F.linear(own[:, :rank], weights.up.flatten(0, 1)), own[:, rank:], piece.starts, piece.offsets)
            expanded_attention(q, keys, self.starts, weights.plain_dim, scale, out, lse, tiles)
        return out.to(q.dtype).flatten(1)


def piece_size(latent: LatentConfig, num_heads: int, itemsize: int) -> int:
    """Return the number of keys of a piece. A chunk needs no more working memory if it sees more than two pieces."""
    size = _PIECE_BYTES // (num_heads * (latent.plain_dim + latent.value_dim) * itemsize)
    return max(_UNIT, size // _UNIT * _UNIT)


def is_faster(latent: LatentConfig, query_lens: Sequence[int], prefix_lens: Sequence[int]) -> bool:
    """Return whether the expanded form is faster for these numbers of new tokens, behind others: whether it takes fewer
    operations."""
    num_tokens, num_keys = sum(query_lens), sum(query_lens) + sum(prefix_lens)
    lens = zip(query_lens, prefix_lens, strict=True)
    num_pairs = sum(query_len * (2 * prefix_len + query_len) // 2 for query_len, prefix_len in lens)
    of_ups = latent.rank * (latent.plain_dim + latent.value_dim)  # of one head and token
    of_pair = latent.plain_dim + latent.rope_dim + latent.value_dim
    expanded, absorbed = num_keys * of_ups + num_pairs * of_pair, num_tokens * of_ups
    return num_tokens >= _LEAST and expanded < absorbed + num_pairs * (2 * latent.rank + latent.rope_dim)


def _pieces(batch: ForwardBatch, size: int) -> tuple[LatentPiece, ...]:
    """Cut all keys of a batch into pieces of `size` keys."""
    lens = [query_len + prefix_len for query_len, prefix_len in zip(batch.query_lens, batch.prefix_lens, strict=True)]
    ends = list(itertools.accumulate(lens))
    cuts = [(first, min(first + size, ends[-1])) for first in range(0, ends[-1], size)]
    numbers: list[list[int]] = []
    for first, stop in cuts:
        begins = [min(max(first - (end - length), 0), length) for end, length in zip(ends, lens, strict=True)]
        counts = [
            min(max(stop - (end - length), 0), length) - begin
            for end, length, begin in zip(ends, lens, begins, strict=True)
        ]
        offsets = [prefix_len - begin for prefix_len, begin in zip(batch.prefix_lens, begins, strict=True)]
        numbers += [[0, *itertools.accumulate(counts)], counts, begins, offsets]
    on_device = upload(numbers, batch.seq_lens.device)
    pieces: list[LatentPiece] = []
    for i, (first, stop) in enumerate(cuts):
        starts, counts, begins, offsets = on_device[4 * i : 4 * i + 4]
        rows = None
        if any(batch.prefix_lens):
            seqs = torch.repeat_interleave(counts, output_size=stop - first)
            slots = torch.arange(stop - first, device=seqs.device) + (begins - starts[:-1])[seqs]
            rows = batch.block_table[seqs, slots // batch.page_size] * batch.page_size + slots % batch.page_size
        pieces.append(LatentPiece(first, stop, starts.int(), offsets.int(), rows))
    return tuple(pieces)
