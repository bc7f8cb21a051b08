"""The device for tests of Triton kernels: the GPU if there is one, otherwise the CPU in Triton's interpreter.

Import this module before anything imports triton, which decides at import. tests/conftest.py does so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"  # it truncates where a GPU rounds to bfloat16, and cannot tl.dot of bfloat16
if IS_INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One unit in the last place, relative: sums in another order may round to the next number.
ULP = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers on DEVICE, equal on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.mul_(scale).to(dtype).to(DEVICE)


def quicken_interpreter() -> None:
    """Spare Triton's interpreter most of its time, without a change of what it computes."""
    _patch_once_per_launch()
    _check_no_overflow()
    _keep_dtypes()
    _keep_shapes()
    _leave_alone_what_fits()
    _call_functions_directly()
    _convert_by_tables()
    _reduce_by_halves()


def _patch_once_per_launch() -> None:
    """Let the interpreter replace the functions of triton.language when a kernel starts. It does so again whenever one
    function of ours calls another."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, languages = interpreter._patch_lang, (tl, tl.core)
    patched: set[int] = set()  # indices of languages, since the kernel started

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @functools.cache
    def used_by(function: Any) -> frozenset[int]:
        used = function.__globals__.values()
        return frozenset(index for index, each in enumerate(languages) if any(value is each for value in used))

    def patch_lang(function: Any) -> interpreter._LangPatchScope:
        used = used_by(function)
        if used and used <= patched:
            return Scope()
        scope = patch(function)
        patched.update(used)
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_lang


def _check_no_overflow() -> None:
    """Switch off the interpreter's check of sums and products. Without Triton's debug mode it computes everything in 64
    bits as well, and asserts nothing."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


def _keep_dtypes() -> None:
    """Let the interpreter keep the type of numpy of each type. It makes the table of all types for each value."""
    import triton.language as tl
    from triton.runtime import interpreter

    find = functools.cache(interpreter._get_np_dtype)
    address = np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda of: address if isinstance(of.scalar, tl.pointer_type) else find(of.scalar)


def _keep_shapes() -> None:
    """Let the interpreter check and wrap each shape once. It does so again for each type and value that it makes."""
    from triton.language import core

    init = core.block_type.__init__

    @functools.lru_cache(maxsize=None, typed=True)  # typed: a size of 4.0 is refused after one of 4
    def checked(*sizes: int) -> tuple[Any, int, str]:
        kind = core.block_type.__new__(core.block_type)
        init(kind, core.int1, list(sizes))
        return kind.shape, kind.numel, kind.name.removesuffix(f"{core.int1}>")

    @functools.cache
    def wrapped(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, name = checked(
            *[size.value if isinstance(size, core.constexpr) else size for size in shape]
        )
        self.name = f"{name}{element_ty.name}>"

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = wrapped(*kind.shape.values) if kind.is_block() else wrapped()

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _leave_alone_what_fits() -> None:
    """Let the interpreter see at once that two values have the same shape, a value the wanted type, and an argument no
    `constexpr` inside. It finds out by many comparisons, which take most of the time of small blocks."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast, cast, unwrap = TritonSemantic.broadcast_impl_value, TritonSemantic.cast, core._unwrap_if_constexpr
    plain = frozenset({core.tensor, core.dtype, int, float, bool, str, type(None)})

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        fits = getattr(left.type, "shape", None) is getattr(right.type, "shape", None)  # `_keep_shapes` has one of each
        return (left, right) if fits else broadcast(self, left, right)

    def cast_to(self: Any, value: Any, kind: Any, rounding: str | None = None) -> Any:
        return value if value.type.scalar is kind.scalar else cast(self, value, kind, rounding)

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_impl_value, cast_to
    core._unwrap_if_constexpr = unwrap_if_constexpr


def _call_functions_directly() -> None:
    """Let functions of triton.language begin at once. In the interpreter two others come before each of them."""
    from triton.runtime import interpreter

    @functools.cache
    def begun_directly(member: Any) -> Any:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def begin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return begin

    interpreter._patch_attr = lambda owner, name, member, _, scope: scope.set_attr(owner, name, begun_directly(member))


def _convert_by_tables() -> None:
    """Let the interpreter convert each number of at most 16 bits once. It computes exponents and significands anew."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    @functools.cache
    def table(source: Any, target: Any, rounding: Any) -> np.ndarray:
        bits = source.primitive_bitwidth
        return convert(np.arange(1 << bits, dtype=f"uint{bits}"), source, target, rounding)

    def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source.primitive_bitwidth > 16:
            return convert(values, source, target, rounding)
        return table(source, target, rounding)[values.view(f"uint{source.primitive_bitwidth}")]

    interpreter._convert_float = convert_float


def _reduce_by_halves() -> None:
    """Let the interpreter reduce by functions of our own as a GPU does: half of the elements with the other half,
    again and again. It takes one element after the other, which takes most of the time of some tests."""
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    def generic_reduce(self: Any, values: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        axis, rank = self.axis, len(values[0].shape)
        parts = [value.handle.data for value in values]
        parts = [part.reshape(-1) if axis is None else np.moveaxis(part, axis, 0) for part in parts]
        dtypes = [value.dtype for value in values]
        while len(parts[0]) > 1:
            half = len(parts[0]) // 2
            pairs = [each for side in (slice(half), slice(half, None)) for each in (part[side] for part in parts)]
            both = [self.to_tensor(part, dtype) for part, dtype in zip(pairs, dtypes * 2, strict=True)]
            found = self.combine_fn.fn(*both)
            parts = [each.handle.data for each in (found if isinstance(found, tuple) else (found,))]
        results = [part[0] for part in parts]
        if self.keep_dims:
            places = tuple(range(rank)) if axis is None else axis
            results = [np.expand_dims(result, places) for result in results]
        return [self.to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    ReduceOps.generic_reduce = generic_reduce
