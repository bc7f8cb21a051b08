"""Sizes of prompt chunks whose forward is captured as a CUDA graph. Without torch, so that ranks can agree on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..pace.mixed_sizes import MAX_PROMPTS
from ..work import BatchRow

BUCKETS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)  # tokens; cuBLAS is slow at 448
MAX_PRODUCTS = 1.2e11  # of one layer over a bucket: 0.4 ms on an H200, as long as the launches of its kernels take
MAX_SEQS = MAX_PROMPTS  # of a chunk


class PromptSizes(NamedTuple):
    """The graphs that an engine has."""

    sizes: Sequence[int] = ()  # tokens, rising
    max_len: int = 0  # tokens of a sequence

    def holding(self, rows: Sequence[BatchRow]) -> int | None:
        """Return the smallest size whose graph computes `rows`, as `bucket`."""
        return bucket(rows, self.sizes, self.max_len)


NO_PROMPT_SIZES = PromptSizes()


def bucket_sizes(layer_products: int, num_shards: int = 1, *, is_fp8: bool = False) -> list[int]:
    """Return the buckets for which a graph saves time, by the model's `layer_products`, of which each rank has one of
    `num_shards` shares. `is_fp8`: tensor cores multiply in FP8, twice as fast."""
    most = MAX_PRODUCTS * num_shards * (2 if is_fp8 else 1)
    return [size for size in BUCKETS if size * layer_products <= most]


def bucket(rows: Sequence[BatchRow], sizes: Sequence[int], max_len: int) -> int | None:
    """Return the smallest of `sizes` (in rising order) that holds `rows`. None: no size does, a sequence grows beyond
    `max_len` tokens, a row wants more than its last logits, or tokens are scored."""
    if len(rows) > MAX_SEQS or any(
        row.num_logits > 1 or row.num_scored or row.position + len(row.input_ids) > max_len for row in rows
    ):
        return None
    num_tokens = sum(len(row.input_ids) for row in rows)
    return next((size for size in sizes if num_tokens <= size), None)
