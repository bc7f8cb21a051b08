"""The model card that a node sends the router: name, limits, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, cast

import xxhash

from ..metadata.errors import ModelError
from ..metadata.wire.membership import TokenizerFile
from ..metadata.wire.node_info import ModelCard
from .model_config import ModelConfig

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_card(model_dir: Path, config: ModelConfig, name: str, context_len: int) -> ModelCard:
    """Raises ModelError when tokenizer.json is missing or one of the files is no JSON object."""
    tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
    generation = _read_json(model_dir / "generation_config.json")
    return ModelCard(
        name=name,
        context_len=context_len,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(config.eos_token_ids),
        bos_token_id=config.bos_token_id,
        tokenizer_digest=xxhash.xxh3_128_hexdigest(_tokenizer_bytes(model_dir)),
        chat_template=_chat_template(model_dir, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        defaults=_defaults(generation),
    )


def read_tokenizer(model_dir: Path) -> TokenizerFile:
    """tokenizer.json as it travels."""
    data = _tokenizer_bytes(model_dir)
    return TokenizerFile(digest=xxhash.xxh3_128_hexdigest(data), data=zlib.compress(data, 1))


def _tokenizer_bytes(model_dir: Path) -> bytes:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{model_dir} has no tokenizer.json: save the model's fast tokenizer there (save_pretrained)")
    return path.read_bytes()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds a {type(fields).__name__}, not a JSON object; copy the checkpoint again")
    return cast(dict[str, Any], fields)


def _chat_template(model_dir: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # older files: [{"name": "default", "template": "..."}, ...]
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIALS:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _DEFAULTS:
        value = generation.get(name)
        if isinstance(value, int | float):
            found[name] = float(value)
    return found
