"""CUDA graphs of small prompt chunks: one for each bucket of tokens, replayed in one launch.

The kernels of a forward over a small chunk take less time than their launches one by one. A graph holds the forward of
any chunk, over static inputs of the bucket's size. The tokens that pad the chunk form one more sequence without KV
slots: nothing stores them, they attend to nothing, and nothing reads their results. Sequences that the chunk does not
have are empty.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import kind_of
from ..progress import Progress, tracked
from ..rounds.batch import Computed, ForwardBatch, aligned
from ..rounds.capture import captured
from ..work import BatchRow
from .sizes import MAX_SEQS, PromptSizes, bucket

logger = logging.getLogger(__name__)


class PromptInputs(NamedTuple):
    """Inputs of a bucket or of one chunk: a block of numbers, which one copy moves to the device, and its views."""

    block: Tensor  # [num_numbers] int64
    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    seq_lens: Tensor  # [MAX_SEQS + 1] int64, the last one is the padding's: 0
    starts: Tensor  # [MAX_SEQS + 2] int64
    logit_rows: Tensor  # [MAX_SEQS] int64
    block_table: Tensor  # [MAX_SEQS + 1, num_columns] int64
    tail_table: Tensor  # likewise, of tail pages; without columns if the model has none

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        num_columns: int,
        device: torch.device | str,
        *,
        pinned: bool = False,
        has_tails: bool = False,
    ) -> PromptInputs:
        """Return zeros for a chunk of `num_tokens` tokens, padding included."""
        num_tails = num_columns if has_tails else 0
        sizes = [num_tokens, num_tokens, MAX_SEQS + 1, MAX_SEQS + 2, MAX_SEQS]
        sizes += [(MAX_SEQS + 1) * num for num in (num_columns, num_tails)]
        offsets = aligned(sizes)
        block = torch.zeros(offsets[-1], dtype=torch.int64, device=device, pin_memory=pinned)
        parts = (block[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False))
        ids, positions, seq_lens, starts, logit_rows, table, tails = parts
        tables = table.view(MAX_SEQS + 1, num_columns), tails.view(MAX_SEQS + 1, num_tails)
        return cls(block, ids, positions, seq_lens, starts, logit_rows, *tables)

    @classmethod
    def of(
        cls,
        rows: Sequence[BatchRow],
        page_size: int,
        num_tokens: int,
        num_columns: int,
        *,
        pinned: bool = False,
        has_tails: bool = False,
    ) -> PromptInputs:
        """Return the inputs of a chunk in host memory. Its `rows` lie end to end; there may be none."""
        inputs = cls.allocate(num_tokens, num_columns, "cpu", pinned=pinned, has_tails=has_tails)
        ids, positions, seq_lens, starts, logit_rows, table, tails = (each.numpy() for each in inputs[1:])
        stops = list(itertools.accumulate(len(row.input_ids) for row in rows))
        assert len(rows) <= MAX_SEQS and (not stops or stops[-1] <= num_tokens), (len(rows), stops, num_tokens)
        for i, (row, stop) in enumerate(zip(rows, stops, strict=True)):
            start, seq_len = stop - len(row.input_ids), row.position + len(row.input_ids)
            num_pages = -(-seq_len // page_size)
            assert start < stop and len(row.pages) >= num_pages, f"{len(row.pages)} pages for {seq_len} of row {i}"
            ids[start:stop], positions[start:stop] = row.input_ids, range(row.position, seq_len)
            seq_lens[i], table[i, :num_pages] = seq_len, row.pages[:num_pages]
            if has_tails and row.tail:
                tails[i, :num_pages] = row.tail[:num_pages]
        starts[1 : len(rows) + 1], starts[len(rows) + 1 :] = stops, stops[-1] if stops else 0
        starts[-1] = num_tokens
        ends = [stop - 1 for row, stop in zip(rows, stops, strict=True) if row.num_logits]
        logit_rows[: len(ends)] = ends
        return inputs

    def batch(self, page_size: int) -> ForwardBatch:
        """Return a batch over these tensors. The host does not know its lengths, so only our compiled kernels can
        compute it."""
        return ForwardBatch(
            input_ids=self.input_ids,
            positions=self.positions,
            query_lens=(),
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            logit_rows=self.logit_rows,
            page_size=page_size,
            starts=self.starts.int(),
            tail_table=self.tail_table if self.tail_table.shape[1] else None,
        )


def own(computed: Computed, rows: Sequence[BatchRow]) -> Computed:
    """Return copies of the results of `rows`. The next replay overwrites the tensors of `computed`."""
    num_tokens, num_logits = sum(len(row.input_ids) for row in rows), sum(row.num_logits for row in rows)
    extend = None if computed.extend is None else computed.extend[:num_tokens].clone()
    return Computed(extend, computed.logits[:num_logits].clone())


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: PromptInputs  # on the device
    computed: Computed  # static tensors that every replay writes


class PromptGraphs:
    """Owns the graphs, their inputs on the device, and the memory that all graphs share: one runs at a time."""

    def __init__(
        self,
        run: Callable[[ForwardBatch], Computed],
        sizes: Sequence[int],
        page_size: int,
        context_len: int,
        device: torch.device,
        progress: Progress | None = None,
        *,
        has_tails: bool = False,
    ) -> None:
        """Capture buckets of `sizes` tokens on `device`, the largest first, so that the others fit in its memory.
        `progress` counts them. `run` must not read any tensor on the host."""
        self._run, self._device = run, device
        self._page_size, self._has_tails = page_size, has_tails
        self._num_columns = -(-context_len // page_size)
        self.sizes = PromptSizes(sorted(sizes), self._num_columns * page_size)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # as each capture does, so that the difference is the graphs'
        started, before = time.monotonic(), torch.cuda.memory_reserved()
        self._captured = {size: self._capture(size) for size in tracked(self.sizes.sizes[::-1], progress)}
        logger.info(
            "%d prompt graphs captured in %.1f s, %d MiB",
            len(self._captured),
            time.monotonic() - started,
            (torch.cuda.memory_reserved() - before) >> 20,
        )

    def compute(self, rows: Sequence[BatchRow], num_tokens: int | None = None) -> Computed | None:
        """Submit the forward of `rows` and return its results, which the caller owns. None: no bucket holds `rows`.

        `num_tokens`: the size of the only bucket that may be used, because every other rank computes as many; None: the
        smallest that holds `rows`."""
        size = self.sizes.holding(rows) if num_tokens is None else bucket(rows, [num_tokens], self.sizes.max_len)
        if size not in self._captured:
            return None
        found = self._captured[size]
        sizes, is_pinned = (self._page_size, size, self._num_columns), kind_of(self._device).is_apart
        inputs = PromptInputs.of(rows, *sizes, pinned=is_pinned, has_tails=self._has_tails)
        found.inputs.block.copy_(inputs.block, non_blocking=True)
        found.graph.replay()
        return own(found.computed, rows)

    def _capture(self, size: int) -> _Captured:
        inputs = PromptInputs.allocate(size, self._num_columns, self._device, has_tails=self._has_tails)
        sizes = self._page_size, size, self._num_columns
        inputs.block.copy_(PromptInputs.of((), *sizes, has_tails=self._has_tails).block)
        with torch.inference_mode():
            graph, computed = captured(lambda: self._run(inputs.batch(self._page_size)), self._pool)
        return _Captured(graph, inputs, computed)
