"""A model that remembers: a made-up family with a pool beside those of its KV. Another family is its base: Llama, or
MiMo-V2-Flash, which has four pools of KV.

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
from dataclasses import dataclass, fields, replace
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
from baton.engine.layers.decoder import DecoderBody, SelfAttention
from baton.engine.models.decoder import DecoderModel, DecoderStack
from baton.engine.models.families import FAMILIES
from baton.engine.models.family import ModelFamily
from baton.engine.products.linear import Linear

MEMORY = "memory"
ARCHITECTURE = "RememberingForCausalLM"
LAYERS = (0, 2)  # that remember, of three


@dataclass(frozen=True, slots=True, eq=False)
class Remembering:
    """A `SelfAttention` that adds what it remembers."""

    inner: SelfAttention
    place: int
    width: int

    @property
    def reader(self) -> Linear | None:
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
        base = next(each for each in FAMILIES.values() if each.reader == self.reader and each is not self)
        return lambda config, weights: _remembering(base.read(config, weights), config)


def _remembering(model: DecoderModel, config: ModelConfig) -> DecoderModel:
    def body(index: int, inner: DecoderBody) -> DecoderBody:
        place = config.place(MEMORY, index)
        width = config.value_dim or config.head_dim
        return inner if place is None else replace(inner, attention=Remembering(inner.attention, place, width))

    stack = model.stack
    assert isinstance(stack, DecoderStack), stack
    layers = tuple(replace(layer, body=body(index, layer.body)) for index, layer in enumerate(stack.layers))
    model.stack = replace(stack, layers=layers)
    return model


def _read_further(raw: ConfigFile) -> tuple[Further, ...]:
    return (Further(MEMORY, LAYERS, width=raw.integer("v_head_dim" if raw.has("v_head_dim") else "head_dim")),)


@contextmanager
def served(base: str = "llama") -> Iterator[None]:
    """Serve the family in this process, and in the ranks that it starts. `base`: the model_type of the other one."""
    of_base = next(each for each in FAMILIES.values() if each.model_type == base)
    inherited = {each.name: getattr(of_base, each.name) for each in fields(of_base)}
    family = _Family(**inherited | {"architecture": ARCHITECTURE, "read_further": _read_further})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, ARCHITECTURE, family)
        patch.setenv(RANK_CONTEXT, f"remembering served {base}")
        yield


def remembering(base: Path, directory: Path) -> Path:
    """Write a model of three layers as one that remembers."""
    shutil.copytree(base, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURE]}))
    return directory


@torch.inference_mode()
def recomputed(base: Path, token_ids: list[int]) -> Tensor:
    """Return the logits of a whole text, [num_tokens, vocab_size], by the base's class in transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    num_tokens, width = len(token_ids), getattr(model.config, "v_head_dim", model.config.head_dim)
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
