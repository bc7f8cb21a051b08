"""Numbers of 4 bits with a power of two for each group of a row's columns (MXFP4 of OCP's Microscaling Formats).

    value    a sign, 2 bits of exponent and 1 of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4, 6
    byte     the values of columns 2 i (low 4 bits) and 2 i + 1
    scale    a byte: 2^(byte - 127)

bfloat16 holds every such number exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale in a checkpoint
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the numbers of rows, [num_rows, size] float32.

    `packed` [num_rows, size / 2] uint8, `scales` [num_rows, size / group] uint8."""
    assert packed.shape[1] * 2 == scales.shape[1] * group, (packed.shape, scales.shape, group)
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # [256, 2], of each byte
    numbers = pairs.index_select(0, packed.flatten().int()).view(len(packed), -1, group)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(1)
