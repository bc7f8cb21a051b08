"""MXFP4 weights (kernels/experts/mxfp4.py). Published checkpoints have experts in them, and nothing else: all in one
tensor of bytes and one of scales, or each projection in two of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.experts import mxfp4
from ...kernels.experts.experts import ExpertWeight
from ...metadata.errors import ModelError
from ..checkpoint.quantization import Quantization
from .base import StoredTensor, WeightSource


def tensors(out_size: int, in_size: int, quantization: Quantization) -> Mapping[str, StoredTensor]:
    """Return the tensors of one projection. Raises ModelError if groups do not divide its columns."""
    group = mxfp4.GROUP
    if in_size % group:
        raise ModelError(f"a weight of {in_size} columns cannot be divided into groups of {group} (MXFP4)")
    scales = StoredTensor((out_size, in_size // group), ("F8_E8M0", "U8"), (1, group))
    return {"weight": StoredTensor((out_size, in_size // 2), ("I8", "U8")), quantization.scale_name: scales}


def read_experts(source: WeightSource) -> tuple[ExpertWeight, None] | None:
    """Return the weights of all experts as kernels take them; None: they are not in MXFP4. No rows are rounded."""
    quantization = source.quantization
    if quantization is None or quantization.weight_scale != "mxfp4":
        return None
    if source.has("blocks"):
        names = ("blocks", "scales")
    elif source.has("scale"):
        names = ("weight", "scale")
    else:
        return None
    packed, exponents = ([part.view(torch.uint8) for part in source.parts(name)] for name in names)
    values, scales = mxfp4.from_checkpoint(*(torch.cat(each).to(source.device) for each in (packed, exponents)))
    return ExpertWeight(values, scales, source.in_size // scales.shape[1], source.bias), None
