"""Reading of a checkpoint's config.json. Settings that Baton would compute wrongly are refused here by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from ...metadata.errors import ModelError
from ..models.families import FAMILIES
from ..models.family import NUM_EXPERTS, ModelFamily
from .config_fields import CLASS_DEFAULTS, THETAS, refuse_unknown_fields
from .config_file import TEXT, ConfigFile, Fields
from .model_config import (
    ROPE_TYPES,
    CheckpointDtype,
    CompressedConfig,
    DeltaConfig,
    Further,
    Gemma4Config,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    RopeType,
    WindowConfig,
    yarn_attention_factor,
)
from .model_files import all_stored_tensors
from .quantization import read_quantization
from .read_attention import global_heads

_FLOATS: dict[str, CheckpointDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # first: without files
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")  # the name of transformers, and its older one
_WITH_MROPE = ("qwen2_vl_text", "qwen2_5_vl_text")  # images have positions of their own; those of text are plain


def read_model_config(path: Path, architecture: str | None = None) -> ModelConfig:
    """Read `path`/config.json, and generation_config.json if there is one. `architecture` replaces the one in the
    file: published draft heads use many names. Their further fields are not checked: a draft changes no text.

    Raises ModelError, naming the value and what to do, for a directory or file that is missing or damaged, and for
    every architecture, feature or field that Baton does not compute."""
    path = Path(path)
    raw, family = _open(path, architecture)
    raw.integer("num_nextn_predict_layers", 0, minimum=0)  # a drafter is chosen by it, without a check
    heads = _attention_heads(raw, family)
    delta = None if family.read_delta is None else family.read_delta(raw)
    attention_bias = raw.flag("attention_bias") if family.qkv_bias is None else False
    rope = _rope(raw, family)
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=raw.integer("num_attention_heads"),
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        context_len=_context_len(raw, rope),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=_is_tied(raw, path),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_bias=attention_bias and family.has_out_bias,
        mlp_bias=raw.flag("mlp_bias") if family.may_have_mlp_bias else False,
        qk_norm=raw.flag(family.qk_norm) if isinstance(family.qk_norm, str) else family.qk_norm,
        sliding_window=_sliding_window(raw, family),
        checkpoint_dtype=_checkpoint_dtype(raw, path if architecture is None else None),
        eos_token_ids=_eos_token_ids(raw, path / "generation_config.json"),
        bos_token_id=raw.integer("bos_token_id", minimum=0) if raw.get("bos_token_id") is not None else None,
        hc_mult=_hc_mult(raw, family),
        hands_over_collapsed=family.hands_over_collapsed,
        experts=None if family.read_experts is None else family.read_experts(raw),
        quantization=read_quantization(raw, path, family.scale_name, may_pack_experts=family.may_pack_experts),
        rotary_dim=_rotary_dim(raw, family, rope, heads.head_dim),
        has_wide_norms=family.has_wide_norms,
        latent=heads.latent,
        has_sinks=family.has_sinks,
        index=None if family.read_index is None else family.read_index(raw),
        norm_offset=family.norm_offset,
        score_scale=_score_scale(raw, family),
        window=heads.window,
        gemma4=heads.gemma4,
        softcap=_softcap(raw, family),
        value_scale=1.0 if family.value_dim is None else raw.number("attention_value_scale", 1.0),
        predicts_in_window=family.predicts_in_window,
        value_dim=None if family.value_dim is None else family.value_dim(raw, heads.head_dim),
        compressed=_compressed(raw, family),
        further=_further(raw, family, delta),
        delta=delta,
        has_output_gate=family.has_output_gate,
    )
    _check_blocks(raw, family, config)
    if architecture is None:
        refuse_unknown_fields(raw, family)
    return config


def _check_blocks(raw: ConfigFile, family: ModelFamily, config: ModelConfig) -> None:
    """Refuse FP8 blocks that heads cut, unless the family orders the outputs of the product instead of its rows."""
    if config.has_cut_heads and family.value_dim is None and not config.has_output_gate:
        raise raw.error(
            "quantization_config",
            f"scales blocks of 128 rows, which heads of {config.head_dim} numbers cut; use a checkpoint in 16 bits",
            value="fp8",
        )


def _further(raw: ConfigFile, family: ModelFamily, delta: DeltaConfig | None) -> tuple[Further, ...]:
    """Return the pools beside that of KV."""
    if family.read_further is not None:
        return family.read_further(raw)
    return () if delta is None else delta.further


def _open(path: Path, architecture: str | None) -> tuple[ConfigFile, ModelFamily]:
    """Return config.json, with the fields as transformers' class names them, and its family."""
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist; give one with config.json and *.safetensors")
    raw = ConfigFile(path / "config.json")
    family = _family(raw, architecture)
    if architecture is None and raw.model_type in family.text_types:
        raw.fill(CLASS_DEFAULTS.get(raw.model_type, {}))
    if family.respell is not None:
        family.respell(raw)
    _check_supported(raw, family)
    return raw, family


