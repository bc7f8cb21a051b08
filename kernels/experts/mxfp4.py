"""Numbers of 4 bits with a power of two for each group of a row's columns (MXFP4 of OCP's Microscaling Formats).

    value    a sign, 2 bits of exponent and 1 of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4, 6
    scale    a byte: 2^(byte - 127)
    byte     in a checkpoint, the values of columns 2 i (low 4 bits) and 2 i + 1.
             Here, byte i of a group has the values of its columns i (low 4 bits) and i + group / 2, so that the low
             halves of bytes, and the high ones, are columns side by side.

bfloat16 holds every such number exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale in a checkpoint
_ALIGNMENT = 16  # bytes between rows of scales, so that kernels copy several scales at once
_ROWS = 8192  # that are brought in order at once
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_checkpoint(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes and the scales of a checkpoint's rows in the order of this module. Shapes are as for `unpacked`.
    The scales are a view of longer rows, which are aligned."""
    (num_rows, num_bytes), num_groups = packed.shape, scales.shape[1]
    aligned = scales.new_zeros(num_rows, -(-num_groups // _ALIGNMENT) * _ALIGNMENT)[:, :num_groups]
    out = torch.empty_like(packed)
    for part, own in zip(packed.split(_ROWS), out.split(_ROWS), strict=True):  # few temporaries beside all experts
        columns = torch.stack((part & 15, part >> 4), 2).view(len(part), num_groups, 2, num_bytes // num_groups)
        own.copy_((columns[:, :, 0] | columns[:, :, 1] << 4).flatten(1))
    return out, aligned.copy_(scales)


def unpacked(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the numbers of rows, [num_rows, size] float32.

    `packed` [num_rows, size / 2] uint8, `scales` [num_rows, size / group] uint8."""
    assert packed.shape[1] * 2 == scales.shape[1] * group, (packed.shape, scales.shape, group)
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # [256, 2], of each byte
    numbers = pairs.index_select(0, packed.flatten().int()).view(len(packed), -1, group // 2, 2)
    numbers = numbers.transpose(2, 3).flatten(2)  # [num_rows, num_groups, group]
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(1)
