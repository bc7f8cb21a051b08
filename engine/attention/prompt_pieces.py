"""Attention of a batch of prompts on CUDA: long pieces by torch's fused attention, the rest by our own kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kernels.attention import history, prompt_attention
from ...kernels.attention.paged_plan import PagedPlan, extend_attention
from ..rounds.batch import ForwardBatch, upload


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
    rest: PagedPlan | None  # plan of the rest, end to end
    index: torch.Tensor | None  # [num_rest] int64, these tokens

    @classmethod
    def of(cls, batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype) -> PromptPieces | None:
        """Return None if the whole batch is the rest, or fused attention does not serve on this device. Arguments are
        as in `begin_attention`."""
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
        plan = PagedPlan(table, seq_lens, None, None, new.int(), None, None, None)
        return cls(tuple(pieces), batch.block_table, plan, index)

    def attend(
        self, q: torch.Tensor, qkv: torch.Tensor, kv_layer: torch.Tensor, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the values of all tokens, [num_tokens, num_heads * head_dim].

        `q` [num_tokens, num_heads, head_dim] is the part of `qkv` with the queries. The batch's keys and values are
        stored in `kv_layer` [num_pages, 2, num_kv_heads, page_size, head_dim], or the values in a layer of their own
        pool, `values`."""
        k, v = qkv.unflatten(1, (-1, q.shape[2]))[:, q.shape[1] :].split(kv_layer.shape[2], dim=1)
        rest: Iterator[torch.Tensor] = iter(())
        if self.rest is not None and self.index is not None:
            out = extend_attention(q.index_select(0, self.index), kv_layer, self.rest, values=values)
            rest = iter(out.split([piece.num_tokens for piece in self.pieces if piece.is_rest]))
        outs: list[torch.Tensor] = []
        for piece in self.pieces:
            tokens = slice(piece.first, piece.first + piece.num_tokens)
            if piece.num_prompts:
                found = prompt_attention.prompt_attention(q[tokens], k[tokens], v[tokens], piece.num_prompts)
            elif piece.num_before:
                found = history.history_attention(
                    q[tokens], kv_layer, self.block_table, piece.seq, piece.num_before, values
                )
            else:
                found = next(rest)
            outs.append(found)
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


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
