"""Quantized weights, FP8 (e4m3) and MXFP4: the scales of a weight, and the rounding of the rows x in y = x W^T.

    weight_scale    blocks    one for 128 x 128 numbers
                    rows      one for each row, which is one output
                    tensor    one for each projection
                    mxfp4     a power of two for 32 columns of a row of 4-bit numbers: experts in one tensor, no others
    rounding        groups    each row to e4m3, with a scale for each 128 columns
                    rows      each row to e4m3, with one scale
                    stored    each row to e4m3, with the scale that the checkpoint has for the layer
                    none      not rounded

The rounding never depends on other rows, or the text would depend on its company. A checkpoint whose scheme has one
scale for all rows of a forward (`dynamic`, per tensor) is therefore computed with one scale for each row, as others do.

A checkpoint says it in `quantization_config` of config.json, or in ModelOpt's hf_quant_config.json:

    fp8                   DeepSeek's blocks of 128 x 128, and one scale per tensor (AutoFP8, and Mistral's files).
                          Experts of DeepSeek-V4 may be in MXFP4 (expert_dtype fp4)
    compressed-tensors    8-bit floats: per tensor, per channel, or in blocks; activations rounded, or left in 16 bits
    modelopt              FP8: one scale per tensor for weights and for activations
    mxfp4                 4 bits with a power of two for 32 columns, of experts; activations stay in 16 bits

Everything else is refused by name. So is a field that nobody here reads, unless it switches nothing on (null, false, 0,
empty) or is listed as one that changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ...kernels.formats import BLOCK
from ...metadata.errors import ConfigError, ModelError
from .config_file import ConfigFile, Fields

WeightScale = Literal["blocks", "rows", "tensor", "mxfp4"]
Rounding = Literal["groups", "rows", "stored", "none"]
ScaleName = Literal["weight_scale", "weight_scale_inv", "scale"]

_KEY = "quantization_config"
_LISTS = "exclude_modules ignore ignored_layers modules_to_not_convert targets"  # tensors tell what is quantized
_CACHE = "kv_cache_quant_algo kv_cache_quant_method kv_cache_scheme"  # pages have scales of their own
_CALIBRATION = "observer observer_kwargs"  # its results are stored
_BOOKKEEPING = "format global_compression_ratio producer quant_method version"
_INERT = frozenset(" ".join((_LISTS, _CACHE, _CALIBRATION, _BOOKKEEPING)).split())


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a model's weights. Layers that a checkpoint leaves in 16 bits have no scales there."""

    weight_scale: WeightScale
    rounding: Rounding
    scale_name: ScaleName = "weight_scale"
    input_scale_name: Literal["input_scale", "activation_scale"] = "input_scale"  # of the rounding `stored`
    has_power_of_two_scales: bool = False  # of groups
    is_online: bool = False  # the checkpoint has 16 bits or 32; layers are quantized while they are read
    has_mxfp4_experts: bool = False  # beside layers in blocks; each projection has tensors of its own

    @property
    def words(self) -> str:
        """The scheme in at most 31 characters, for refusals."""
        if self.weight_scale == "mxfp4":
            return "mxfp4"
        if self.is_online:
            return "fp8 online"
        rounding = "ue8m0" if self.has_power_of_two_scales else self.rounding
        experts = ", fp4" if self.has_mxfp4_experts else ""
        return f"fp8 {self.weight_scale}{experts}, rounding {rounding}"

    @property
    def of_experts(self) -> Quantization:
        """The quantization of the experts' weights."""
        return Quantization("mxfp4", "none", self.scale_name) if self.has_mxfp4_experts else self


ONLINE_FP8 = Quantization("rows", "rows", is_online=True)


def chosen(of_checkpoint: Quantization | None, choice: Literal["auto", "fp8"]) -> Quantization | None:
    """Return the quantization that --quantization chooses. Raises ConfigError if the checkpoint has another one."""
    if choice == "auto":
        return of_checkpoint
    if of_checkpoint is not None:
        raise ConfigError("--quantization fp8: the checkpoint is quantized already; leave the option out")
    return ONLINE_FP8


def read_quantization(
    raw: ConfigFile, model_dir: Path, scale_name: ScaleName | None = None, *, may_pack_experts: bool = False
) -> Quantization | None:
    """Return how the linear layers are quantized; None: they are not. `scale_name`: of blocks, if the family has its
    own. `may_pack_experts`: config.json may say that experts are in MXFP4. Raises ModelError for what is not
    served."""
    found = _read_stated(raw, model_dir)
    if found is None or found.weight_scale != "blocks":
        return found
    expert_dtype = raw.get("expert_dtype") if may_pack_experts else None
    if expert_dtype not in (None, "fp8", "fp4"):
        raise raw.error("expert_dtype", "is not served; fp8 and fp4 are")
    return replace(found, scale_name=scale_name or found.scale_name, has_mxfp4_experts=expert_dtype == "fp4")


