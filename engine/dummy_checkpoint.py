"""Weights that are made instead of read (--load-format dummy): a model of full size is measured without its files.

A directory with config.json and the tokenizer is enough. The numbers of a tensor follow from its name, so all nodes
with one kind of device have the same model. Its text is noise.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import torch
import xxhash

from .checkpoint import Checkpoint, TensorSpec

_BYTES = {"F8_E4M3": 1, "U8": 1}
_SPREAD = 64.0  # of e4m3 numbers
_SCALE = 2.0**-12  # of e4m3 numbers, so that a weight spreads like one of 4,096 columns


class EveryName(Container[str]):
    """The names of a checkpoint that has whatever its format asks for: all scales, and no biases."""

    def __contains__(self, name: object) -> bool:
        return not str(name).endswith(".bias") and not str(name).startswith("lm_head.weight_")


class DummyCheckpoint(Checkpoint):
    """Tensors of these shapes, made on the device when they are read."""

    def __init__(self, model_dir: Path, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self.model_dir, self.num_left_out = model_dir, 0
        self._specs, self._device = {spec.name: spec for spec in specs}, device
        self.names = frozenset(self._specs)

    def check(self, specs: Sequence[TensorSpec]) -> int:
        return sum(torch.Size(spec.shape).numel() * _BYTES.get(spec.dtypes[0], 2) for spec in specs)

    def read(self, name: str) -> torch.Tensor:
        spec, device = self._specs[name], self._device
        generator = torch.Generator(device).manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        if spec.dtypes[0] == "U8":
            return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device, generator=generator)
        if "scale" in name.rpartition(".")[2]:
            return torch.full(spec.shape, 1 / _SPREAD if name.endswith("input_scale") else _SCALE, device=device)
        if len(spec.shape) < 2:
            return torch.ones(spec.shape, device=device)
        numbers = torch.randn(spec.shape, device=device, generator=generator)
        if spec.dtypes[0] == "F8_E4M3":
            return numbers.mul_(_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return numbers.mul_(spec.shape[-1] ** -0.5)
