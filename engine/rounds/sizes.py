"""The sizes of rounds that are captured as CUDA graphs. Without torch, so that a simulated node has the same.

A round is padded to the next size. A padded row costs little while reading the weights takes all the time. In a large
round it costs as much as any other row, so sizes lie closer there. A round of fewer sequences has as many rows if they
draft.
"""

from __future__ import annotations

_HALVED, _QUARTERED = 32, 128  # from one size on, steps are half of the power of two below; from the other, a quarter


def round_sizes(max_running: int) -> list[int]:
    """Return numbers of sequences, rising; the last is `max_running`."""
    sizes, size = [], 1
    while size < max_running:
        sizes.append(size)
        power = 1 << (size.bit_length() - 1)
        size += power // (4 if power >= _QUARTERED else 2 if power >= _HALVED else 1)
    return [*sizes, max_running]
