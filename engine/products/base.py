"""The product of a linear layer, y = x W^T + b, in one format of W; and the weight that a product is made from.

A format is a file in this folder and a line in registry.py. It names the tensors that it reads of a checkpoint, makes
its own form of them, multiplies, and says which neighbours of the product its kernels take along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from ...kernels.products.norm import Norm, add_rms_norm_
from ...kernels.products.silu import silu_mul
from ...metadata.errors import ModelError
from ..checkpoint.checkpoint import FLOATS
from ..checkpoint.quantization import Quantization
from ..ranks.group import Group


class StoredTensor(NamedTuple):
    """A tensor that a format keeps in a checkpoint for one projection."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS  # names of safetensors that the format reads
    block: tuple[int, int] = (1, 1)  # rows and columns of the weight that one number of it belongs to


class Split(NamedTuple):
    """A way to divide a weight [out_size, in_size] among ranks."""

    divides: Literal["heads", "inner", "vocab"]  # KV heads with their queries, hidden units, tokens of the vocabulary
    dim: Literal[0, 1]  # 0: rows of the weight; 1: columns, whose products are summed
    num_parts: tuple[int, ...] = ()  # of each projection, at most; more ranks than parts share them. (): no bound


def heads_out(num_heads: int, num_kv_heads: int) -> Split:
    """Return the division of fused q, k and v. If there are fewer KV heads than ranks, several ranks have the same."""
    return Split("heads", 0, (num_heads, num_kv_heads, num_kv_heads))


HEADS_OUT, HEADS_IN = Split("heads", 0), Split("heads", 1)
INNER_OUT, INNER_IN = Split("inner", 0), Split("inner", 1)
VOCAB = Split("vocab", 0)
_VOCAB_UNIT = 16  # a share is a multiple of it, as kernels like the rows of a matrix


