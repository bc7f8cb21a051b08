"""A pool of KV with more than 2^31 elements, for tests that a kernel computes its offsets in 64 bits.

The pool is a sparse file of the host, of which only the pages of one sequence take memory. So a test that uses it runs
in Triton's interpreter or on the CPU. The interpreter's integers warn when they wrap, so such a test must not fail at a
RuntimeWarning: tests are marked with `IN_A_FILE` and `WRAPS`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from triton_device import IS_INTERPRETED

IN_A_FILE = pytest.mark.skipif(not IS_INTERPRETED, reason="the pool lies in a file of the host")
WRAPS = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PAGE_SIZE, NUM_HEADS, HEAD_DIM = 16, 2, 32  # one KV head
NUM_PAGES = 2**31 // (2 * PAGE_SIZE * HEAD_DIM) + 8
PAGES = [NUM_PAGES - 1, 3, NUM_PAGES - 5]  # of the sequence
SEQ_LEN = 40
TABLE, SMALL_TABLE, LENS = torch.tensor([PAGES]), torch.tensor([[0, 1, 2]]), torch.tensor([SEQ_LEN])


def make_large_pool(folder: Path) -> torch.Tensor:
    """Return the pool [1, NUM_PAGES, 2, 1, PAGE_SIZE, HEAD_DIM] float32, zeros but for PAGES, in a file of `folder`."""
    shape = (1, NUM_PAGES, 2, 1, PAGE_SIZE, HEAD_DIM)
    kv = torch.from_numpy(np.memmap(folder / "pool", dtype=np.float32, mode="w+", shape=shape))
    assert kv.numel() > 2**31
    generator = torch.Generator().manual_seed(0)
    for page in PAGES:
        kv[0, page] = torch.randn(kv.shape[2:], generator=generator)
    return kv


def small_pool(kv: torch.Tensor) -> torch.Tensor:
    """Return copies of PAGES alone, [1, 3, 2, 1, PAGE_SIZE, HEAD_DIM]; SMALL_TABLE names them."""
    return kv[:, PAGES].clone()


def make_queries(num_tokens: int) -> torch.Tensor:
    """Return random queries [num_tokens, NUM_HEADS, HEAD_DIM] float32."""
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


def make_rotation(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (cos, sin) that rotate nothing, each [num_tokens, 1, HEAD_DIM] float32."""
    return torch.ones(num_tokens, 1, HEAD_DIM), torch.zeros(num_tokens, 1, HEAD_DIM)