class _Heads(NamedTuple):
    """Heads of layers without a window, or of all layers, and the parts that say how other layers differ."""

    num_kv_heads: int
    head_dim: int
    latent: LatentConfig | None
    window: WindowConfig | None
    gemma4: Gemma4Config | None


def _attention_heads(raw: ConfigFile, family: ModelFamily) -> _Heads:
    num_heads = raw.integer("num_attention_heads")
    latent = None if family.read_latent is None else family.read_latent(raw)
    if latent is None:
        num_kv_heads, head_dim = _heads(raw, num_heads, raw.integer("hidden_size"))
    else:
        num_kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    of_window = family.window_head_factor * num_kv_heads, head_dim
    gemma4 = None if family.read_gemma4 is None else family.read_gemma4(raw)
    if gemma4 is not None:
        num_kv_heads, head_dim = global_heads(raw, num_kv_heads, head_dim)
        _check_heads(raw, num_heads, num_global_key_value_heads=num_kv_heads, global_head_dim=head_dim)
    window = _window(raw, family, of_window, has_pool=of_window != (num_kv_heads, head_dim))
    return _Heads(num_kv_heads, head_dim, latent, window, gemma4)


def _heads(raw: ConfigFile, num_heads: int, hidden_size: int) -> tuple[int, int]:
    """Return the number of KV heads and the width of a head."""
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    head_dim = raw.integer("head_dim", hidden_size // num_heads)
    _check_heads(raw, num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim)
    return num_kv_heads, head_dim


def _check_heads(raw: ConfigFile, num_heads: int, **fields: int) -> None:
    """Check the number of KV heads and the width of a head, which are given by the names of their fields."""
    (number, num_kv_heads), (width, head_dim) = fields.items()
    if num_heads % num_kv_heads:
        raise raw.error(number, f"does not divide num_attention_heads ({num_heads})", value=num_kv_heads)
    if head_dim % 2:
        raise raw.error(width, "is odd, and rotary embeddings turn pairs", value=head_dim)


def _family(raw: ConfigFile, architecture: str | None) -> ModelFamily:
    """Return the family of `architecture`, or, if it is None, the one that the file names."""
    if architecture is None and raw.text_type is not None:
        found = [family for family in FAMILIES.values() if raw.text_type in family.text_types]
        if not found:
            served = ", ".join(each for family in FAMILIES.values() for each in family.text_types)
            raise raw.error("model_type", f"is not served; Baton serves the text models {served}", value=raw.text_type)
        return found[0]
    named = (architecture or raw.architecture).lower()  # the first files of Llama say LLaMAForCausalLM
    family = next((each for each in FAMILIES.values() if each.architecture.lower() == named), None)
    if not named and raw.get("architectures") is None:
        family = next((each for each in FAMILIES.values() if each.model_type == raw.model_type), None)
    if family is None and raw.lacks_text:
        raise raw.error(TEXT, "must be an object: the fields of the text model")
    if family is None:
        raise raw.error("architectures", f"is not served; Baton serves {', '.join(FAMILIES)}")
    return family


def _check_supported(raw: ConfigFile, family: ModelFamily) -> None:
    if raw.get("hidden_act") not in (None, "silu"):
        raise raw.error("hidden_act", "is not served; only silu is")
    for key in NUM_EXPERTS:
        if raw.get(key) and family.read_experts is None:
            raise raw.error(key, f"is not served for {family.architecture}; use a dense checkpoint")
    for key in family.needs:
        spellings = key.split("|")
        is_said = raw.has(key) if len(spellings) == 1 else any(raw.get(each) is not None for each in spellings)
        if not is_said:
            missing = " or ".join(spellings)
            raise ModelError(
                f"{raw.path}: {missing} is missing, and its default is not certain; write it into the file"
            )


def _compressed(raw: ConfigFile, family: ModelFamily) -> CompressedConfig | None:
    if family.read_compressed is None:
        return None
    rope = _rotation(raw, family, raw.section("rope_parameters").section("compress"))
    return replace(family.read_compressed(raw), rope=rope)


def _softcap(raw: ConfigFile, family: ModelFamily) -> float | None:
    has_one = family.may_cap_logits and raw.get("final_logit_softcapping") is not None
    return raw.number("final_logit_softcapping") if has_one else None


def _score_scale(raw: ConfigFile, family: ModelFamily) -> float | None:
    """Return the factor of scores; None: 1 / sqrt(head_dim)."""
    scale = family.score_scale
    return raw.number(scale) ** -0.5 if isinstance(scale, str) else scale


def _window(raw: ConfigFile, family: ModelFamily, heads: tuple[int, int], *, has_pool: bool) -> WindowConfig | None:
    """Return the layers with a window; None: they are as the others. `heads`: number and width of their KV heads."""
    if family.window_theta is None:
        return None
    fields = raw.section("rope_parameters").section("sliding_attention")
    _check_beside(raw, fields, "rope_theta", family.window_theta_name)
    share, other = fields.get("partial_rotary_factor"), _partial(raw, _rope_fields(raw, family))
    if family.rotary_share is not None and share not in (None, other):
        raise fields.error("partial_rotary_factor", f"is not served; that of full_attention ({other}) is", value=share)
    if not fields.has("rope_theta"):
        fields.fill({"rope_theta": raw.number(family.window_theta_name, family.window_theta)})
    return WindowConfig(_rotation(raw, family, fields), *heads, has_pool)


def _rope_fields(raw: ConfigFile, family: ModelFamily) -> Fields:
    """Return rotary settings, of two spellings: `rope_parameters`, or `rope_scaling` with `rope_theta` beside it. If
    layers with a window have others, return those of the layers without one."""
    if family.window_theta is not None and raw.get("rope_parameters"):
        return raw.section("rope_parameters").section("full_attention")
    if family.read_compressed is not None:
        return raw.section("rope_parameters").section("main")
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if any(isinstance(value, dict) for value in raw.section(key).unread().values()):
        raise raw.error(key, "is not served: one set of rotary parameters for all layers is")
    other = raw.get("rope_scaling") if key == "rope_parameters" else None
    if other and not (isinstance(other, dict) and _typed(other).items() <= _typed(raw.get(key)).items()):
        raise raw.error("rope_scaling", "differs from rope_parameters; remove one of the two from the file")
    return raw.section(key)


def _typed(fields: dict[str, Any]) -> dict[str, str]:
    """Return rotary settings that can be compared, under the newer of the two names of their type."""
    return {"rope_type" if key == "type" else key: repr(value) for key, value in fields.items()}


def _rotary_dim(raw: ConfigFile, family: ModelFamily, rope: RopeConfig, head_dim: int) -> int | None:
    """Return the numbers of a head that are rotated; None: all."""
    if family.rotary_share is None:
        return None
    share = _partial(raw, _rope_fields(raw, family))
    share = raw.positive("partial_rotary_factor", family.rotary_share if share is None else share)
    rotary_dim = raw.integer("rotary_dim", int(share * head_dim))
    if rotary_dim > head_dim or rotary_dim % 2:
        raise raw.error("partial_rotary_factor", f"rotates {rotary_dim} of {head_dim} numbers of a head", value=share)
    if rotary_dim == head_dim:
        return None
    if rope.attention_factor != 1:
        raise raw.error("partial_rotary_factor", f"is not served beside {rope.rope_type}", value=share)
    return rotary_dim


def _partial(raw: ConfigFile, among: Fields) -> Any:
    """Return partial_rotary_factor, which may be among the rotary settings or beside them."""
    _check_beside(raw, among, "partial_rotary_factor", "partial_rotary_factor")
    beside = raw.get("partial_rotary_factor")
    return among.get("partial_rotary_factor") if among.has("partial_rotary_factor") else beside


def _check_beside(raw: ConfigFile, among: Fields, name: str, beside: str) -> None:
    """Refuse a value beside the rotary settings, at `beside`, that differs from `name` among them."""
    if raw.get(beside) is not None and among.get(name) not in (None, raw.get(beside)):
        raise among.error(name, f"differs from {beside} ({raw.get(beside)}) beside it; correct the wrong one")


def _rope(raw: ConfigFile, family: ModelFamily) -> RopeConfig:
    if not family.has_rotary:
        return RopeConfig("proportional", share=0.0)
    fields = _rope_fields(raw, family)
    _check_beside(raw, fields, "rope_theta", "rope_theta")
    rope = _rotation(raw, family, fields)
    if not family.scales_queries or fields.get("llama_4_scaling_beta") is None:
        return rope
    original = int(fields.number("original_max_position_embeddings"))
    return replace(rope, original_context_len=original, query_beta=fields.number("llama_4_scaling_beta"))


def _rotation(raw: ConfigFile, family: ModelFamily, fields: Fields) -> RopeConfig:
    """Return the rotary embeddings without a factor of queries."""
    type_name = fields.get("type")
    rope_type = fields.get("rope_type") or type_name or "default"
    partial = None if rope_type == "proportional" else _partial(raw, fields)
    if partial not in (None, 1, _latent_share(raw, family)) and family.rotary_share is None:
        raise raw.error("partial_rotary_factor", "is not served; only 1.0 is", value=partial)
    if rope_type == "mrope" and raw.model_type in _WITH_MROPE:
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise fields.error("rope_type", f"is not served; one of {', '.join(ROPE_TYPES)} is", value=rope_type)
    theta = (fields if fields.get("rope_theta") is not None else raw).number("rope_theta", _theta(raw))
    beside = raw.get("original_max_position_embeddings")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, fields.number("factor"))
    if rope_type == "proportional":
        share = fields.number("partial_rotary_factor", 1.0)
        return RopeConfig("proportional", theta, fields.number("factor", 1.0), share=share)
    original = int(fields.number("original_max_position_embeddings", raw.integer("max_position_embeddings")))
    if beside not in (None, original):
        raise raw.error("original_max_position_embeddings", f"differs from that of {rope_type}, {original}; correct it")
    if rope_type == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"must be above low_freq_factor ({low})", value=high)
        return RopeConfig(cast(RopeType, rope_type), theta, fields.number("factor"), original, low, high)
    factor = fields.number("factor")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.get("truncate") is not False,
        attention_factor=fields.number(
            "attention_factor", yarn_attention_factor(factor, fields.get("mscale"), fields.get("mscale_all_dim"))
        ),
    )


