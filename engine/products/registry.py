"""The list of product formats, and the choice of the one that serves a weight on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...metadata.errors import ModelError
from ..quantization import Quantization
from .base import Product, StoredTensor, WeightSource
from .blocked import BlockedProduct
from .dense import DenseProduct
from .fp8 import Fp8Product, Fp8ProductOnCpu
from .half import HalfProduct

# The tensors of a weight fix its format: the first whose tensors are all there. Of the products that read this format,
# the first that serves the device holds the weight. A format with more tensors stands before those with fewer.
PRODUCTS: tuple[type[Product], ...] = (Fp8ProductOnCpu, Fp8Product, HalfProduct, BlockedProduct, DenseProduct)


def stored_tensors(
    has: Callable[[str], bool], out_size: int, in_size: int, quantization: Quantization | None
) -> Mapping[str, StoredTensor]:
    """Return the tensors that hold one projection: those of the first format whose tensors are all there.

    `has` tells whether there is a tensor of this name ("weight"). If no format finds all of its own, the tensors are
    those of the last one, a plain weight."""
    for product in PRODUCTS:
        tensors = product.tensors(out_size, in_size, quantization)
        if tensors is not None and all(map(has, tensors)):
            return tensors
    plain = PRODUCTS[-1].tensors(out_size, in_size, quantization)
    assert plain is not None, "a plain weight is in every format"
    return plain


def choose(source: WeightSource) -> Product:
    """Make the product of a weight. Raises ModelError if none of those that read its format serves the device."""
    sizes = source.out_sizes[0], source.in_size, source.quantization
    stored = stored_tensors(source.has, *sizes)
    for product in PRODUCTS:
        if product.tensors(*sizes) == stored and (built := product.build(source)) is not None:
            return built
    raise ModelError(f"weights of {' and '.join(stored)} in {source.dtype} are not served on {source.device.type}")
