"""The check of the model that a node is to load, before anything big is imported or started. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ...metadata.errors import ConfigError, ModelError
from ..config import EngineConfig
from ..drafters.algorithm import find_drafter, settle
from ..ranks.shares import check_shares
from .model_config import ModelConfig
from .model_files import check_directory
from .quantization import chosen
from .read_config import read_model_config

FILES = "safetensors"  # value of --load-format; with others the weights are made
DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def resolve_model(model: str | None) -> Path:
    """Return the checkpoint directory; None is the demo model that ships with Baton."""
    return DEMO if model is None else Path(model).expanduser()


def check_model(config: EngineConfig) -> None:
    """Raise ConfigError or ModelError, saying what to do, if the model or the drafter cannot be loaded, as far as
    config.json and the names and headers of the files tell."""
    model_dir = resolve_model(config.model)
    needs_weights = config.load_format == FILES
    _check("--model", model_dir, needs_weights=False, needs_tokenizer=False)
    model = read_model_config(model_dir)
    _check("--model", model_dir, needs_weights=needs_weights, needs_tokenizer=True)
    chosen(model.quantization, config.quantization)
    longest_context(config, model)
    model.pool("float32", config.kv_dtype)
    check_shares(model, config.num_ranks, model.architecture, has_all_heads=config.dp_attention > 1)
    drafter = find_drafter(settle(config, model_dir), model_dir)
    if drafter is not None and drafter != model_dir:
        _check("--draft-model", drafter, needs_weights=needs_weights, needs_tokenizer=False)


def longest_context(config: EngineConfig, model: ModelConfig) -> int:
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
