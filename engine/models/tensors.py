"""Reading a drafter head's tensors by name, with or without a leading `model.`: published files have both habits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...metadata.errors import ModelError
from ..checkpoint import Checkpoint, TensorSpec
from ..layers import Linear
from ..model_config import ModelConfig
from ..weights import LayerWeights, TensorReader, layer_tensors, read_layer


class HeadTensors:
    """The tensors of one directory, in `dtype` on `device`. Every read raises ModelError for a missing or odd one."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = Checkpoint(directory)
        self._dtype = dtype
        self._device = device
        self._asked: set[str] = set()  # names

    def has(self, name: str) -> bool:
        return self._name(name) in self._checkpoint.names

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader({self._name(name): shape}).fused(self._name(name))

    def ids(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers, as int64."""
        self._asked.add(self._name(name))
        return self._checkpoint.read(self._name(name)).to(self._device, torch.int64)

    def linear(self, name: str, out_size: int, in_size: int) -> Linear:
        """Weight, and bias where there is one."""
        bias = self.tensor(f"{name}.bias", out_size) if self.has(f"{name}.bias") else None
        linear = Linear(self.tensor(f"{name}.weight", out_size, in_size), bias)
        linear.pack()
        return linear

    def fused(self, prefix: str, parts: tuple[str, ...], part_size: int, in_size: int) -> Linear:
        """Several weights of equal size, one below the other."""
        names = [self._name(f"{prefix}.{part}.weight") for part in parts]
        linear = Linear(self._reader(dict.fromkeys(names, (part_size, in_size))).fused(*names), None)
        linear.pack()
        return linear

    def layer(
        self, prefix: str, config: ModelConfig, *, has_input_norm: bool = True, qkv_in: int | None = None
    ) -> LayerWeights:
        """A decoder layer, with the biases that the file has, whatever config.json says of them; without an input norm,
        ones stand in for it. `qkv_in`: width that q, k and v read."""
        config = replace(
            config,
            qkv_bias=self.has(f"{prefix}.self_attn.q_proj.bias"),
            attention_bias=self.has(f"{prefix}.self_attn.o_proj.bias"),
            mlp_bias=self.has(f"{prefix}.mlp.down_proj.bias"),
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in layer_tensors(config):
            if name == "input_layernorm.weight" and not has_input_norm:
                continue
            is_qkv = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            shapes[self._name(f"{prefix}.{name}")] = (shape[0], qkv_in) if is_qkv and qkv_in is not None else shape
        last = "post_attention_layernorm.weight"
        stem = self._name(f"{prefix}.{last}").removesuffix(f".{last}")
        ones = None if has_input_norm else torch.ones(config.hidden_size, dtype=self._dtype, device=self._device)
        return read_layer(self._reader(shapes), stem, config, attention_norm=ones)

    def refuse_unknown(self, *ignored: str, within: str = "") -> None:
        """Once all is read: a tensor whose name begins with `within` that nobody asked for, and that is none of
        `ignored`, means that the head would be computed wrongly. Raises ModelError naming it."""
        known = self._asked | {self._name(name) for name in ignored}
        unknown = {name for name in self._checkpoint.names - known if name.startswith(within)}
        unknown = {name for name in unknown if not name.endswith("rotary_emb.inv_freq")}
        if unknown:
            raise ModelError(
                f"{self._checkpoint.model_dir} has tensors that no layout served here uses:"
                f" {', '.join(sorted(unknown)[:3])} (see docs/drafter_checkpoints.md)"
            )

    def _name(self, name: str) -> str:
        return name if name in self._checkpoint.names else f"model.{name}"

    def _reader(self, shapes: Mapping[str, tuple[int, ...]]) -> TensorReader:
        self._asked |= set(shapes)
        specs = {name: TensorSpec(name, shape) for name, shape in shapes.items()}
        total = self._checkpoint.check(list(specs.values()))
        return TensorReader(self._checkpoint, specs, self._dtype, self._device, total, None)
