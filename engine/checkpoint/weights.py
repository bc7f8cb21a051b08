"""The weights of a model by name: a model family asks for tensors and linear layers, and these classes provide them.

The same code of a family lists the tensors that a checkpoint must have (`ListedWeights`) and then reads them
(`CheckpointWeights`), so the two can never differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ...metadata.errors import ModelError
from ..products.base import GivenWeight, Split, StoredTensor, WeightShard, WeightSource
from ..products.linear import Linear
from ..products.registry import choose, stored_tensors
from ..progress import Progress
from ..ranks.ranks import ONE_RANK, Ranks
from .checkpoint import Checkpoint, TensorSpec
from .model_config import ModelConfig
from .quantization import Quantization

RowOrders = Mapping[str, Tensor]  # projection -> [out_size] int64: row `order[i]` of the checkpoint becomes row i
NO_ORDERS: RowOrders = MappingProxyType({})

# Ends of the names of tensors that a checkpoint may have and nobody needs. Scales are those of an attention in FP8, as
# compressed-tensors, ModelOpt and AutoFP8 call them: pages in FP8 have scales of their own.
UNUSED = (
    "rotary_emb.inv_freq",
    *(f"self_attn.{name}_scale" for name in ("q", "k", "v", "kv")),
    *(f"self_attn.{name}_proj.{kind}_scale" for name in ("k", "v") for kind in (name, "output")),
)


class Weights(ABC):
    """Provides weights in `dtype` on `device`. Every method raises ModelError for a tensor that is missing, or of
    another shape or dtype."""

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = ONE_RANK  # that divide the weights
    quantization: Quantization | None = None  # of the linear layers

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def is_scaled(self, projection: str) -> bool:
        """Return whether the checkpoint has scales of a projection."""
        quantization = self.quantization
        if quantization is None or quantization.is_online:
            return False
        return self.has(f"{projection}.{quantization.scale_name}")

    @abstractmethod
    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape, in memory of its own, in `dtype` (None: the model's)."""

    @abstractmethod
    def stored(self, specs: Collection[TensorSpec]) -> list[Tensor]:
        """Return tensors as they are in the file: copy them, their memory may be the file's. One number has no
        dimension, even if it has one in the file."""

    @abstractmethod
    def source(
        self,
        out_sizes: Mapping[str, int],
        in_size: int,
        *,
        bias: bool | None = None,
        split: Split | None = None,
        orders: RowOrders = NO_ORDERS,
        are_experts: bool = False,
    ) -> WeightSource:
        """Return this rank's share of several weights, one below the other, before a product holds them. Arguments as
        for `fused`. `are_experts`: the weights may have a quantization of their own."""

    def fused(
        self,
        out_sizes: Mapping[str, int],
        in_size: int,
        *,
        bias: bool | None = None,
        split: Split | None = None,
        orders: RowOrders = NO_ORDERS,
    ) -> Linear:
        """Return one layer that computes several projections of the same input, one below the other.

        `out_sizes`: the projections' names without ".weight", in this order. `bias`: whether they have biases; None:
        they have those that the checkpoint holds. `split`: how ranks may divide each projection; None: each rank has
        all of it. Sizes are those of the whole weight. `orders`: rows of projections that are not in the order of the
        checkpoint."""
        source = self.source(out_sizes, in_size, bias=bias, split=split, orders=orders)
        product, shard = choose(source), self.ranks.shard(split)  # at once: two forms of one layer, never of several
        return Linear(product if shard is None else self.ranks.join(product, shard))

    def linear(
        self, name: str, out_size: int, in_size: int, *, bias: bool | None = None, split: Split | None = None
    ) -> Linear:
        """Return the layer of one projection, as `fused` does."""
        return self.fused({name: out_size}, in_size, bias=bias, split=split)

    def own(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with the heads that this rank reads: of the whole model, unless ranks divide it."""
        return config


class ListedWeights(Weights):
    """Lists the tensors that are asked for, in `specs`. What it returns has shapes but no values."""

    def __init__(self, names: Container[str] = (), quantization: Quantization | None = None) -> None:
        """`names`: tensors of the checkpoint, which decide the formats and the biases that are listed."""
        self.quantization = quantization
        self.dtype, self.device = torch.float32, torch.device("meta")
        self.specs: list[TensorSpec] = []
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.specs.append(TensorSpec(name, shape))
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def stored(self, specs: Collection[TensorSpec]) -> list[Tensor]:
        self.specs += specs
        return [
            torch.empty(spec.shape, dtype=torch.uint8 if spec.dtypes == ("U8",) else self.dtype, device=self.device)
            for spec in specs
        ]

    def source(
        self,
        out_sizes: Mapping[str, int],
        in_size: int,
        *,
        bias: bool | None = None,
        split: Split | None = None,
        orders: RowOrders = NO_ORDERS,
        are_experts: bool = False,
    ) -> WeightSource:
        del split, orders  # the checkpoint holds whole weights
        quantization = _quantization_of(self.quantization, are_experts)
        for name, tensors in _stored(self, out_sizes, in_size, quantization).items():
            self.specs += [TensorSpec(f"{name}.{last}", each.shape, each.dtypes) for last, each in tensors.items()]
        total = sum(out_sizes.values())
        biases = None
        if _has_bias(self, out_sizes, bias):
            self.specs += [TensorSpec(f"{name}.bias", (out_size,)) for name, out_size in out_sizes.items()]
            biases = torch.empty(total, dtype=self.dtype, device=self.device)
        return GivenWeight(torch.empty((total, in_size), dtype=self.dtype, device=self.device), biases)


class CheckpointWeights(Weights):
    """Reads tensors of a checkpoint, and remembers their names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        bytes_total: int = 0,
        prefixes: tuple[str, ...] = ("",),
        ranks: Ranks = ONE_RANK,
        quantization: Quantization | None = None,
    ) -> None:
        """`progress(bytes_done, bytes_total)` is called when tensors are read. `prefixes`: what may stand before
        a name in this checkpoint; the last one counts if the tensor is missing. `ranks`: those that divide the
        weights."""
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.checkpoint = checkpoint
        self.asked: set[str] = set()  # names of the checkpoint
        self._prefixes, self.ranks = prefixes, ranks
        self._progress, self._bytes_total, self._bytes_done = progress, bytes_total, 0

    def has(self, name: str) -> bool:
        return self.full_name(name) in self.checkpoint.names

    def full_name(self, name: str) -> str:
        """Return the name that the checkpoint has for this tensor."""
        names = [prefix + name for prefix in self._prefixes]
        return next((each for each in names if each in self.checkpoint.names), names[-1])

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        [stored] = self.stored([TensorSpec(name, shape)])
        return out.copy_(stored)

    def source(
        self,
        out_sizes: Mapping[str, int],
        in_size: int,
        *,
        bias: bool | None = None,
        split: Split | None = None,
        orders: RowOrders = NO_ORDERS,
        are_experts: bool = False,
    ) -> WeightSource:
        quantization = _quantization_of(self.quantization, are_experts)
        if quantization is not None and quantization.is_online and (split is None or split.divides == "vocab"):
            quantization = None  # a router of experts, or the head
        has_bias = _has_bias(self, out_sizes, bias)
        return _StoredWeight(
            self, out_sizes, in_size, quantization, has_bias=has_bias, shard=self.ranks.shard(split), orders=orders
        )

    def own(self, config: ModelConfig) -> ModelConfig:
        return self.ranks.own(config)

    def stored(self, specs: Collection[TensorSpec]) -> list[Tensor]:
        found = [TensorSpec(self.full_name(spec.name), spec.shape, spec.dtypes) for spec in specs]
        self._bytes_done += self.checkpoint.check(found)
        self.asked |= {spec.name for spec in found}
        tensors = [self.checkpoint.read(spec.name) for spec in found]
        tensors = [each if spec.shape else each.reshape(()) for each, spec in zip(tensors, found, strict=True)]
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)
        return tensors


