"""The fingerprint of a model: equal for equal models, so that nodes of two models refuse each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from .checkpoint import tensor_digests
from .model_config import ExpertsConfig, ModelConfig, RopeConfig
from .model_files import safetensors_files
from .read_config import read_model_config

_EARLY = ("hc_mult", "hands_over_collapsed")  # fields with defaults that the digests of all releases hold
_LATE_ROPE = ("query_beta", "share")  # fields of `rope` that the digests of early releases lack


def fingerprint(model_dir: Path, config: ModelConfig | None = None) -> str:
    """Return a fingerprint that is equal for equal models, on every host and however the files are split: 32
    hexadecimal digits, and the words of the quantization if there is one (metadata/handoff/schema/weights.py).

    XXH3-128 over the checked configuration and every tensor's name, dtype, shape and bytes. All bytes are read.
    `config`: as read already, for a drafter's head. Raises ModelError as loading does."""
    files = safetensors_files(model_dir)
    tensors = _tensors(tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))
    return fingerprint_of(config or read_model_config(model_dir), tensors)


def fingerprint_of(config: ModelConfig, tensors: Mapping[str, bytes]) -> str:
    """Return the fingerprint of a model, given the digests of its tensors by name."""
    fields = asdict(config)
    for field in dataclass_fields(ModelConfig):  # releases that lack a field agree with those that have its default
        if field.default is not MISSING and field.name not in _EARLY and fields[field.name] == field.default:
            del fields[field.name]
    for name in _LATE_ROPE:
        if fields["rope"][name] == _defaults(RopeConfig)[name]:
            del fields["rope"][name]
    if "experts" in fields:  # the same for its fields with defaults
        defaults = _defaults(ExpertsConfig)
        fields["experts"] = {name: value for name, value in fields["experts"].items() if value != defaults[name]}
    if "delta" in fields:
        del fields["delta"]["state_dtype"]  # of the node's pages; the schema tells it
    digest = xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name])
    quantization = "" if config.quantization is None else f" {config.quantization.words}"
    return digest.hexdigest() + quantization


def _defaults(config: type[ExpertsConfig | RopeConfig]) -> dict[str, Any]:
    """Return the default of each field of a configuration."""
    return {field.name: field.default for field in dataclass_fields(config)}


@lru_cache(2)
def _tensors(files: tuple[tuple[Path, int, int], ...]) -> dict[str, bytes]:
    """Return the digests of all tensors of files, given with their time of change and size. A target and its own
    prediction layers are in the same files, which are read once."""
    return {name: value for path, _, _ in files for name, value in tensor_digests(path).items()}
