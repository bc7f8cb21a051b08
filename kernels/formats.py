"""Sizes of number formats and settings of operations that config.json or a schema names. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 128  # rows, and columns, of a weight's block with one scale (fp8.py)
ALIGNMENT = 16  # bytes, of scales and blocks in pages of e4m3 (fp8_pages.py)
SCALE_BYTES = 4  # of a scale in such pages


class SwigluClamp(NamedTuple):
    """A gate of numbers that are clamped first: (up + offset) * gate * sigmoid(alpha * gate)."""

    limit: float  # the gate is at most this, and up is between minus this and this
    alpha: float
    offset: float = 1.0


def update_width(key_dim: int, value_dim: int, num_shared: int, decay_dim: int) -> int:
    """Return the numbers per key head that a round of the gated delta rule reads of an earlier row of its block: the
    update and the decays of each value head, and the key. It is a multiple of 8, so rows begin at sectors of memory."""
    return -(-(key_dim + num_shared * (value_dim + decay_dim)) // 8) * 8
