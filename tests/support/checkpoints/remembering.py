"""A Llama that remembers: a made-up family with a pool beside that of its KV.

Some layers store the first numbers of each token's normed input in the pool "memory". To the attended values of every
head they add

    sum over seen tokens of cos(0.7 * place) * row,   place: 0 for the first token that is seen, 1 for the next ...

So a row that is lost, stale, damaged, moved wrongly or shifted by one token changes the output.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import RANK_CONTEXT
from torch import Tensor

from baton.engine.attention.context import AttentionContext
from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.model_config import Further, ModelConfig
from baton.engine.checkpoint.weights import Weights
from baton.engine.layers.attention import Attention
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.families import FAMILIES
from baton.engine.models.family import ModelFamily
from baton.engine.models.llama import read_attention, read_layer, read_model
from baton.engine.products.linear import Linear

MEMORY = "memory"
ARCHITECTURE = "RememberingLlamaForCausalLM"
LAYERS = (0, 2)  # that remember, of three


@dataclass(frozen=True, slots=True, eq=False)
class Remembering:
    """A `SelfAttention` that adds what it remembers."""

    inner: Attention
    place: int
    width: int

    @property
    def reader(self) -> Linear:
        return self.inner.reader

    @property
    def out(self) -> Linear:
        return self.inner.out

    def __call__(self, normed: Any, context: AttentionContext) -> Tensor:
        rows = context.further
        rows.store(MEMORY, self.place, normed[:, : self.width])
        attended = self.inner(normed, context)
        of_heads = attended.unflatten(1, (-1, self.width))  # the heads of this rank
        for seen in rows.sequences(MEMORY, self.place):
            of_heads[seen.tokens] += remembered(seen.stored, seen.is_seen).unsqueeze(1)
        return attended


def remembered(stored: Tensor, is_seen: Tensor) -> Tensor:
    """Return what each token adds, [num_tokens, width], of rows [num_rows, width]. `is_seen` is [num_tokens,
    num_rows]."""
    places = is_seen.long().cumsum(1) - 1
    return (0.7 * places).cos().where(is_seen, 0.0) @ stored


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family(ModelFamily):
    @property
    def read(self) -> Callable[[ModelConfig, Weights], DecoderModel]:
        return _read


def _read(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for i in range(config.num_layers):
        prefix, place = f"model.layers.{i}", config.place(MEMORY, i)
        attention = read_attention(config, weights, f"{prefix}.self_attn", i, config.hidden_size)
        own = attention if place is None else Remembering(attention, place, config.head_dim)
        layers.append(read_layer(config, weights, prefix, i, attention=own))
    return read_model(config, weights, layers)


def _read_further(raw: ConfigFile) -> tuple[Further, ...]:
    return (Further(MEMORY, LAYERS, width=raw.integer("head_dim")),)


@contextmanager
def served(_: str = "") -> Iterator[None]:
    """Serve the family in this process, and in the ranks that it starts."""
    family = _Family(architecture=ARCHITECTURE, model_type="llama", reader="", read_further=_read_further)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, ARCHITECTURE, family)
        patch.setenv(RANK_CONTEXT, "remembering served _")
        yield


def remembering(llama: Path, directory: Path) -> Path:
    """Write a Llama of three layers as one that remembers."""
    shutil.copytree(llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURE]}))
    return directory


@torch.inference_mode()
def recomputed(llama: Path, token_ids: list[int]) -> Tensor:
    """Return the logits of a whole text, [num_tokens, vocab_size], by transformers' Llama."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama).eval()
    num_tokens, width = len(token_ids), model.config.head_dim
    is_seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for index in LAYERS:
        layer, found = model.model.layers[index], []
        layer.input_layernorm.register_forward_hook(lambda *args, found=found: found.append(args[2][0, :, :width]))
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args, found=found: (
                args[0] + remembered(found.pop(), is_seen).repeat(1, args[0].shape[2] // width),
            )
        )
    return model(torch.tensor([token_ids])).logits[0]
