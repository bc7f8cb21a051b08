"""Attention to expanded keys and values by Triton, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from thinned import thinned
from triton_device import DEVICE, random

pytest.importorskip("triton")

from attention_case import TOLERANCE

from baton.kernels.attention.latents import Keys
from baton.kernels.attention.triton_expanded import ExpandedTiles, expanded_attention

NUM_HEADS, PLAIN_DIM, ROPE_DIM, VALUE_DIM = 3, 20, 12, 24
SCALE = 0.11
DTYPES = [torch.float32, torch.float16]
Lens = tuple[int, ...]


class Prompts:
    """New tokens of sequences behind others, and the keys of all."""

    def __init__(self, query_lens: Lens, seq_lens: Lens, dtype: torch.dtype = torch.float32) -> None:
        self.query_lens, self.seq_lens, self.dtype = query_lens, seq_lens, dtype
        num_keys = sum(seq_lens)
        self.q = random(sum(query_lens), NUM_HEADS + 1, PLAIN_DIM + ROPE_DIM, dtype=dtype)[:, :-1]
        self.expanded = random(num_keys, NUM_HEADS * (PLAIN_DIM + VALUE_DIM), dtype=dtype, seed=1)
        self.turned = random(num_keys, ROPE_DIM + 4, dtype=dtype, seed=2)[:, 4:]

    def expected(self) -> torch.Tensor:
        outs: list[torch.Tensor] = []
        keys = torch.cat((self.expanded, self.turned), 1).float().nan_to_num(posinf=0.0, neginf=0.0)
        for q, own in zip(self.q.float().split(self.query_lens), keys.split(self.seq_lens), strict=True):
            heads = own[:, :-ROPE_DIM].unflatten(1, (NUM_HEADS, -1))
            turned = own[:, None, -ROPE_DIM:].expand(-1, NUM_HEADS, -1)
            k, v = torch.cat((heads[..., :PLAIN_DIM], turned), -1), heads[..., PLAIN_DIM:]
            hidden = torch.ones(len(q), len(own), dtype=torch.bool, device=DEVICE).triu(len(own) - len(q) + 1)
            scores = torch.einsum("thd,jhd->htj", q, k) * SCALE
            outs.append(torch.einsum("htj,jhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
        return torch.cat(outs)

    def attend(self, piece: int | None = None, **tiles: int) -> torch.Tensor:
        """Attend to pieces of `piece` keys of each sequence; None: to all keys at once."""
        chosen, ends = ExpandedTiles.choose(self.q)._replace(**tiles), torch.tensor([0, *self.seq_lens]).cumsum(0)
        tokens = torch.tensor([0, *self.query_lens]).cumsum(0).to(DEVICE, torch.int32)
        shape = (len(self.q), NUM_HEADS, VALUE_DIM)
        dtype, lse = self.dtype if piece is None else torch.float32, None
        out = torch.full(shape, float("nan") if piece is None else 0.0, dtype=dtype, device=DEVICE)
        if piece is not None:
            lse = torch.full(shape[:2], float("-inf"), device=DEVICE)
        for first in range(0, max(self.seq_lens), piece or max(self.seq_lens)):
            spans = [
                (int(end) + min(first, seq_len), int(end) + min(first + (piece or seq_len), seq_len))
                for end, seq_len in zip(ends, self.seq_lens, strict=False)
            ]
            index = torch.tensor([key for span in spans for key in range(*span)], dtype=torch.int64, device=DEVICE)
            starts = torch.tensor([0, *(stop - start for start, stop in spans)]).cumsum(0)
            offsets = [
                seq_len - query_len - min(first, seq_len)
                for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True)
            ]
            keys = Keys(
                self.expanded[index],
                self.turned[index],
                starts.to(DEVICE, torch.int32),
                torch.tensor(offsets, dtype=torch.int32, device=DEVICE),
            )
            expanded_attention(self.q, keys, tokens, PLAIN_DIM, SCALE, out, lse, chosen)
        return out.to(self.dtype)

    def check(self, out: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.float(), self.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("lens", "piece", "dtype"),
    thinned(
        itertools.product(
            [((40,), (40,)), ((9, 1, 0, 37), (9, 30, 5, 60)), ((1, 16, 3), (70, 16, 33))], [None, 7, 32], DTYPES
        ),
        lambda i, *_: i in (0, 6, 9, 10, 17),  # sequences side by side meet each length of a piece
    ),
    ids=str,
)
def test_sequences_of_any_lengths(lens: tuple[Lens, Lens], piece: int | None, dtype: torch.dtype) -> None:
    query_lens, seq_lens = lens
    prompts = Prompts(query_lens, seq_lens, dtype)
    prompts.check(prompts.attend(piece, block_m=16, block_n=16))


def test_the_tiles_of_a_gpu() -> None:
    prompts = Prompts((150, 20), (200, 20), torch.float16)
    prompts.check(prompts.attend())
    prompts.check(prompts.attend(90))


def test_without_offsets_no_token_has_others_before_it() -> None:
    prompts = Prompts((20, 9), (20, 9))
    starts, out = torch.tensor([0, 20, 29], dtype=torch.int32, device=DEVICE), torch.empty(29, NUM_HEADS, VALUE_DIM)
    keys = Keys(prompts.expanded, prompts.turned, starts, None)
    prompts.check(expanded_attention(prompts.q, keys, starts, PLAIN_DIM, SCALE, out.to(DEVICE)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("piece", [None, 16])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [3, PLAIN_DIM + 3])
def test_a_number_that_is_none_spoils_only_rows_that_see_it(dim: int, number: float, piece: int | None) -> None:
    """The key of the third of five new tokens of the first sequence, in head 0."""
    prompts = Prompts((5, 20), (25, 20))
    clean = prompts.attend(piece)
    prompts.expanded[22, dim] = number
    out = prompts.attend(piece)
    sees = torch.zeros(25, NUM_HEADS, dtype=torch.bool, device=DEVICE)
    sees[2:5, 0] = True
    torch.testing.assert_close(out[~sees], clean[~sees])
    if dim > PLAIN_DIM or number != number:
        assert not out[sees].isfinite().any()
