"""The GPU of each rank of a node: rank i has GPU i of those that the node sees.

A rank is a process, and the current GPU belongs to a thread. So each process sees its own GPU first: `cuda` is the
rank's GPU in all its threads, and the other GPUs stay visible, because ranks map each other's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...metadata.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_devices(size: int, num_gpus: int, flag: str) -> None:
    """Raise ConfigError if the `size` ranks that `flag` asks for have too few GPUs."""
    if size > num_gpus:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        fix = f"{num_gpus} or less" if num_gpus > 1 else f"{num_gpus}"
        raise ConfigError(f"{flag} {size} needs {size} GPUs, and this node sees {gpus}; use {flag} {fix}")


def orders(num_gpus: int, devices: Sequence[int]) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each rank. It names all GPUs, the rank's own one first.

    `num_gpus`: GPUs that this process sees. `devices[rank]`: the index of the rank's GPU among them. Rank 0 is this
    process, so its index is 0."""
    given = os.environ.get(_VISIBLE)
    visible = [str(index) for index in range(num_gpus)] if given is None else given.split(",")[:num_gpus]
    assert len(visible) == num_gpus and devices[0] == 0, (given, num_gpus, devices)
    return [",".join([visible[own], *visible[:own], *visible[own + 1 :]]) for own in devices]


def see(order: str) -> None:
    """Let this process see GPUs in this order. Call it before the first use of CUDA."""
    os.environ[_VISIBLE] = order
