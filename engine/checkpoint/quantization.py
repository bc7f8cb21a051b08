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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...metadata.errors import ConfigError

WeightScale = Literal["blocks", "rows", "tensor", "mxfp4"]
Rounding = Literal["groups", "rows", "stored", "none"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a model's weights. Layers that a checkpoint leaves in 16 bits have no scales there."""

    weight_scale: WeightScale
    rounding: Rounding
    scale_name: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    input_scale_name: Literal["input_scale", "activation_scale"] = "input_scale"  # of the rounding `stored`
    has_power_of_two_scales: bool = False  # of groups
    is_online: bool = False  # the checkpoint has 16 bits or 32; layers are quantized while they are read

    @property
    def words(self) -> str:
        """The scheme in at most 31 characters, for refusals."""
        if self.weight_scale == "mxfp4":
            return "mxfp4"
        if self.is_online:
            return "fp8 online"
        rounding = "ue8m0" if self.has_power_of_two_scales else self.rounding
        return f"fp8 {self.weight_scale}, rounding {rounding}"


ONLINE_FP8 = Quantization("rows", "rows", is_online=True)


def chosen(of_checkpoint: Quantization | None, choice: Literal["auto", "fp8"]) -> Quantization | None:
    """Return the quantization that --quantization chooses. Raises ConfigError if the checkpoint has another one."""
    if choice == "auto":
        return of_checkpoint
    if of_checkpoint is not None:
        raise ConfigError("--quantization fp8: the checkpoint is quantized already; leave the option out")
    return ONLINE_FP8
