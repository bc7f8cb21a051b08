"""A GPU takes the kernels of Triton that need most of its shared memory, with the tiles that are launched.

Most of the time goes into the start of the process that compiles, so these have one together. FP8 pages are in
state/test_fp8_pages.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compile_kernels import SHARED_BYTES, shared_bytes
from triton_device import DEVICE

pytest.importorskip("triton")

OF_LATENTS = ["absorb", "turn", "values", "few", "some", "many", "tree", "chunk", "prompt"]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compiles what it runs")
def test_a_gpu_takes_the_kernels(tmp_path: Path) -> None:
    """Compiled for a GPU of compute capability 9.0; those of latents for the sizes of DeepSeek's models."""
    found = shared_bytes("latents fp8 routes experts", tmp_path)
    assert list(found)[: len(OF_LATENTS)] == OF_LATENTS and len(found) == len(OF_LATENTS) + 37 + 15 + 41, found
    assert max(found.values()) <= SHARED_BYTES and 2 * found["many"] <= SHARED_BYTES, found
