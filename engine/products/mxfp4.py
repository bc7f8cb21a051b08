"""MXFP4 weights (kernels/experts/mxfp4.py). Published checkpoints have experts in them, and nothing else."""

from __future__ import annotations

import torch

from ...kernels.experts import mxfp4
from ...kernels.experts.experts import ExpertWeight
from .base import WeightSource


def read_experts(source: WeightSource) -> tuple[ExpertWeight, None] | None:
    """Return the weights of all experts as kernels take them; None: they are not in MXFP4. No rows are rounded."""
    quantization = source.quantization
    if quantization is None or quantization.weight_scale != "mxfp4" or not source.has("blocks"):
        return None
    values, scales = mxfp4.from_checkpoint(
        *(torch.cat(source.parts(name)).to(source.device) for name in ("blocks", "scales"))
    )
    return ExpertWeight(values, scales, source.in_size // scales.shape[1], source.bias), None
