"""Launches of short Triton kernels, without Triton's look at each argument, which takes longer than such a kernel.

Triton's public form of a launch, `kernel[grid](...)`, looks at each argument to choose among the compiled kernels. Here
the caller names what the choice depends on. So a later launch hands the arguments to the compiled kernel directly. That
form is internal to Triton. If it fails, the public form is used from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import triton

logger = logging.getLogger(__name__)

# Kernels and their compiled forms, by what they were compiled for. None: use the public form.
_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}


class Pointer(Protocol):
    """A tensor, or an address that a kernel takes like one."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    pointers: tuple[Pointer, ...],
    others: tuple[Any, ...],
    constants: Mapping[str, Any],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    *,
    num_warps: int = 4,
) -> None:
    """Launch `kernel` on `grid` with the arguments `pointers`, then `others`, on `stream` (None: the current one).

    The kernel is compiled per dtype and alignment of `pointers`, and per `constants`, its last arguments, in their
    order. Triton must not specialize it on any of the `others`: they are integers of 32 bits that do_not_specialize
    names, or tensors of one dtype that do_not_specialize_on_alignment names. An empty grid launches nothing."""
    if not all(grid):
        return
    assert all(abs(each) < 1 << 31 for each in others if isinstance(each, int)), others
    kinds = [(pointer.dtype, pointer.data_ptr() % 16 == 0) for pointer in pointers]
    key = (id(kernel), device, num_warps, *kinds, *constants.values())
    _, compiled = _compiled.get(key, (kernel, None))
    if compiled is None:
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            compiled = kernel[grid](*pointers, *others, **constants, num_warps=num_warps)  # None from the interpreter
        _compiled.setdefault(key, (kernel, compiled))
        return
    try:
        compiled[grid](*pointers, *others, *constants.values(), stream=None if stream is None else stream.cuda_stream)
    except (TypeError, AttributeError, ValueError) as error:
        logger.warning(
            "triton %s launches no compiled kernel directly (%s); small launches cost more", triton.__version__, error
        )
        _compiled[key] = kernel, None
        launch(kernel, grid, pointers, others, constants, device, stream, num_warps=num_warps)
