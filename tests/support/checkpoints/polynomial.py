"""A made-up family with a recurrent state: Llama, of which some layers also keep running polynomials of the text.

Each KV head has three polynomials. A token moves each of them:

    value = (value * multiplier + (token id + 1) * (position + 1)) mod PRIME

The values are exact (int64), and what they add to the attended values of their head moves the logits. So a token that
is missing, stale, damaged, moved wrongly or shifted by one position changes everything behind it.

The layer has two pools. "token_ids" holds the id of each token. "polynomials" holds the values after each block of
EDGE tokens, in the rows of this block (engine/layers/delta_net.py does the same). A forward reads the values NUM_BACK
blocks before the block of its first new token, and the ids since. Tokens of a tree have parents, so a forward that
verifies a tree writes no values behind them; a later forward does, when they are settled. No round accepts so many
tokens that it would come too late.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import RANK_CONTEXT
from torch import Tensor

from baton.engine.attention.context import AttentionContext
from baton.engine.attention.pool_rows import NewRows, PoolRows
from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.model_config import Further, ModelConfig
from baton.engine.checkpoint.weights import Weights
from baton.engine.layers.decoder import DecoderLayer, SelfAttention
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.families import FAMILIES, LLAMA
from baton.engine.models.llama import read_attention, read_layer, read_model
from baton.engine.products.linear import Linear

ARCHITECTURE = "PolynomialForCausalLM"
IDS, VALUES = "token_ids", "polynomials"  # pools
LAYERS = (0, 2)  # that have polynomials, of three
EDGE = 8
NUM_BACK = 2  # a round accepts at most as many blocks of tokens
PRIME = 2**31 - 1
MULTIPLIERS = (48_271, 69_621, 16_807)  # of a head, plus its number

Numbers = list[list[int]]  # by head: the values of its polynomials


@dataclass(frozen=True, slots=True, eq=False)
class Polynomials:
    """A `SelfAttention` that adds what the polynomials of its heads say."""

    inner: SelfAttention
    place: int  # in the pools
    pool: Further  # of values
    heads: range  # of KV, that this rank has
    head_dim: int

    @property
    def reader(self) -> Linear | None:
        return self.inner.reader

    @property
    def out(self) -> Linear:
        return self.inner.out

    def __call__(self, normed: Any, context: AttentionContext) -> Tensor:
        rows = context.further
        ids = torch.cat([batch.input_ids for batch in rows.batches])
        rows.store(IDS, self.place, ids.unsqueeze(1))
        attended = self.inner(normed, context)
        of_heads = attended.unflatten(1, (len(self.heads), -1, self.head_dim))
        for new in rows.new_rows():
            values = torch.tensor(self._values(rows, new))  # [num_new, num_heads, 3]
            of_heads[new.tokens] += directions(values, self.head_dim).unsqueeze(2).to(attended.device)
        return attended

    def _values(self, rows: PoolRows, new: NewRows) -> list[Numbers]:
        """Return the values after each new token of one sequence, and keep those at the ends of blocks."""
        block = self.pool.block(rows.batches[0].page_size)
        first = max(0, new.start // block - NUM_BACK) * block
        ids = rows.read(IDS, self.place, new.pages, first, new.stop).flatten().tolist()
        values, after = self._kept(rows, new.pages, first, block), list[Numbers]()
        for slot, token_id in enumerate(ids, first):
            position = slot
            if new.sees is not None and slot > new.start:
                path = new.sees[slot - new.start].nonzero().flatten().tolist()  # its own place last
                values, position = after[path[-2]], new.start + len(path) - 1
            values = moved(values, token_id, position, self.heads)
            if slot >= new.start:
                after.append(values)
            if (slot + 1) % block == 0 and (new.sees is None or slot < new.start):
                self._keep(rows, new.pages, slot + 1, block, values)
        return after

    def _kept(self, rows: PoolRows, pages: Tensor, edge: int, block: int) -> Numbers:
        if edge == 0:
            return [[0] * len(MULTIPLIERS) for _ in self.heads]
        divided = rows.read(VALUES, self.place, pages, edge - block, edge)
        return divided.transpose(0, 1).flatten(1)[:, : len(MULTIPLIERS)].tolist()

    def _keep(self, rows: PoolRows, pages: Tensor, edge: int, block: int, values: Numbers) -> None:
        divided = torch.zeros(len(self.heads), block * self.pool.row_width(rows.batches[0].page_size)).long()
        divided[:, : len(MULTIPLIERS)] = torch.tensor(values)
        divided = divided.unflatten(1, (block, -1)).transpose(0, 1).to(pages.device)
        rows.write(VALUES, self.place, pages, edge - block, divided)


def moved(values: Numbers, token_id: int, position: int, heads: Sequence[int]) -> Numbers:
    """Return the values of each head after one more token."""
    new = (token_id + 1) * (position + 1)
    return [
        [(value * (multiplier + head) + new) % PRIME for value, multiplier in zip(own, MULTIPLIERS, strict=True)]
        for head, own in zip(heads, values, strict=True)
    ]


def directions(values: Tensor, head_dim: int) -> Tensor:
    """Return what values [..., 3] int64 add to the attended values of a head, [..., head_dim] float32."""
    turns = torch.arange(1, head_dim + 1) * torch.tensor([[0.3], [0.7], [1.1]])
    return 1.5 * (values.double() / PRIME * 2 - 1).float() @ turns.sin()


def read_polynomial(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of the model, which are Llama's, and build its layers."""
    heads = weights.ranks.of_heads.heads(config.num_kv_heads)
    pool = next(each for each in config.further if each.name == VALUES)

    def layer(index: int) -> DecoderLayer:
        prefix, place = f"model.layers.{index}", config.place(IDS, index)
        attention = read_attention(config, weights, f"{prefix}.self_attn", index, config.hidden_size)
        own = attention if place is None else Polynomials(attention, place, pool, heads, config.head_dim)
        return read_layer(config, weights, prefix, index, attention=own)

    return read_model(config, weights, [layer(index) for index in range(config.num_layers)])


