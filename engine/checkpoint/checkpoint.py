"""The *.safetensors files of a model directory: how they are found, checked, read and digested.

Pickles are never opened."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from ...metadata.errors import ModelError
from .model_files import safetensors_files, stored_tensors
from .tensor_names import text_tensors

_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E8M0": 1}
FLOATS = ("F32", "BF16", "F16")  # dtypes, as safetensors names them, that every backend converts


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model needs of its checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS  # those that its reader understands


class Checkpoint:
    """The *.safetensors files of a directory, opened but not read. If they hold other models beside the text model, its
    tensors alone are here, under the names that they have in a checkpoint of its own."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ModelError if the files are missing or damaged."""
        self.model_dir = Path(model_dir)
        file_of: dict[str, safe_open] = {}
        for path in safetensors_files(self.model_dir):
            stored_tensors(path)  # whose errors say more than those of the library
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged or cut short ({error}); copy the checkpoint again") from None
            file_of.update(dict.fromkeys(file.keys(), file))
        self._stored_name = text_tensors(file_of, self.model_dir)
        self._file_of = {name: file_of[stored] for name, stored in self._stored_name.items()}
        self.names = frozenset(self._file_of)  # of all tensors
        self.num_left_out = len(file_of) - len(self._file_of)  # tensors of other models

    def check(self, specs: Sequence[TensorSpec]) -> int:
        """Return the bytes that the tensors take in the files. Raises ModelError if one is missing, or has another
        shape or dtype."""
        missing = [spec.name for spec in specs if spec.name not in self._file_of]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(
                f"{self.model_dir} lacks tensors that its config.json calls for: {', '.join(missing[:3])}{more}"
            )
        num_bytes = 0
        for spec in specs:
            tensor = self._file_of[spec.name].get_slice(self._stored_name[spec.name])
            shape = tuple(tensor.get_shape())
            if shape != spec.shape and not (spec.shape == () and shape == (1,)):  # one number, in both spellings
                raise ModelError(
                    f"{self.model_dir}: {spec.name} has shape {list(shape)}, config.json calls for {list(spec.shape)}"
                )
            if tensor.get_dtype() not in spec.dtypes:
                raise ModelError(
                    f"{self.model_dir}: {spec.name} is {tensor.get_dtype()}; only {', '.join(spec.dtypes)} are served"
                )
            num_bytes += torch.Size(shape).numel() * _BYTES[tensor.get_dtype()]
        return num_bytes

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, which is mapped from the file: copy it before the file may change."""
        return self._file_of[name].get_tensor(self._stored_name[name])


def tensor_digests(path: Path) -> dict[str, bytes]:
    """Return XXH3-128 of the name, dtype, shape and bytes of each tensor of a file, by name. Raises ModelError if the
    file is damaged.

    Format: 8 bytes little-endian header length, a JSON header of {name: {dtype, shape, data_offsets}}, the data."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            start = 8 + int.from_bytes(view[:8], "little")
            header: dict[str, Any] = json.loads(bytes(view[8:start]))
            header.pop("__metadata__", None)
            return {name: _tensor_digest(name, entry, view, start) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); copy the checkpoint again") from None


def _tensor_digest(name: str, entry: dict[str, Any], view: memoryview, start: int) -> bytes:
    begin, end = (start + offset for offset in entry["data_offsets"])
    if end > len(view):
        raise ValueError(f"{name} ends at byte {end} of {len(view)}")
    digest = xxhash.xxh3_128(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
    with view[begin:end] as content:
        digest.update(content)
    return digest.digest()
