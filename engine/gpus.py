"""The GPUs of this host and their memory, read without torch: from device files, and from nvidia-smi with a limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from ..metadata.errors import Unavailable

_LIMIT_S = 15.0
_TORCH_LIMIT_S = 60.0  # loading torch takes seconds, more on a slow disk
_ASK_TORCH = "import torch; print(torch.cuda.is_available())"
_MIB = 1 << 20


class UsedMemory(msgspec.Struct, frozen=True):
    """Memory of a GPU that is in use, as nvidia-smi tells."""

    bus: str
    used_bytes: int
    total_bytes: int


class LimitedRun:
    """A run of a program that answers a question. Nobody waits for it for longer than `limit_s`."""

    def __init__(self, argv: list[str], limit_s: float) -> None:
        """Start it. Raises OSError."""
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def output(self) -> bytes:
        """Return what it prints. Raises Unavailable if it hangs or fails."""
        process = self._process
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)  # a process that waits in a driver cannot be ended
            raise Unavailable(f"no answer within {self._limit_s:g} s") from None
        if process.returncode:
            raise Unavailable(f"the process that asked ended with status {process.returncode}")
        return output


def device_files() -> list[Path]:
    """Return the device files of the GPUs of this host."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def visible_gpus() -> list[str]:
    """Return the GPUs that nodes of this host may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    return [str(index) for index, _ in enumerate(device_files())]


def lacks_cuda() -> bool:
    """Return whether torch would find no GPU for `--device cuda`. If no device files tell of one, torch is asked, in a
    process of its own: not every driver has files of these names. If torch does not answer, the nodes will tell."""
    if device_files() and visible_gpus():
        return False
    try:
        return LimitedRun([sys.executable, "-P", "-c", _ASK_TORCH], _TORCH_LIMIT_S).output().strip() == b"False"
    except (OSError, Unavailable):
        return False


def read_memory(gpus: str | None = None) -> tuple[UsedMemory, ...]:
    """Return the memory of these GPUs (None: of all), none if nvidia-smi is missing, hangs or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=pci.bus_id,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        run = LimitedRun(query if gpus is None else [*query, "-i", gpus], _LIMIT_S)
        return parse_used(run.output().decode("utf-8", "replace"))
    except (OSError, Unavailable):
        return ()


def gpu_memory() -> list[int]:
    """Return the bytes of each GPU that nodes of this host may use; none if that cannot be told without torch."""
    if not visible_gpus() or not device_files():
        return []
    return [each.total_bytes for each in read_memory(os.environ.get("CUDA_VISIBLE_DEVICES"))]


def parse_used(text: str) -> tuple[UsedMemory, ...]:
    """Return the rows of nvidia-smi's table. A row that it could not fill is left out."""
    rows: list[UsedMemory] = []
    for line in text.splitlines():
        with suppress(ValueError):
            bus, used, total = (word.strip() for word in line.split(","))
            rows.append(UsedMemory(short_bus(bus), int(used) * _MIB, int(total) * _MIB))
    return tuple(rows)


def short_bus(bus: str) -> str:
    """Return a PCI address as the driver and sysfs write it: nvidia-smi writes the domain with eight digits."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
