"""A GPU takes the kernels of Triton that need most of its shared memory, with the tiles that are launched.

Most of the time goes into the start of the process that compiles, so all have one together. With BATON_WHOLE_MATRIX=1
each group has its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compile_kernels import IS_WHOLE, SHARED_BYTES, shared_bytes
from triton_device import DEVICE

pytest.importorskip("triton")

OF_LATENTS = ["absorb", "turn", "values", "few", "some", "many", "tree", "chunk", "prompt"]
NUM_KERNELS = {
    "latents": len(OF_LATENTS),
    "fp8": 37,
    "routes": 15,
    "experts": 41,
    "picks": 7,
    "delta": 39,
    "entries": 4,
    "small_heads": 8,
    "small_states": 12,
}
NUM_KERNELS["fp8_pages"] = 16 if IS_WHOLE else 12


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compiles what it runs")
@pytest.mark.parametrize("groups", NUM_KERNELS if IS_WHOLE else [" ".join(NUM_KERNELS)])
def test_a_gpu_takes_the_kernels(groups: str, tmp_path: Path) -> None:
    """Compiled for a GPU of compute capability 9.0; those of latents and of picks for the sizes of DeepSeek's models
    and of GLM-5. Pages in FP8 need no more shared memory than pages of 16 bits."""
    found = shared_bytes(groups, tmp_path)
    assert len(found) == sum(NUM_KERNELS[group] for group in groups.split()), found
    assert max(found.values()) <= SHARED_BYTES, found
    if "latents" in groups:
        assert list(found)[: len(OF_LATENTS)] == OF_LATENTS and 2 * found["many"] <= SHARED_BYTES, found
    for kernel in ("round", "chunk", "store") if "fp8_pages" in groups else ():
        kinds = ("fp8e4nv",) if kernel == "store" else ("fp8e4nv", "u16")
        assert all(found[f"{kind} {kernel}"] <= found[f"bf16 {kernel}"] for kind in kinds)
