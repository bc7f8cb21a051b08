"""Reading of a checkpoint's quantization: `quantization_config` of config.json, or ModelOpt's hf_quant_config.json.

    fp8                   DeepSeek's blocks of 128 x 128, and one scale per tensor (AutoFP8, and Mistral's files)
    compressed-tensors    8-bit floats: per tensor, per channel, or in blocks; activations rounded, or left in 16 bits
    modelopt              FP8: one scale per tensor for weights and for activations
    mxfp4                 4 bits with a power of two for 32 columns, of experts; activations stay in 16 bits

Everything else is refused by name. So is a field that nobody here reads, unless it switches nothing on (null, false, 0,
empty) or is listed as one that changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ...kernels.formats import BLOCK
from ...metadata.errors import ModelError
from .config_file import ConfigFile, Fields
from .quantization import Quantization, Rounding

_KEY = "quantization_config"
_LISTS = "exclude_modules ignore ignored_layers modules_to_not_convert targets"  # tensors tell what is quantized
_CACHE = "kv_cache_quant_algo kv_cache_quant_method kv_cache_scheme"  # pages have scales of their own
_CALIBRATION = "observer observer_kwargs"  # its results are stored
_BOOKKEEPING = "format global_compression_ratio producer quant_method version"
_INERT = frozenset(" ".join((_LISTS, _CACHE, _CALIBRATION, _BOOKKEEPING)).split())


def read_quantization(raw: ConfigFile, model_dir: Path) -> Quantization | None:
    """Return how the linear layers are quantized; None: they are not. Raises ModelError for what is not served."""
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
