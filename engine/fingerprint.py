"""The fingerprint of a model: equal for equal models, so that nodes of two models refuse each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path

import xxhash

from .checkpoint import safetensors_files, tensor_digests
from .model_config import ExpertsConfig, ModelConfig
from .models.read_config import read_model_config

_LATER = ("experts", "quantization", "rotary_dim", "has_wide_norms")  # earlier releases lack them, and must agree


def fingerprint(model_dir: Path, config: ModelConfig | None = None) -> str:
    """Return 32 hexadecimal digits that are equal for equal models, on every host and however the files are split.

    XXH3-128 over the checked configuration and every tensor's name, dtype, shape and bytes. All bytes are read.
    `config`: as read already, for a drafter's head. Raises ModelError as loading does."""
    fields = asdict(config or read_model_config(model_dir))
    for name in _LATER:
        if not fields[name]:
            del fields[name]
    if "experts" in fields:  # the same for its fields with defaults
        defaults = {field.name: field.default for field in dataclass_fields(ExpertsConfig)}
        fields["experts"] = {name: value for name, value in fields["experts"].items() if value != defaults[name]}
    digest = xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode())
    tensors = {name: value for path in safetensors_files(model_dir) for name, value in tensor_digests(path).items()}
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()
