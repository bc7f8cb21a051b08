"""Checkpoints with experts in MXFP4, made of plain ones, and plain ones of the numbers that they stand for.

Written anew from the format's definition, with nothing of the engine's: numbers are rounded by a table.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from synthetic import MXFP4 as CONFIG
from torch import Tensor

_CODES = {
    0.0: 0b0000,
    0.5: 0b0001,
    1.0: 0b0010,
    1.5: 0b0011,
    2.0: 0b0100,
    3.0: 0b0101,
    4.0: 0b0110,
    6.0: 0b0111,
    -0.5: 0b1001,
    -1.0: 0b1010,
    -1.5: 0b1011,
    -2.0: 0b1100,
    -3.0: 0b1101,
    -4.0: 0b1110,
    -6.0: 0b1111,
}
_NUMBERS = torch.tensor(sorted(_CODES), dtype=torch.float64)
_CODE_OF = torch.tensor([_CODES[number] for number in sorted(_CODES)], dtype=torch.uint8)


def in_mxfp4(plain: Path, directory: Path) -> tuple[Path, Path]:
    """Write the gpt-oss checkpoint `plain`, which is one file, with experts in MXFP4, and with the numbers that those
    stand for. Return both paths, under `directory`."""
    packed, meant = directory / "mxfp4", directory / "meant"
    for path in (packed, meant):
        shutil.copytree(plain, path)
    tensors = load_file(plain / "model.safetensors")
    of_packed, of_meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        blocks, scales, numbers = _rounded(tensor.transpose(1, 2))
        del of_packed[name]
        of_packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        of_meant[name] = numbers.transpose(1, 2).contiguous()
    save_file(of_packed, packed / "model.safetensors", {"format": "pt"})
    save_file(of_meant, meant / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return packed, meant


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks, the scales and the numbers, float32, of `weight` [num_experts, out_size, in_size]."""
    groups = weight.double().unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2  # the largest number becomes 4 to 6
    ratios = groups / 2**exponents
    nearest = (ratios.unsqueeze(-1) - _NUMBERS).abs().argmin(-1)
    codes, numbers = _CODE_OF[nearest], _NUMBERS[nearest] * 2**exponents
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first of two numbers has the low bits
    return blocks.contiguous(), (exponents.squeeze(-1) + 127).to(torch.uint8), numbers.flatten(2).float()
