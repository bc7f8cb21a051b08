"""A GPU takes the kernels of Triton that need most of its shared memory, with the tiles that are launched.

Most of the time goes into the start of the process that compiles, so all have one together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compile_kernels import IS_WHOLE, SHARED_BYTES, shared_bytes
from triton_device import DEVICE

pytest.importorskip("triton")

OF_LATENTS = ["absorb", "turn", "values", "few", "some", "many", "tree", "chunk", "prompt"]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compiles what it runs")
def test_a_gpu_takes_the_kernels(tmp_path: Path) -> None:
    """Compiled for a GPU of compute capability 9.0; those of latents and of picks for the sizes of DeepSeek's models
    and of GLM-5. Pages in FP8 need no more shared memory than pages of 16 bits."""
    found = shared_bytes("latents fp8 routes experts picks fp8_pages", tmp_path)
    of_pages = 16 if IS_WHOLE else 12
    num_others = 37 + 15 + 41 + 14 + of_pages
    assert list(found)[: len(OF_LATENTS)] == OF_LATENTS and len(found) == len(OF_LATENTS) + num_others, found
    assert max(found.values()) <= SHARED_BYTES and 2 * found["many"] <= SHARED_BYTES, found
    for kernel in ("round", "chunk", "store"):
        kinds = ("fp8e4nv",) if kernel == "store" else ("fp8e4nv", "u16")
        assert all(found[f"{kind} {kernel}"] <= found[f"bf16 {kernel}"] for kind in kinds)
