"""Reading of a checkpoint's config.json. Settings that Baton would compute wrongly are refused here by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ..metadata.errors import ModelError
from ..metadata.handoff.hidden_layout import spec_hidden_size
from .rope import ROPE_TYPES, RopeConfig, RopeType, yarn_attention_factor
from .text_tensors import TEXT_MODELS

_OF_THE_WHOLE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
_NUM_EXPERTS = ("num_experts", "num_local_experts")  # both spellings of one key
CheckpointDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences between the model families."""

    qkv_bias: bool | None  # None: config.json's attention_bias decides
    qk_norm: bool
    window: Literal["refused", "all_layers", "by_layer"]
    needs: tuple[str, ...] = ()  # keys whose default differs between versions, so that it must not be guessed
    has_streams: bool = False  # hc_mult residual streams (hyper-connections)
    hands_over_collapsed: bool = False  # it has streams, but drafters get the one state that they collapse to
    has_experts: bool = False


FAMILIES = {
    "LlamaForCausalLM": _Family(qkv_bias=None, qk_norm=False, window="refused"),
    "MistralForCausalLM": _Family(
        qkv_bias=False, qk_norm=False, window="all_layers", needs=("num_key_value_heads", "sliding_window")
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, qk_norm=False, window="by_layer", needs=("num_key_value_heads",)),
    "Qwen3ForCausalLM": _Family(
        qkv_bias=None, qk_norm=True, window="by_layer", needs=("num_key_value_heads", "head_dim")
    ),
    "Qwen3MoeForCausalLM": _Family(
        qkv_bias=None,
        qk_norm=True,
        window="refused",
        needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        has_experts=True,
    ),
    "HyperLlamaForCausalLM": _Family(qkv_bias=None, qk_norm=False, window="refused", has_streams=True),
}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a model."""

    num_experts: int
    num_active: int  # experts of a token
    inner_size: int  # hidden units of an expert
    norm_topk_prob: bool  # the weights of a token's experts sum to one
    layers: tuple[int, ...]  # layers with experts; the others are dense


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool  # q, k and v projections have biases
    attention_bias: bool  # the attention's output projection has one
    mlp_bias: bool
    qk_norm: bool  # q and k are normalised per head before rotation
    sliding_window: tuple[int | None, ...]  # per layer: a query sees this many positions, itself included; None: all
    checkpoint_dtype: CheckpointDtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hc_mult: int = 1  # residual streams; 1 where config.json says none, null, 0 or 1
    hands_over_collapsed: bool = False  # the family has streams and hands the collapsed state to drafters
    experts: ExpertsConfig | None = None

    @property
    def spec_hidden_size(self) -> int:
        """Width of all residual streams side by side; with one stream, `hidden_size`."""
        return spec_hidden_size(self.hidden_size, self.hc_mult)

    @property
    def handoff_hidden_size(self) -> int:
        """Width of the state that the target hands to a drafter: all streams, or the state that they collapse to."""
        return self.hidden_size if self.hands_over_collapsed else self.spec_hidden_size

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values are as wide)."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_products(self) -> int:
        """Number of weights in the matrices of one layer by which a token is multiplied."""
        qkv = self.hidden_size * (self.q_size + 2 * self.kv_size)
        experts = self.experts
        inner_size = self.intermediate_size if experts is None else experts.num_active * experts.inner_size
        return qkv + self.q_size * self.hidden_size + 3 * self.hidden_size * inner_size

    @classmethod
    def from_dir(cls, path: Path, architecture: str | None = None) -> ModelConfig:
        """Read `path`/config.json, and generation_config.json if there is one. `architecture` replaces the one in the
        file: published draft heads use many names.

        Raises ModelError, naming the value and what to do, for a directory or file that is missing or damaged, and for
        every architecture or feature that Baton does not compute."""
        path = Path(path)
        if not path.is_dir():
            raise ModelError(f"model directory {path} does not exist; give one with config.json and *.safetensors")
        raw = _RawConfig(path / "config.json", architecture)
        family = _check_supported(raw)
        num_heads = raw.integer("num_attention_heads")
        hidden_size = raw.integer("hidden_size")
        num_kv_heads = raw.integer("num_key_value_heads", num_heads)
        head_dim = raw.integer("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise raw.error("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
        if head_dim % 2:
            raise raw.error("head_dim", "is odd, and rotary embeddings turn pairs", value=head_dim)
        attention_bias = raw.flag("attention_bias") if family.qkv_bias is None else False
        rope = _rope(raw)
        return cls(
            architecture=raw.architecture,
            vocab_size=raw.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=raw.integer("intermediate_size"),
            num_layers=raw.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_len=_context_len(raw, rope),
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=raw.flag("tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            attention_bias=attention_bias,
            mlp_bias=raw.flag("mlp_bias") if raw.architecture.endswith("LlamaForCausalLM") else False,
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(raw, family),
            checkpoint_dtype=_checkpoint_dtype(raw),
            eos_token_ids=_eos_token_ids(raw, path / "generation_config.json"),
            bos_token_id=raw.integer("bos_token_id", minimum=0) if raw.get("bos_token_id") is not None else None,
            hc_mult=_hc_mult(raw, family),
            hands_over_collapsed=family.hands_over_collapsed,
            experts=_experts(raw) if family.has_experts else None,
        )


class _RawConfig:
    """One JSON object on disk, read with typed getters whose errors name file, key and value. If it describes a text
    model inside a larger one, in `text_config`, the getters read that."""

    def __init__(self, path: Path, architecture: str | None = None) -> None:
        self.path = path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; a model directory holds {path.name}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not readable JSON ({error}); copy the checkpoint again") from None
        if not isinstance(raw, dict):
            raise ModelError(f"{path} holds a {type(raw).__name__}, not a JSON object; copy the checkpoint again")
        self._raw = cast(dict[str, Any], raw)
        text = self._raw.get("text_config")
        self._text = cast(dict[str, Any], text) if isinstance(text, dict) else None
        if self._text is not None:
            self._raw = _text_fields(self._raw, self._text)
        architectures = self._raw.get("architectures")
        first: Any = cast(list[Any], architectures)[0] if isinstance(architectures, list) and architectures else None
        self.architecture = architecture or (first if isinstance(first, str) else "")

    @property
    def is_inside_another(self) -> bool:
        """Whether the text model is part of a larger one."""
        return self._text is not None

    def get(self, key: str) -> Any:
        """Return the value, or None if it is null or absent."""
        return self._raw.get(key)

    def has(self, key: str) -> bool:
        return key in self._raw

    def error(self, key: str, what: str, *, value: Any = None) -> ModelError:
        where = "text_config." if self._text is not None and key in self._text else ""
        return ModelError(f"{self.path}: {where}{key} = {self.get(key) if value is None else value!r} {what}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"must be a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float) -> float:
        return _positive(self, key, default if self.get(key) is None else self.get(key))

    def flag(self, key: str) -> bool:
        value = False if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value


def _text_fields(outer: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, with those that a wrapper states for the whole model."""
    fields = dict(text)
    for key in _OF_THE_WHOLE:
        if fields.get(key) is None and key in outer:
            fields[key] = outer[key]
    if isinstance(outer.get("tie_word_embeddings"), bool):  # the wrapper owns the head
        fields["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return fields | {"architectures": [TEXT_MODELS.get(str(text.get("model_type")))]}


def _positive(raw: _RawConfig, key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise raw.error(key, "must be a positive number", value=value)
    return float(value)


def _check_supported(raw: _RawConfig) -> _Family:
    family = FAMILIES.get(raw.architecture)
    if family is None and raw.is_inside_another:
        raise raw.error("model_type", f"is not served; Baton serves the text models {', '.join(TEXT_MODELS)}")
    if family is None:
        raise raw.error("architectures", f"is not served; Baton serves {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise raw.error("quantization_config", "is not served; use the checkpoint in bfloat16, float16 or float32")
    if raw.get("hidden_act") not in (None, "silu"):
        raise raw.error("hidden_act", "is not served; only silu is")
    for key in _NUM_EXPERTS:
        if raw.get(key) and not family.has_experts:
            raise raw.error(key, f"is not served for {raw.architecture}; use a dense checkpoint")
    for key in family.needs:
        if not raw.has(key):
            raise ModelError(f"{raw.path}: {key} is missing, and its default is not certain; write it into the file")
    return family


def _experts(raw: _RawConfig) -> ExpertsConfig:
    num_layers = raw.integer("num_hidden_layers")
    num_experts = raw.integer(next((key for key in _NUM_EXPERTS if raw.has(key)), _NUM_EXPERTS[0]))
    num_active = raw.integer("num_experts_per_tok")
    if num_active > num_experts:
        raise raw.error("num_experts_per_tok", f"is more than there are experts ({num_experts})")
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.error("mlp_only_layers", "must be a list of layer numbers")
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    inner_size = raw.integer("moe_intermediate_size")
    return ExpertsConfig(num_experts, num_active, inner_size, raw.flag("norm_topk_prob"), layers)


def _rope(raw: _RawConfig) -> RopeConfig:
    """Read rotary settings in both spellings: `rope_parameters`, or `rope_scaling` with `rope_theta` beside it."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    fields = raw.get(key) or {}
    if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
        raise raw.error(key, "is not served: one set of rotary parameters for all layers is")
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise raw.error("partial_rotary_factor", "is not served; only 1.0 is", value=partial)
    rope_type = fields.get("rope_type", fields.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise raw.error(f"{key}.rope_type", f"is not served; one of {', '.join(ROPE_TYPES)} is", value=rope_type)

    def number(name: str, default: float | None = None) -> float:
        value = fields.get(name)
        return _positive(raw, f"{key}.{name}", default if value is None else value)

    theta = number("rope_theta", raw.number("rope_theta", 10_000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, number("factor"))
    original = int(number("original_max_position_embeddings", raw.integer("max_position_embeddings")))
    if rope_type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise raw.error(f"{key}.high_freq_factor", f"must be above low_freq_factor ({low})", value=high)
        return RopeConfig(cast(RopeType, rope_type), theta, number("factor"), original, low, high)
    factor = number("factor")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=fields.get("truncate", True) is not False,
        attention_factor=number(
            "attention_factor", yarn_attention_factor(factor, fields.get("mscale"), fields.get("mscale_all_dim"))
        ),
    )


def _hc_mult(raw: _RawConfig, family: _Family) -> int:
    """Return the number of residual streams; null, 0 and 1 mean one."""
    hc_mult = raw.integer("hc_mult", 1, minimum=0)
    if hc_mult > 1 and not family.has_streams:
        raise raw.error("hc_mult", f"is not served for {raw.architecture}, which has one residual stream")
    return max(1, hc_mult)


def _context_len(raw: _RawConfig, rope: RopeConfig) -> int:
    """Return max_position_embeddings, or the length that yarn stretches it to: some checkpoints state only the original
    length."""
    stated = raw.integer("max_position_embeddings")
    return max(stated, int(rope.original_context_len * rope.factor)) if rope.rope_type == "yarn" else stated


def _sliding_window(raw: _RawConfig, family: _Family) -> tuple[int | None, ...]:
    num_layers = raw.integer("num_hidden_layers")
    window = raw.integer("sliding_window") if raw.get("sliding_window") is not None else None
    layer_types = raw.get("layer_types")
    if family.window == "by_layer":
        window = window if raw.flag("use_sliding_window") else None
        first = raw.integer("max_window_layers", 28, minimum=0)
        windows = tuple(window if layer >= first else None for layer in range(num_layers))
        return windows if layer_types is None else _by_layer_types(raw, layer_types, window, num_layers)
    if family.window == "refused" and window is not None:
        raise raw.error("sliding_window", f"is not served for {raw.architecture}; set it to null if it is not meant")
    windows = (window,) * num_layers
    if layer_types is not None and _by_layer_types(raw, layer_types, window, num_layers) != windows:
        raise raw.error("layer_types", f"is not served for {raw.architecture}: all layers must be alike")
    return windows


def _by_layer_types(raw: _RawConfig, layer_types: Any, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise raw.error("layer_types", f"must list {num_layers} layers")
    if any(layer_type not in ("full_attention", "sliding_attention") for layer_type in layer_types):
        raise raw.error("layer_types", "is not served; full_attention and sliding_attention are")
    if "sliding_attention" in layer_types and window is None:
        raise raw.error("layer_types", "has sliding_attention but no sliding window is switched on")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _checkpoint_dtype(raw: _RawConfig) -> CheckpointDtype:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    dtype = raw.get(key) or "float32"
    if dtype not in get_args(CheckpointDtype):
        raise raw.error(key, f"is not served; one of {', '.join(get_args(CheckpointDtype))} is")
    return dtype


def _eos_token_ids(raw: _RawConfig, generation_config: Path) -> tuple[int, ...]:
    """Return the ids that end a text. Chat models have several, which generation_config.json lists; config.json is the
    fallback."""
    source = raw
    if generation_config.exists():
        generation = _RawConfig(generation_config)
        source = generation if generation.get("eos_token_id") is not None else raw
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise source.error("eos_token_id", "must be a token id or a list of them")
    return tuple(ids)
