"""The model card that a node sends the router: name, limits, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, cast

import msgspec
import tokenizers
import xxhash

from ...metadata.errors import ModelError
from ...metadata.wire.membership import TokenizerFile
from ...metadata.wire.node_info import MAX_SPECIAL_TOKENS, ModelCard
from ...metadata.wire.request import FROM_CHECKPOINT, SamplingParams
from .model_config import ModelConfig
from .tokenizer_file import tokenizer_bytes

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_card(model_dir: Path, config: ModelConfig, name: str, context_len: int) -> ModelCard:
    """Return the card. Raises ModelError when tokenizer.json is missing, when one of the files is no JSON object, or
    when the router or a node would refuse one of the values."""
    tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
    for token_id in config.eos_token_ids:
        if token_id >= config.vocab_size:
            raise ModelError(
                f"{model_dir}: eos_token_id {token_id} is outside the vocabulary (size {config.vocab_size}); correct "
                "it in generation_config.json, or in config.json if it is not there"
            )
    card = ModelCard(
        name=name,
        context_len=context_len,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(config.eos_token_ids),
        bos_token_id=config.bos_token_id,
        tokenizer_digest=_tokenizer_digest(model_dir),
        chat_template=_chat_template(model_dir, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        defaults=_defaults(model_dir / "generation_config.json"),
    )
    return _checked(card, model_dir)


def read_tokenizer(model_dir: Path) -> TokenizerFile:
    """Return tokenizer.json with its digest, compressed for the message to the router."""
    data = tokenizer_bytes(model_dir)
    return TokenizerFile(digest=xxhash.xxh3_128_hexdigest(data), data=zlib.compress(data, 1))


def _tokenizer_digest(model_dir: Path) -> str:
    """Return the digest of tokenizer.json. Raises ModelError for a file that the router could not read."""
    data = tokenizer_bytes(model_dir)
    try:
        tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{model_dir}/tokenizer.json cannot be read ({error}); copy the checkpoint again") from None
    return xxhash.xxh3_128_hexdigest(data)


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


def _chat_template(model_dir: Path, tokenizer_config: dict[str, Any]) -> Any:
    """Return the chat template, chosen as transformers chooses it: files come before tokenizer_config.json.

    A processor's template counts if there is no other.
    """
    files = {"default": model_dir / "chat_template.jinja"}
    files.update({path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))})
    named = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if named:
        return _of_named(named)
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(model_dir / "chat_template.json").get("chat_template")
    if not isinstance(template, list):
        return template
    entries = cast(list[Any], template)  # older files: [{"name": "default", "template": "..."}, ...]
    dicts = [cast(dict[str, Any], entry) for entry in entries if isinstance(entry, dict)]
    return _of_named({str(entry.get("name")): entry.get("template") for entry in dicts})


def _of_named(templates: dict[str, Any]) -> Any:
    """Return one template for all named ones: `tool_use` writes conversations with tools, `default` the others.

    Others, such as `rag`, are never chosen. None: there is neither.
    """
    default, tool_use = templates.get("default"), templates.get("tool_use")
    if not isinstance(tool_use, str):
        return default if tool_use is None else tool_use
    if default is None:
        default = "{{ raise_exception('the model has a chat template for conversations with tools alone') }}"
    if not isinstance(default, str):
        return default
    # A line end after the first block of each is taken away by jinja2, as the one at the end of a whole template.
    begin, other, end = "{% if tools is not none %}\n", "{{ '' }}{% else %}\n", "{{ '' }}{% endif %}"
    return begin + tool_use.removesuffix("\n") + other + default.removesuffix("\n") + end


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 ({error}); copy the checkpoint again") from None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens: the usual ones, then those that only this model has."""
    own = {name: value for name, value in tokenizer_config.items() if name.endswith("_token")}
    extra = tokenizer_config.get("extra_special_tokens")
    if isinstance(extra, dict):
        own |= cast(dict[str, Any], extra)
    tokens: dict[str, str] = {}
    for name in (*_SPECIALS, *own):
        value = own.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = cast(dict[str, Any], value).get("content")
        if isinstance(value, str) and len(tokens) < MAX_SPECIAL_TOKENS:
            tokens[name] = value
    return tokens


def _defaults(path: Path) -> dict[str, float]:
    generation = _read_json(path)
    found: dict[str, float] = {}
    for name in FROM_CHECKPOINT:
        value = generation.get(name)
        if not isinstance(value, int | float):
            continue
        found[name] = float(value)
        number = max(0, int(value)) if name == "top_k" and math.isfinite(value) else found[name]  # -1: off
        try:
            msgspec.convert({"max_tokens": 1, name: number}, SamplingParams)
        except msgspec.ValidationError as error:
            bound = str(error).partition(" - at ")[0]
            raise ModelError(
                f"{path}: {name} = {value} cannot be served ({bound}); correct it, or take it out"
            ) from None
    return found


def _checked(card: ModelCard, model_dir: Path) -> ModelCard:
    """Return the card if a router can read it. A router drops a message with a value that is too long."""
    try:
        return msgspec.convert(msgspec.structs.asdict(card), ModelCard)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        hint = "; give the model a shorter name with --model-name" if place == "name`" else ""
        raise ModelError(f"{model_dir}: the router cannot take the model's {place.rstrip('`')}: {what}{hint}") from None