def _read_further(raw: ConfigFile) -> tuple[Further, ...]:
    num_heads, is_tail = raw.integer("num_key_value_heads"), raw.flag("has_tail_pages")
    blocks: dict[str, Any] = {"is_tail": is_tail, "longest_block": EDGE, "num_read": is_tail * (NUM_BACK + 1) * EDGE}
    return (
        Further(IDS, LAYERS, 1, dtype="int64", **blocks),
        Further(VALUES, LAYERS, EDGE, num_heads, "int64", per_block=True, **blocks),
    )


@contextmanager
def served(_: str = "") -> Iterator[None]:
    """Serve the family in this process, and in the ranks that it starts."""
    row = replace(LLAMA, architecture=ARCHITECTURE, reader="polynomial.read_polynomial", read_further=_read_further)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, ARCHITECTURE, row)
        patch.setitem(sys.modules, "baton.engine.models.polynomial", sys.modules[__name__])
        patch.setenv(RANK_CONTEXT, f"polynomial served {ARCHITECTURE}")
        yield


@contextmanager
def served_model(checkpoint: Callable[..., Path], folder: Path, pages: str) -> Iterator[Path]:
    """Serve the family, and write a Llama of three layers as a model of it in `folder`. `pages`: "tail" or "kept"."""
    directory = folder / "model"
    shutil.copytree(checkpoint("llama", num_hidden_layers=3), directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": [ARCHITECTURE], "has_tail_pages": pages == "tail"}
    (directory / "config.json").write_text(json.dumps(config))
    with served():
        yield directory


def add_polynomials(reference: Any) -> None:
    """Let a Llama in transformers compute the polynomials of a whole text, token after token."""
    config, values = reference.config, list[Tensor]()
    heads = range(config.num_key_value_heads)

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        [ids] = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).tolist()
        own, all_values = [[0] * len(MULTIPLIERS) for _ in heads], list[Numbers]()
        for position, token_id in enumerate(ids):
            own = moved(own, token_id, position, heads)
            all_values.append(own)
        group = config.num_attention_heads // len(heads)
        values[:] = [directions(torch.tensor(all_values), config.head_dim).repeat_interleave(group, 1).flatten(1)]

    reference.register_forward_pre_hook(begin, with_kwargs=True)
    for index in LAYERS:
        reference.model.layers[index].self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0] + values[0],))