def _read_stated(raw: ConfigFile, model_dir: Path) -> Quantization | None:
    path = model_dir / "hf_quant_config.json"
    if raw.get(_KEY) is None and path.exists():
        fields = ConfigFile(path).get("quantization")
        return _read(_Reader(path, "quantization.", fields if isinstance(fields, dict) else {}), _modelopt)
    if raw.get(_KEY) is None:
        return None
    if not isinstance(raw.get(_KEY), dict):
        raise raw.error(_KEY, "must be an object")
    reader = _Reader(raw.path, f"{_KEY}.", raw.get(_KEY))
    method = reader.get("quant_method")
    if method is None and reader.get("quant_algo") is not None:
        method = "modelopt"  # which leaves its name out at times (Qwen3-32B-FP8-Static-PerTensor)
    kinds = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "mxfp4": _mxfp4}
    if method not in kinds:
        raise reader.error("quant_method", f"{', '.join(kinds)} are")
    return _read(reader, kinds[method])


def _read(reader: _Reader, kind: Callable[[_Reader], Quantization]) -> Quantization:
    found = kind(reader)
    _refuse_others(reader)
    return found


def _refuse_others(fields: Fields) -> None:
    """Raise ModelError for a field that nobody asked for and that could change a number."""
    for key, value in sorted(fields.unread().items()):
        if value and key not in _INERT:
            raise fields.error(key, "it is unknown, and could change what is computed")
    for each in fields.sections():
        _refuse_others(each)


class _Reader(Fields):
    """The fields of a quantization. Its errors name file, key and value, and say what is served."""

    def inner(self, key: str) -> _Reader | None:
        """Return the object at `key`, None if it is null or absent."""
        fields = self.get(key)
        if fields is None:
            return None
        if not isinstance(fields, dict):
            raise self.error(key, "an object is")
        found = _Reader(self.path, f"{self._place}{key}.", cast(dict[str, Any], fields))
        self._sections[key] = found
        return found

    def error(self, key: str, what: str, *, value: Any = None) -> ModelError:
        return super().error(key, f"is not served; {what}", value=value)

    def require(self, key: str, *served: Any) -> Any:
        """Return the value at `key`, which must be one of these."""
        if self.get(key) not in served:
            raise self.error(key, f"{' and '.join(map(repr, served))} {'is' if len(served) == 1 else 'are'}")
        return self.get(key)


def _fp8(reader: _Reader) -> Quantization:
    reader.require("fmt", None, "e4m3", "float8_e4m3fn")
    is_static = reader.require("activation_scheme", "dynamic", "static", None) == "static"
    if reader.get("weight_block_size") is None:
        is_transformers = reader.has("weight_block_size")  # which alone writes null, and has names of its own
        names = ("weight_scale_inv", "activation_scale") if is_transformers else ("weight_scale", "input_scale")
        return Quantization("tensor", "stored" if is_static else "rows", *names)
    reader.require("weight_block_size", [BLOCK, BLOCK])
    if is_static:
        raise reader.error("activation_scheme", "'dynamic' is, beside weight_block_size")
    is_power = reader.require("scale_fmt", None, "float", "ue8m0") == "ue8m0"
    return Quantization("blocks", "groups", "weight_scale_inv", has_power_of_two_scales=is_power)


def _compressed_tensors(reader: _Reader) -> Quantization:
    reader.require("quantization_status", None, "compressed", "frozen")
    groups = reader.inner("config_groups")
    names = [] if groups is None else list(reader.get("config_groups"))
    if groups is None or len(names) != 1:
        raise reader.error("config_groups", "one group is")
    group = groups.inner(names[0])
    assert group is not None, names
    if reader.get("transform_config"):
        raise reader.error("transform_config", "rows that are multiplied as they are: {} is")
    if reader.get("sparsity_config") and reader.get("sparsity_config") != {"format": "dense"}:
        raise reader.error("sparsity_config", "weights that are stored whole: {} is")
    group.require("output_activations", None)
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    if weights is None:
        raise group.error("weights", "8-bit floats are")
    for each in (weights, inputs):
        if each is not None:
            each.require("num_bits", 8)
            each.require("type", "float")
            each.require("symmetric", True, None)
    weights.require("dynamic", False, None)
    strategy = weights.require("strategy", "tensor", "channel", "block")
    if inputs is None:
        rounding: Rounding = "none"
    elif strategy == "block":
        inputs.require("strategy", "group")
        inputs.require("group_size", BLOCK)
        inputs.require("dynamic", True)
        rounding = "groups"
    else:
        is_dynamic = inputs.require("dynamic", True, False, None)
        inputs.require("strategy", *(("token", "tensor") if is_dynamic else ("tensor",)))
        rounding = "rows" if is_dynamic else "stored"
    if strategy == "block":
        weights.require("block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
        if rounding == "none":
            raise group.error("input_activations", "activations in groups are, beside weights in blocks")
        return Quantization("blocks", "groups")
    return Quantization("rows" if strategy == "channel" else "tensor", rounding)


def _modelopt(reader: _Reader) -> Quantization:
    reader.require("quant_algo", "FP8")
    reader.get("config_groups")  # says the same in the words of compressed-tensors
    return Quantization("tensor", "stored")


def _mxfp4(reader: _Reader) -> Quantization:
    del reader  # the names of the tensors tell which layers are in it
    return Quantization("mxfp4", "none")