class WeightShard(NamedTuple):
    """One rank's share of a weight [out_size, in_size]."""

    rank: int
    size: int  # number of ranks
    dim: Literal[0, 1]  # rows or columns
    num_parts: tuple[int, ...] = ()  # as of `Split`
    pads: bool = False  # the parts have equal lengths after zeros are appended; otherwise they must be equal

    def count(self, index: int) -> int:
        """Return how many parts projection `index` is divided into."""
        return min(self.size, self.num_parts[index]) if self.num_parts else self.size

    def part_len(self, whole: int, index: int) -> int:
        """Return the length of a part of projection `index`, whose dimension `dim` has length `whole`."""
        count = self.count(index)
        if self.pads:
            return -(-whole // (count * _VOCAB_UNIT)) * _VOCAB_UNIT
        assert whole % count == 0 and self.size % count == 0, (whole, index, self)
        return whole // count

    def take(self, stored: Tensor, index: int) -> Tensor:
        """Return this rank's part of dimension `dim` of projection `index`: a view, or a copy with zeros appended."""
        whole = stored.shape[self.dim]
        length = self.part_len(whole, index)
        start = self._start(length, index)
        if start + length <= whole:
            return stored.narrow(self.dim, start, length)
        part = stored.new_zeros([*stored.shape[: self.dim], length, *stored.shape[self.dim + 1 :]])
        own = max(0, whole - start)
        part.narrow(self.dim, 0, own).copy_(stored.narrow(self.dim, whole - own, own))
        return part

    def take_scales(self, stored: Tensor, index: int, whole: int, block: int) -> Tensor:
        """Return this rank's part of the scales of projection `index`, whose dimension `dim` has length `whole`. A
        scale belongs to `block` rows or columns. Raises ModelError if a block would belong to two ranks."""
        if stored.ndim == 0 or stored.shape[self.dim] == 1:
            return stored
        if block == 1:
            return self.take(stored, index)
        length = self.part_len(whole, index)
        start = self._start(length, index)
        if start % block or (length % block and start + length < whole):
            raise ModelError(
                f"{self.size} ranks cannot share {whole} {'columns' if self.dim else 'rows'} of a weight whose scales "
                f"belong to {block} of them; use fewer ranks"
            )
        return stored.narrow(self.dim, start // block, -(-length // block))

    def _start(self, length: int, index: int) -> int:
        return self.rank * self.count(index) // self.size * length


class WeightSource(ABC):
    """The weight of a linear layer before a product holds it.

    The layer computes one projection, or several (q, k, v) that read the same x. Their rows lie one below the other."""

    out_sizes: tuple[int, ...]  # rows of each projection
    in_size: int
    dtype: torch.dtype  # of the model's computation
    device: torch.device
    quantization: Quantization | None = None  # that this layer may have
    ranks: Group | None = None  # that have the other columns, if it is a rank's share of those

    @property
    def is_float32_on_cpu(self) -> bool:
        """Whether the CPU's own forms of weights can serve it."""
        return self.device.type == "cpu" and self.dtype is torch.float32

    @property
    @abstractmethod
    def bias(self) -> Tensor | None:
        """Bias [sum of out_sizes] in `dtype` on `device`, or None."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether every projection has a tensor of this name ("weight")."""

    @abstractmethod
    def parts(self, name: str) -> list[Tensor]:
        """Return the tensor of each projection as it is stored: do not keep it, its memory may be the file's."""

    @abstractmethod
    def fused(self, name: str) -> Tensor:
        """Return the tensors of all projections, one below the other, in `dtype` on `device`. The product may keep it;
        a second call returns the same tensor."""


class GivenWeight(WeightSource):
    """A weight that is in memory, in the dtype and on the device of the model."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_sizes, self.in_size = (weight.shape[0],), weight.shape[1]
        self.dtype, self.device = weight.dtype, weight.device
        self._weight, self._bias = weight, bias

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def has(self, name: str) -> bool:
        return name == "weight"

    def parts(self, name: str) -> list[Tensor]:
        return [self.fused(name)]

    def fused(self, name: str) -> Tensor:
        assert name == "weight", name
        return self._weight


class Sum(Protocol):
    """A sum over ranks, such as that of a `Group`."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, or this rank's rows of it."""
        ...

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' `delta` to `hidden` in place, and return the norm of the result, as
        `Group.sum_norm_`."""
        ...


# The rows x that a product multiplies: a tensor [num_rows, in_size], or what `Product.normed` or `Product.gate` of the
# same product returned.
Rows: TypeAlias = Any


class Product(ABC):
    """A product of one format. The methods that are not abstract serve a format whose kernels fuse nothing."""

    __slots__ = ()

    in_size: int
    out_size: int

    @classmethod
    def tensors(
        cls, out_size: int, in_size: int, quantization: Quantization | None
    ) -> Mapping[str, StoredTensor] | None:
        """Return the tensors of one projection that the format reads, by the last part of their names; the bias is not
        among them. None: it is no format of this quantization."""
        del quantization  # its models have plain layers, too
        return {"weight": StoredTensor((out_size, in_size))}

    @classmethod
    @abstractmethod
    def build(cls, source: WeightSource) -> Self | None:
        """Make the product of a weight that has the format's tensors. Return None if the format does not serve it on
        its device."""

    @classmethod
    def numbers(cls, source: WeightSource) -> Tensor:
        """Return the numbers that a weight of the format stands for: [sum of out_sizes, in_size] of the model's dtype,
        on its device."""
        return source.fused("weight")

    @abstractmethod
    def __call__(self, x: Rows, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """Return the product, [num_rows, in_size] -> [num_rows, out_size], of x's dtype.

        If the product `fuses`, it norms x first by `norm` and adds the result to `residual` [num_rows, out_size] in
        place, which it returns. Otherwise both must be None."""

    @property
    def sums_over(self) -> Sum | None:
        """The ranks whose `parts` must be summed. None: those of this rank are the whole product."""
        return None

    @property
    def alone(self) -> Product:
        """The product of this rank's share, which waits for no other rank."""
        return self

    @property
    def rounds(self) -> bool:
        """Whether the product rounds its rows, so that `normed` and `gate` had better round them as well."""
        return False

    def normed(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Rows:
        """Do `add_rms_norm_` (norm.py), and return its result as this product takes it."""
        return add_rms_norm_(hidden, delta, norm.weight, norm.eps)

    def gate(self, gate_up: Tensor) -> Rows:
        """Return `silu_mul` of `gate_up` [num_rows, 2 * in_size] as this product takes it."""
        return silu_mul(gate_up)

    def parts(self, x: Rows) -> Tensor:
        """Return the product, or float32 summands of it, [num_parts, num_rows, out_size], if a kernel leaves the sum to
        the kernel that reads it (`add_rms_norm_`). The sum over ranks is left to the reader, too (`sums_over`)."""
        return self(x)

    def gated(self, x: Rows, *, norm: Norm | None = None) -> Tensor:
        """Return `silu_mul` of the product, whose first half is the gate: [num_rows, out_size / 2]. `norm` as above."""
        assert norm is None, "nothing is fused here"
        return silu_mul(self(x))

    def gates(self, x: Rows) -> bool:
        """Return whether one kernel does `gated`, so that the rows need no pass of their own for the gate."""
        return False

    def fuses(self, x: Rows, *, is_gated: bool = False) -> bool:
        """Return whether one kernel norms x, multiplies, and adds to a residual (`is_gated`: or gates)."""
        return False
