"""Triton's interpreter, quickened by triton_device.py, computes the same with less work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU needs no interpreter")


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.where(a > b, a, b)


@triton.jit
def _doubled(x: tl.tensor) -> tl.tensor:
    return _larger(x + x, x)


@triton.jit
def _fold_kernel(out: Tensor, rows: Tensor, size: tl.constexpr) -> None:
    """Write the largest element of each row, doubled."""
    row = tl.program_id(0)
    x = tl.load(rows + row * size + tl.arange(0, size))
    tl.store(out + row, tl.reduce(_doubled(x), 0, _larger))


def fold(rows: Tensor) -> Tensor:
    out = torch.empty(len(rows), dtype=rows.dtype, device=DEVICE)
    _fold_kernel[len(rows),](out, rows, rows.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_functions_that_call_functions_compute_what_torch_computes(dtype: torch.dtype) -> None:
    rows = random(3, 64, scale=9.0).to(dtype)
    assert torch.equal(fold(rows), (2 * rows).maximum(rows).amax(1))


def test_integers_wrap_as_on_a_gpu() -> None:
    rows = torch.full((1, 16), 2**30, dtype=torch.int32, device=DEVICE)
    with np.errstate(over="ignore"):
        assert fold(rows).tolist() == [2**30]  # the double wraps to a negative number


def test_the_language_is_replaced_once_per_launch_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    add, load, num_patched = tl.tensor.__add__, tl.load, list[object]()
    patch_tensor = interpreter._patch_lang_tensor

    def counting(*args: object) -> None:
        num_patched.append(tl.tensor.__add__)
        patch_tensor(*args)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", counting)
    fold(random(1, 64))
    num_once = len(num_patched)
    fold(random(5, 64))
    assert 1 <= num_once <= 3  # by the modules of the language that the functions name
    assert len(num_patched) == 2 * num_once  # however many calls a launch makes
    assert (tl.tensor.__add__, tl.load) == (add, load)
