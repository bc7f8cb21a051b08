"""The file that keeps measured launch configurations from one start of a node to the next.

    ~/.cache/baton/products-nvidia-h200-1f6e3a90.json        (or below XDG_CACHE_HOME)

There is one file per kind of GPU and per versions of torch, Triton and Baton's kernels, whose digest is in the name and
in the file. A file that cannot be used is ignored with one line in the log, and the node measures anew.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import filelock
import msgspec
import torch
import xxhash

from ...kernels.products import linear_configs
from ...kernels.products.linear_configs import Config, ProductShape

logger = logging.getLogger(__name__)

Choices = dict[ProductShape, Config | None]

_KERNELS = ("linear_configs", "triton_linear", "triton_vector", "triton_norm", "triton_silu")  # whose times are kept
_WAIT_S = 120.0  # for another node that measures on this GPU


class _Content(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Content of the file: the device, the versions, and the configuration of each shape."""

    device: str
    versions: str
    products: list[tuple[ProductShape, Config | None]]  # null: torch's product


def encode(choices: Choices) -> bytes:
    """Return choices as bytes, for another rank."""
    return msgspec.msgpack.encode(list(choices.items()))


def decode(data: bytes) -> Choices:
    """Return the choices of `encode`."""
    return dict(msgspec.msgpack.decode(data, type=list[tuple[ProductShape, Config | None]]))


class TuningFile:
    """Owns the file of one GPU and the lock by which the nodes of a GPU measure one after the other."""

    def __init__(self, device: str, versions: str, directory: Path | None = None, lock: Path | None = None) -> None:
        """Name the file and the lock; neither is opened.

        Args:
            device: the kind of GPU. Measurements of another kind are ignored.
            versions: of torch, Triton and so on. Measurements of others are ignored.
            directory: of the file; None: the user's cache.
            lock: the file that processes lock which use the same GPU, also if their directories differ; None: one in
                the directory for temporary files.
        """
        self.device, self.versions = device, versions
        digest = xxhash.xxh3_64_hexdigest(f"{device}\n{versions}".encode())[:8]
        slug = re.sub(r"[^a-z0-9]+", "-", device.split(",", maxsplit=1)[0].lower()).strip("-")
        self.path = (directory or cache_directory()) / f"products-{slug}-{digest}.json"
        self._lock = lock or Path(tempfile.gettempdir()) / f"baton-tuning-{os.getuid()}-{digest}.lock"

    @classmethod
    def of(cls, device: torch.device) -> TuningFile:
        """Return the file for a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, capability {properties.major}.{properties.minor}"
        name += f", {properties.multi_processor_count} multiprocessors"
        lock = Path(tempfile.gettempdir()) / f"baton-tuning-{os.getuid()}-{properties.uuid}.lock"
        return cls(name, _versions(), lock=lock)

    def read(self) -> Choices:
        """Return the choices in the file; none if there is no file, or if it cannot be used."""
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
            if (content.device, content.versions) != (self.device, self.versions):
                raise ValueError(f"it is for {content.device} with {content.versions}")
            for shape, config in content.products:
                linear_configs.check(shape, config)
            return dict(content.products)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s is ignored, and products are measured anew: %s", self.path, error)
            return {}

    def write(self, choices: Choices) -> bool:
        """Replace the file. Returns whether that worked; if not, one line in the log says why."""
        lines = ",\n".join(msgspec.json.encode(each).decode() for each in choices.items())
        head = f'{{"device": "{self.device}", "versions": "{self.versions}", "products": ['
        data = f"{head}\n{lines}\n]}}\n".encode()
        new = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
            new.replace(self.path)
        except OSError as error:
            logger.warning("%s cannot be written, so the next start measures again: %s", self.path, error)
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        return True

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Wait until no other node of this user measures on this GPU. Yields whether one did; then the file may be new.
        Without a lock, or after two minutes, go on all the same: the figures are then less exact."""
        lock, has_waited = filelock.FileLock(self._lock, mode=0o600), False
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("waiting for another node that measures products on this GPU")
            has_waited = True
            self._acquire(lock, _WAIT_S)
        except OSError as error:
            logger.warning("products are measured without the lock %s: %s", self._lock, error)
        try:
            yield has_waited
        finally:
            lock.release()

    def _acquire(self, lock: filelock.BaseFileLock, wait_s: float) -> None:
        try:
            lock.acquire(timeout=wait_s)
        except (filelock.Timeout, OSError) as error:
            logger.warning("products are measured without the lock %s: %s", self._lock, error)


def cache_directory() -> Path:
    """Return the directory for files that may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "baton"


def _versions() -> str:
    folder = Path(linear_configs.__file__).parent
    sources = b"".join((folder / f"{name}.py").read_bytes() for name in _KERNELS)
    return f"torch {torch.__version__}, triton {version('triton')}, kernels {xxhash.xxh3_64_hexdigest(sources)}"