class _StoredWeight(WeightSource):
    """The weight of a linear layer in a checkpoint, or this rank's share of it."""

    def __init__(
        self,
        weights: CheckpointWeights,
        projections: Mapping[str, int],
        in_size: int,
        quantization: Quantization | None,
        *,
        has_bias: bool,
        shard: WeightShard | None = None,
        orders: RowOrders = NO_ORDERS,
    ) -> None:
        """`projections` and `in_size` have the sizes in the checkpoint."""
        self.out_sizes, self.in_size, self._in_size = tuple(projections.values()), in_size, in_size
        if shard is not None and shard.dim == 0:
            self.out_sizes = tuple(shard.part_len(size, index) for index, size in enumerate(self.out_sizes))
        elif shard is not None:
            self.in_size //= shard.size
            has_bias = has_bias and shard.rank == 0  # the sum over the ranks has it once
        self._projections, self._shard, self._orders = projections, shard, orders
        self.dtype, self.device, self.quantization = weights.dtype, weights.device, quantization
        self.ranks = weights.ranks.group if shard is not None and shard.dim == 1 else None
        self._weights, self._names, self._has_bias = weights, tuple(projections), has_bias
        self._stored = _stored(weights, projections, in_size, quantization)
        weights.asked |= {weights.full_name(f"{name}.{last}") for name, own in self._stored.items() for last in own}
        self._fused: dict[str, Tensor] = {}

    @property
    def bias(self) -> Tensor | None:
        return self.fused("bias") if self._has_bias else None

    def has(self, name: str) -> bool:
        return all(self._weights.has(f"{each}.{name}") for each in self._names)

    def parts(self, name: str) -> list[Tensor]:
        if name == "bias":
            tensors = [StoredTensor((out_size,)) for out_size in self._projections.values()]
        else:
            tensors = [each[name] for each in self._stored.values()]
        specs = [
            TensorSpec(f"{projection}.{name}", each.shape, each.dtypes)
            for projection, each in zip(self._projections, tensors, strict=True)
        ]
        parts = [
            part if (order := self._orders.get(projection)) is None else in_order(part, order, each.block[0])
            for part, projection, each in zip(self._weights.stored(specs), self._projections, tensors, strict=True)
        ]
        shard = self._shard
        if shard is None or (name == "bias" and shard.dim == 1):
            return parts
        if name in ("weight", "bias"):
            return [shard.take(part, index) for index, part in enumerate(parts)]
        wholes = [(out_size, self._in_size)[shard.dim] for out_size in self._projections.values()]
        return [
            shard.take_scales(part, index, whole, each.block[shard.dim])
            for index, (part, whole, each) in enumerate(zip(parts, wholes, tensors, strict=True))
        ]

    def fused(self, name: str) -> Tensor:
        if name not in self._fused:
            parts = self.parts(name)
            rows = [len(part) for part in parts]
            out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
            for part, own in zip(parts, out.split(rows), strict=True):
                own.copy_(part)
            self._fused[name] = out
        return self._fused[name]


