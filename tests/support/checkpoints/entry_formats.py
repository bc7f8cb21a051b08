"""Checkpoints of DeepSeek-V4 under the names and in the formats of the published files, made of those of
transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
QUANTIZED: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
}


def published(source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> Path:
    """Write a copy of a checkpoint under the names of the published files, whose tensors `change` has changed."""
    shutil.copytree(source, path)
    spelled: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        name = re.sub(r"^model\.", "", name).replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        spelled[re.sub(r"attn\.norm\.", "attn.kv_norm.", name)] = tensor
    change(spelled)
    save_file(spelled, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | config))
    return path


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight in MXFP4, by the even columns in low halves of bytes: bytes, scales, and its numbers."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil()
    scaled = groups / exponents.exp2().unsqueeze(2)
    codes = (scaled.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    numbers = VALUES[codes] * scaled.sign() * exponents.exp2().unsqueeze(2)
    codes = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scales, numbers.flatten(1)


def in_published_formats(source: Path, path: Path) -> Path:
    """Write a copy of a checkpoint with experts in MXFP4 and other products in blocks of FP8."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            scale = f"{name.removesuffix('weight')}scale"
            if ".ffn.experts." in name:
                tensors[name], tensors[scale], _ = packed(tensors[name])
            elif re.search(r"attn\.(wq_a|wkv|wq_b|wo_a|wo_b)\.|indexer\.wq_b\.|shared_experts", name):
                weight = tensors[name]
                tensors[name] = (weight * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
                shape = [-(-size // 128) for size in weight.shape]
                tensors[scale] = torch.full(shape, 2.0**-6).to(torch.float8_e8m0fnu)

    return published(source, path, change, expert_dtype="fp4", **QUANTIZED)