def _latent_share(raw: ConfigFile, family: ModelFamily) -> float | None:
    """Return the share of a head that a family with latents rotates, which the widths say already."""
    if family.read_latent is None:
        return None
    rotated = raw.integer("qk_rope_head_dim")
    return rotated / (raw.integer("qk_nope_head_dim") + rotated)


def _theta(raw: ConfigFile) -> float | None:
    """Return the rope_theta of a file that does not say it; None: it must say it."""
    return THETAS.get(raw.model_type, 10_000.0)


def _hc_mult(raw: ConfigFile, family: ModelFamily) -> int:
    """Return the number of residual streams; null, 0 and 1 mean one."""
    hc_mult = raw.integer("hc_mult", 1, minimum=0)
    if hc_mult > 1 and not family.has_streams:
        raise raw.error("hc_mult", f"is not served for {family.architecture}, which has one residual stream")
    return max(1, hc_mult)


def _context_len(raw: ConfigFile, rope: RopeConfig) -> int:
    """Return max_position_embeddings, or the length that yarn stretches it to: some checkpoints state only the original
    length."""
    stated = raw.integer("max_position_embeddings")
    return max(stated, int(rope.original_context_len * rope.factor)) if rope.rope_type == "yarn" else stated


def _sliding_window(raw: ConfigFile, family: ModelFamily) -> tuple[int | None, ...]:
    num_layers = raw.integer("num_hidden_layers")
    window = raw.integer("sliding_window") if raw.get("sliding_window") is not None else None
    layer_types = raw.get("layer_types")
    if family.window == "by_type":
        period = raw.integer("sliding_window_pattern", 6)  # the last layer of a period has no window
        kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]
        return _by_layer_types(raw, family, kinds if layer_types is None else layer_types, window)
    if family.window == "by_layer":
        window = window if raw.flag("use_sliding_window") else None
        first = raw.integer("max_window_layers", 28, minimum=0)
        windows = tuple(window if layer >= first else None for layer in range(num_layers))
        return windows if layer_types is None else _by_layer_types(raw, family, layer_types, window)
    if family.read_delta is not None:  # it reads layer_types
        return (None,) * num_layers
    if family.window == "refused" and window is not None:
        raise raw.error("sliding_window", f"is not served for {family.architecture}; set it to null if it is not meant")
    windows = (window,) * num_layers
    has_kinds = family.read_compressed is not None  # which say what layers see behind the window
    if layer_types is not None and not has_kinds and _by_layer_types(raw, family, layer_types, window) != windows:
        raise raw.error("layer_types", f"is not served for {family.architecture}: all layers must be alike")
    return windows


