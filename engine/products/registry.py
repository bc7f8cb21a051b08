"""The list of product formats, and the choice of the one that serves a weight on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...kernels.experts.experts import ExpertWeight
from ...metadata.errors import ModelError
from ..checkpoint.quantization import Quantization
from . import dense, fp8, mxfp4
from .base import Product, StoredTensor, WeightSource
from .blocked import BlockedProduct
from .dense import DenseProduct
from .fp8 import Fp8Product, Fp8ProductOnCpu, RowRounding
from .half import HalfProduct

# The tensors of a weight fix its format: the first whose tensors are all there. Of the products that read this format,
# the first that serves the device holds the weight. A format with more tensors stands before those with fewer.
PRODUCTS: tuple[type[Product], ...] = (Fp8ProductOnCpu, Fp8Product, HalfProduct, BlockedProduct, DenseProduct)

# The same for the weights of all experts: a function of each format. The last one takes what the others leave.
EXPERTS: tuple[Callable[[WeightSource], tuple[ExpertWeight, RowRounding | None] | None], ...]
EXPERTS = (mxfp4.read_experts, fp8.read_experts, dense.read_experts)


def stored_tensors(
    has: Callable[[str], bool], out_size: int, in_size: int, quantization: Quantization | None
) -> Mapping[str, StoredTensor]:
    """Return the tensors that hold one projection: those of the first format whose tensors are all there.

    `has` tells whether there is a tensor of this name ("weight"). If no format finds all of its own, the tensors are
    those of the last one, a plain weight. Experts in MXFP4 have tensors of their own."""
    if quantization is not None and quantization.weight_scale == "mxfp4" and quantization.scale_name == "scale":
        return mxfp4.tensors(out_size, in_size, quantization)
    for product in PRODUCTS:
        tensors = product.tensors(out_size, in_size, quantization)
        if tensors is not None and all(map(has, tensors)):
            return tensors
    plain = PRODUCTS[-1].tensors(out_size, in_size, quantization)
    assert plain is not None, "a plain weight is in every format"
    return plain


def choose(source: WeightSource) -> Product:
    """Make the product of a weight. Raises ModelError if none of those that read its format serves the device."""
    for product in _readers(source):
        if (built := product.build(source)) is not None:
            return built
    stored = stored_tensors(source.has, source.out_sizes[0], source.in_size, source.quantization)
    raise ModelError(f"weights of {' and '.join(stored)} in {source.dtype} are not served on {source.device.type}")


def read_experts(source: WeightSource) -> tuple[ExpertWeight, RowRounding | None]:
    """Return the weights of all experts in the format that their tensors have, and how rows are rounded for them; None:
    they are not."""
    return next(found for read in EXPERTS if (found := read(source)) is not None)


def plain_numbers(source: WeightSource) -> Tensor:
    """Return the numbers that a weight stands for, as `Product.numbers`."""
    return _readers(source)[0].numbers(source)


def _readers(source: WeightSource) -> list[type[Product]]:
    """Return the products that read the format of a weight, in order."""
    sizes = source.out_sizes[0], source.in_size, source.quantization
    stored = stored_tensors(source.has, *sizes)
    return [product for product in PRODUCTS if product.tensors(*sizes) == stored]