def _stored(
    weights: Weights, projections: Mapping[str, int], in_size: int, quantization: Quantization | None
) -> dict[str, Mapping[str, StoredTensor]]:
    """Return the tensors that hold the weight of each projection, by its name and the last part of theirs. Raises
    ModelError unless all projections are in one format."""
    if quantization is not None and not quantization.is_online:
        scaled = {name: weights.is_scaled(name) for name in projections}
        if len(set(scaled.values())) > 1:
            with_scale, without = (next(name for name in scaled if scaled[name] == has) for has in (True, False))
            raise ModelError(
                f"{with_scale} has a {quantization.scale_name}, but {without} has none; layers that read the same "
                "input must be in one format: quantize both or neither"
            )

    def has(last: str) -> bool:
        return all(weights.has(f"{name}.{last}") for name in projections)

    return {name: stored_tensors(has, out_size, in_size, quantization) for name, out_size in projections.items()}


def in_order(stored: Tensor, order: Tensor, block: int) -> Tensor:
    """Return the rows of a stored tensor in another order, a copy, [out_size, ...]. `block`: rows of the weight that
    share one of its rows, such as a scale. Raises ModelError if the order would divide a block."""
    if stored.ndim == 0:
        return stored
    if block > 1:
        blocks = (order // block)[::block]
        if not torch.equal(order // block, blocks.repeat_interleave(block)[: len(order)]):
            raise ModelError(f"rows of blocks of {block} that share a scale cannot be put into another order")
        order = blocks
    if stored.element_size() == 1:  # torch does not gather rows of 8-bit floats
        return stored.view(torch.uint8)[order].view(stored.dtype)
    return stored[order]


def _quantization_of(quantization: Quantization | None, are_experts: bool) -> Quantization | None:
    return quantization.of_experts if are_experts and quantization is not None else quantization


def _has_bias(weights: Weights, projections: Collection[str], bias: bool | None) -> bool:
    return any(weights.has(f"{name}.bias") for name in projections) if bias is None else bias
