"""Weights that are made instead of read (--load-format), so that a model of full size is measured without its files.

A directory with config.json and the tokenizer is enough. `dummy` draws random numbers, whose text is noise;
`MODULE:FUNCTION` calls a function of the operator's, which gets the model's configuration and returns the function that
makes a tensor of a `TensorSpec`. A tensor follows from its name, so nodes with one kind of device have the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from importlib import import_module
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ...kernels.experts.mxfp4 import GROUP
from ...metadata.errors import ConfigError
from .checkpoint import Checkpoint, TensorSpec
from .model_check import FILES
from .model_config import ModelConfig

DUMMY = "dummy"  # value of --load-format; any other than this and FILES names a function
_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
_SPREAD = 64.0  # of e4m3 numbers
_SCALE = 2.0**-12  # of e4m3 numbers, so that a weight spreads like one of 4,096 columns
_SPREAD_OF_BYTES = math.sqrt(68.5 / 8)  # of MXFP4 numbers whose bytes are equally frequent, without their scales

MakeTensor = Callable[[TensorSpec], Tensor]


class EveryName(Container[str]):
    """The names of a checkpoint that has whatever its format asks for: scales of all but heads, products that make
    entries (DeepSeek-V4), and b and a of a delta rule (Qwen3-Next), and no biases."""

    def __contains__(self, name: object) -> bool:
        is_plain = str(name).startswith(("lm_head.weight_", "head.scale"))
        is_plain |= any(each in str(name) for each in (".compressor.", ".in_proj_b", ".in_proj_a."))
        return not str(name).endswith(".bias") and not (is_plain and "scale" in str(name))


class MadeCheckpoint(Checkpoint):
    """Tensors of these shapes, made when they are read."""

    def __init__(self, model_dir: Path, specs: Sequence[TensorSpec], make: MakeTensor) -> None:
        self.model_dir, self.num_left_out = model_dir, 0
        self._specs, self._make = {spec.name: spec for spec in specs}, make
        self.names = frozenset(self._specs)

    def check(self, specs: Sequence[TensorSpec]) -> int:
        return sum(torch.Size(spec.shape).numel() * _BYTES.get(spec.dtypes[0], 2) for spec in specs)

    def read(self, name: str) -> Tensor:
        return self._make(self._specs[name])


def maker(load_format: str, config: ModelConfig, device: torch.device) -> MakeTensor:
    """Return what makes the tensors. Raises ConfigError for a format that is neither `dummy` nor a function."""
    if load_format == DUMMY:
        return lambda spec: dummy_tensor(spec, device)
    module, _, function = load_format.partition(":")
    try:
        return getattr(import_module(module), function)(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--load-format {load_format}: {error}; use {FILES}, {DUMMY}, or MODULE:FUNCTION of a module on PYTHONPATH"
        ) from None


def dummy_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    """Draw a tensor on a device: ones for norms, zeros for biases, and matrices that keep the scale of their input."""
    generator = torch.Generator(device).manual_seed(xxhash.xxh3_64_intdigest(spec.name.encode()) >> 1)
    if spec.dtypes[0] == "I64":  # experts of a token id
        return torch.arange(spec.shape[-1], device=device).expand(spec.shape)
    if spec.dtypes[0] == "F8_E8M0" or (spec.dtypes[0] == "U8" and spec.name.endswith("_scales")):
        exponent = round(-math.log2(_SPREAD_OF_BYTES * math.sqrt(spec.shape[-1] * GROUP)))
        return torch.full(spec.shape, 127 + exponent, dtype=torch.uint8, device=device)
    if spec.dtypes[0] in ("U8", "I8"):
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device, generator=generator)
    if spec.name.endswith("bias"):  # equal for all tokens, so that with others a router would send all to few experts
        return torch.zeros(spec.shape, device=device)
    if "scale" in spec.name.rpartition(".")[2]:
        return torch.full(
            spec.shape,
            1 / _SPREAD if spec.name.endswith(("input_scale", "activation_scale")) else _SCALE,
            device=device,
        )
    if len(spec.shape) < 2:
        return torch.ones(spec.shape, device=device)
    numbers = torch.randn(spec.shape, device=device, generator=generator)
    if spec.dtypes[0] == "F8_E4M3":
        return numbers.mul_(_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return numbers.mul_(spec.shape[-1] ** -0.5)
