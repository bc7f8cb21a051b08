"""Facts about the GPUs of this host: from device files, the driver, nvidia-smi and torch, each with a time limit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from ...engine.gpus import LimitedRun, UsedMemory, device_files, read_memory, short_bus
from ...metadata.errors import Unavailable

_PROBE = Path(__file__).with_name("probe.py")
_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAYS = "0x03"  # PCI class of graphics and of 3D controllers
_DRIVER_S = 15.0
_TORCH_S = 60.0  # the first import reads some gigabytes


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of another process. `failure` is the reason if there is none, else empty."""

    failure: str = ""


_Answer = TypeVar("_Answer", bound=ProbeAnswer)


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that the driver shows to this process. `can_share`: its memory can be given away as file descriptors."""

    name: str
    bus: str  # PCI address
    num_bytes: int
    can_share: bool


class Driver(ProbeAnswer, frozen=True, kw_only=True):
    """Answer of the CUDA driver. `cuda`: the newest CUDA that it serves. `apart`: pairs of GPUs, by index, of which one
    cannot read the other's memory."""

    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


class Torch(ProbeAnswer, frozen=True, kw_only=True):
    """Answer of torch. `cuda` is None if it was built without. `words`: its own, if it sees no GPU."""

    version: str = ""
    cuda: str | None = None
    num_gpus: int = 0
    words: str = ""


class DeviceFile(msgspec.Struct, frozen=True):
    """A file /dev/nvidia*, and whether this user may open it."""

    path: str
    is_open_to_us: bool


class NumaPlace(msgspec.Struct, frozen=True):
    """The NUMA node of a GPU and its cores."""

    bus: str
    numa_node: int
    cores: frozenset[int]


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the GPUs of this host. `num_on_bus`: GPUs of NVIDIA that the kernel lists, also if they are hidden
    from this container. `used` is empty without nvidia-smi. `visible`: CUDA_VISIBLE_DEVICES, if it is set."""

    num_on_bus: int = 0
    files: tuple[DeviceFile, ...] = ()
    driver: Driver = Driver(failure="there is no libcuda.so.1")
    torch: Torch | None = None  # None: not installed
    used: tuple[UsedMemory, ...] = ()
    places: tuple[NumaPlace, ...] = ()
    visible: str | None = None

    @property
    def is_any(self) -> bool:
        """Whether this host has a GPU, as far as this process can see."""
        return bool(self.files or self.driver.gpus or self.used)


class ProbeRun(LimitedRun):
    """A run of a program that prints an answer in JSON."""

    def answer(self, kind: type[_Answer]) -> _Answer:
        """Return the JSON that it prints last, as this type. What went wrong is the `failure` of the answer."""
        try:
            return msgspec.json.decode(self.output().splitlines()[-1], type=kind)
        except (Unavailable, IndexError, msgspec.DecodeError) as error:
            return kind(failure=str(error))


def read_gpus(*, has_torch: bool) -> GpuFacts:
    """Read all facts about GPUs. Takes about as long as `import torch`."""
    of_torch = _probe("torch", _TORCH_S) if has_torch else None
    of_driver = _probe("driver", _DRIVER_S)
    used = read_memory()
    driver = of_driver.answer(Driver)
    return GpuFacts(
        num_on_bus=sum(map(_is_gpu, _DEVICES.glob("*"))),
        files=tuple(DeviceFile(str(path), os.access(path, os.R_OK | os.W_OK)) for path in device_files()),
        driver=driver,
        torch=of_torch.answer(Torch) if of_torch is not None else None,
        used=used,
        places=tuple(place for gpu in driver.gpus if (place := _place(gpu.bus)) is not None),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _probe(what: str, limit_s: float) -> ProbeRun:
    return ProbeRun([sys.executable, "-P", str(_PROBE), what], limit_s)


def _is_gpu(device: Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(
            _DISPLAYS
        )
    except OSError:
        return False


def _place(bus: str) -> NumaPlace | None:
    folder = _DEVICES / short_bus(bus)
    try:
        node, cores = int((folder / "numa_node").read_text()), parse_cores((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return NumaPlace(bus, node, cores) if node >= 0 else None


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers in a list of cores such as 0-3,8. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
