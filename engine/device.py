"""The device at hand: in which facts kinds of devices (CPU, CUDA) differ, and copies between it and the host.

Other modules of the engine read the facts, and do not ask for the kind. kernels/operations.py chooses the kernels of a
device.

Nobody waits for a copy. `torch.tensor(..., device="cuda")` and `tensor.cpu()` wait until the device has done all that
was asked of it before, and the host cannot prepare the next step meanwhile. So copies go by pinned memory, in the order
of the stream. Kernels that read numbers over the bus get them in rows of pinned memory that is used again and again
(`PinnedRows`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..metadata.errors import ConfigError
from ..metadata.handoff.schema.hidden_layout import HiddenDtype
from .config import DtypeChoice


class DeviceKind(NamedTuple):
    """A kind of device."""

    is_apart: bool  # has memory of its own, and works while the host goes on. The host's memory for it is pinned
    dtype: HiddenDtype | None  # of a model's computation; None: the checkpoint's
    warm_up_sizes: tuple[int, ...]  # rows of a product that have kernels of their own
    num_warm_up_scores: int  # rows of logits; as many as service scores at once, if they take the device's memory


SCORED_AT_ONCE = 1024  # rows of logits
_KINDS = {
    "cpu": DeviceKind(False, "float32", (1,), 1),
    "cuda": DeviceKind(True, None, (1, 4, 8, 16, 32), SCORED_AT_ONCE),
}
_NUM_ROWS = 1024  # of pinned memory, used again and again
_made: dict[tuple[int, int, torch.device], Tensor] = {}  # numbers that never change


def kind_of(device: torch.device) -> DeviceKind:
    """Return what follows from the kind of a device."""
    return _KINDS[device.type]


def choose_device(name: str) -> torch.device:
    """Return the device that a configuration means. Raises ConfigError if torch does not see it."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" != found:
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device; use --device cpu or auto")
    return torch.device(found if name == "auto" else name)


def choose_dtype(name: DtypeChoice, device: torch.device, checkpoint_dtype: HiddenDtype) -> HiddenDtype:
    """Return the dtype of a model's computation that a configuration means."""
    return (kind_of(device).dtype or checkpoint_dtype) if name == "auto" else name


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on `device`; itself where that is the host. A pinned one must not be written before the copy
    is done; of another one a pinned copy is made first."""
    device = torch.device(device)
    if tensor.device.type == device.type:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Itself on the host. From a CUDA device a copy that is there after the next `recorded_event` has happened."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Happens when the device has done all that was asked of it up to now; None where that is the case already."""
    if not kind_of(device).is_apart:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def counted(num: int, device: torch.device, step: int = 1) -> Tensor:
    """Return 0, step, 2 * step ..: [num] int64. It is made once, so that no round and no CUDA graph spends a kernel on
    it. Many hold it, so nobody writes it."""
    key = (num, step, device)
    if key in _made:
        return _made[key]
    with torch.inference_mode(mode=False):
        numbers = torch.arange(0, num * step, step, device=device)
    if not (
        kind_of(device).is_apart and torch.cuda.is_current_stream_capturing()
    ):  # what a graph makes is there after it ran
        _made[key] = numbers
    return numbers


class PinnedRows:
    """Owns rows of numbers on the host that kernels read over the bus, and gives them out in turn.

    torch's allocator does not know that a kernel reads a row, so it might give the memory to others before the kernel
    has run. Here the rows are two halves. Before the first row of a half is given out again, the device has done all
    work that was submitted up to the launch for the last row of this half.
    """

    def __init__(self, width: int, device: torch.device, num_rows: int = _NUM_ROWS) -> None:
        """`width`: numbers per row. `num_rows` is even."""
        assert num_rows % 2 == 0, num_rows
        self._device, self._width = device, width
        # each row begins at a multiple of 16 bytes, so that one compiled kernel reads all
        shape = num_rows, width + width % 2
        self._rows = torch.zeros(shape, dtype=torch.int64, pin_memory=kind_of(device).is_apart)
        self._next = 0
        self._done: list[torch.cuda.Event | None] = [None, None]  # when the device has read the rows of each half

    def take(self) -> Tensor:
        """Return a row [width] int64 to write, and to launch a kernel with on the current stream, before the next
        call."""
        half_size = len(self._rows) // 2
        half, place = divmod(self._next, half_size)
        if place == 0:
            self._done[1 - half] = recorded_event(self._device)
            before, self._done[half] = self._done[half], None
            if before is not None:
                before.synchronize()
        row = self._rows[self._next, : self._width]
        self._next = (self._next + 1) % len(self._rows)
        return row