def _by_layer_types(
    raw: ConfigFile, family: ModelFamily, layer_types: Any, window: int | None
) -> tuple[int | None, ...]:
    num_layers = raw.integer("num_hidden_layers")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise raw.error("layer_types", f"must list {num_layers} layers")
    served = ("full_attention", "sliding_attention") if family.read_index is None else _INDEXED
    if any(layer_type not in served for layer_type in layer_types):
        raise raw.error("layer_types", f"is not served; {' and '.join(served)} are")
    if "sliding_attention" in layer_types and window is None:
        raise raw.error("layer_types", "has sliding_attention but no sliding window is switched on")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _checkpoint_dtype(raw: ConfigFile, model_dir: Path | None) -> CheckpointDtype:
    """Return the dtype that the file names, or else that of most numbers of the checkpoint in `model_dir`."""
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    dtype = raw.get(key) or _dtype_of_tensors(model_dir)
    if dtype not in get_args(CheckpointDtype):
        raise raw.error(key, f"is not served; one of {', '.join(get_args(CheckpointDtype))} is")
    return dtype


def _dtype_of_tensors(model_dir: Path | None) -> CheckpointDtype:
    num_bytes = dict.fromkeys(_FLOATS, 0)
    for stored in all_stored_tensors(model_dir).values() if model_dir is not None else ():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    return _FLOATS[max(num_bytes, key=lambda dtype: num_bytes[dtype])]


def _is_tied(raw: ConfigFile, model_dir: Path) -> bool:
    """Return whether the head is the embedding. If a model with images and its text model say different things, a head
    in the checkpoint decides: transformers writes `true` for every Mistral 3, and some LLaVA say `false` outside."""
    is_tied = raw.flag("tie_word_embeddings")
    if raw.is_doubtful_tie:
        return not any(name.endswith("lm_head.weight") for name in all_stored_tensors(model_dir))
    return is_tied


def _eos_token_ids(raw: ConfigFile, generation_config: Path) -> tuple[int, ...]:
    """Return the ids that end a text. Chat models have several, which generation_config.json lists; config.json is the
    fallback."""
    source = raw
    if generation_config.exists():
        generation = ConfigFile(generation_config)
        source = generation if generation.get("eos_token_id") is not None else raw
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise source.error("eos_token_id", "must be a token id or a list of them")
    return tuple(ids)
