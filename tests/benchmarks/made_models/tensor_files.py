"""The files of a synthetic checkpoint: configuration, weights in shards, tokenizer; and the noise to fill them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config

SHARD_BYTES = 4 << 30
_SHARED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None}

Named = Iterable[tuple[str, Tensor]]


def write_config(directory: Path, fields: dict[str, Any], architecture: str | None = None) -> ModelConfig:
    """Write config.json and return it as `architecture` reads it. Raises ModelError if Baton cannot compute it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_SHARED | fields, indent=2) + "\n")
    return read_model_config(directory, architecture)


def standard_normal(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Draw float32 noise that depends on name, shape and seed, not on the tensors drawn before."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
    return torch.randn(tuple(shape), generator=generator, device=device)


def write_shards(directory: Path, tensors: Named, shard_bytes: int = SHARD_BYTES) -> None:
    """Write model-*.safetensors of at most `shard_bytes` each (a larger tensor gets its own file), and their index."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(tensors, shard_bytes), 1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=2) + "\n")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer with the words `t0`, `t1`, ...; every other word is read as `t0`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


def _shards(tensors: Named, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held = sum(each.nbytes for each in shard.values())
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.cpu().contiguous()
    yield shard
