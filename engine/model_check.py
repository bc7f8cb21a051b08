"""The check of the model that a node is to load, before anything big is imported or started. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ..kernels.formats import BLOCK
from ..metadata.errors import ConfigError, ModelError
from .config import EngineConfig
from .drafters.choice import find_drafter, settle
from .model_config import ModelConfig
from .model_files import check_directory
from .models.read_config import read_model_config
from .quantization import chosen

FILES = "safetensors"  # value of --load-format; with others the weights are made
DEMO = Path(__file__).parent.parent / "deploy" / "demo"


def resolve_model(model: str | None) -> Path:
    """Return the checkpoint directory; None is the demo model that ships with Baton."""
    return DEMO if model is None else Path(model).expanduser()


def check_model(config: EngineConfig) -> None:
    """Raise ConfigError or ModelError, saying what to do, if the model or the drafter cannot be loaded, as far as
    config.json and the names and headers of the files tell."""
    model_dir = resolve_model(config.model)
    needs_weights = config.load_format == FILES
    _check("--model", model_dir, needs_weights=needs_weights, needs_tokenizer=True)
    model = read_model_config(model_dir)
    chosen(model.quantization, config.quantization)
    context_len(config, model)
    model.pool("float32", config.kv_dtype)
    check_shares(model, config.num_ranks, model.architecture, has_all_heads=config.dp_attention > 1)
    drafter = find_drafter(settle(config, model_dir), model_dir)
    if drafter is not None and drafter != model_dir:
        _check("--draft-model", drafter, needs_weights=needs_weights, needs_tokenizer=False)


def context_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence that a node takes. Raises ConfigError if the model takes no such length."""
    if config.context_len is None:
        return model.context_len
    if not 1 <= config.context_len <= model.context_len:
        raise ConfigError(f"context_len {config.context_len} is out of range: the model takes 1 to {model.context_len}")
    return config.context_len


def _check(flag: str, model_dir: Path, *, needs_weights: bool, needs_tokenizer: bool) -> None:
    try:
        check_directory(model_dir, needs_weights=needs_weights, needs_tokenizer=needs_tokenizer)
    except ModelError as error:
        is_of_directory = str(error).startswith((f"{model_dir} ", f"{model_dir}:"))
        raise ModelError(f"{flag} {error}" if is_of_directory else str(error)) from None


def check_shares(config: ModelConfig, size: int, model: str, *, has_all_heads: bool = False) -> None:
    """Raise ConfigError, which calls the model `model`, if `size` ranks cannot have equal shares of its layers.
    `has_all_heads`: each rank has all heads."""
    counts = {} if has_all_heads else {"query heads": config.num_heads}
    counts["hidden units"] = config.intermediate_size
    if config.experts is not None:
        counts["hidden units of an expert"] = config.experts.inner_size
    for what, count in counts.items():
        if count % size:
            flag = "--dp-attention" if has_all_heads else "--tp"
            raise ConfigError(f"{model} has {count} {what}, which {size} ranks cannot divide; let {flag} be a divisor")
    _check_quantization(config, size, model, has_all_heads=has_all_heads)
    num_kv_heads = config.num_kv_heads
    if not has_all_heads and num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"{model} has {num_kv_heads} KV heads, which {size} ranks cannot share; let --tp be a divisor or a multiple"
        )


def _check_quantization(config: ModelConfig, size: int, model: str, *, has_all_heads: bool) -> None:
    """Raise ConfigError if ranks would round other rows than one rank does."""
    quantization = config.quantization
    if quantization is None or size == 1:
        return
    if quantization.weight_scale == "blocks":
        widths = {"hidden units": config.intermediate_size // size}
        if config.experts is not None:
            widths["hidden units of an expert"] = config.experts.inner_size // size
            widths["hidden units for all tokens"] = config.experts.shared_size // size
        if not has_all_heads:
            widths |= _head_widths(config, size)
        for what, width in widths.items():
            if width % BLOCK:
                raise ConfigError(
                    f"{model} has FP8 scales for blocks of {BLOCK}; {size} ranks would have {width} {what} each, which "
                    "cuts a block; use fewer ranks"
                )


def _head_widths(config: ModelConfig, size: int) -> dict[str, int]:
    """Return the numbers of heads that one of `size` ranks has, which are rows and columns of its weights."""
    latent = config.latent
    if latent is None:
        of_kv = config.kv_size // min(size, config.num_kv_heads)
        return {"numbers of query heads": config.q_size // size, "numbers of KV heads": of_kv}
    num_heads = config.num_heads // size
    return {
        "numbers of query heads": num_heads * (latent.plain_dim + latent.rope_dim),
        "numbers of keys and values": num_heads * (latent.plain_dim + latent.value_dim),
        "numbers of values": num_heads * latent.value_dim,
    }
