"""Computes prompts on ranks that have sequences of their own: one chunk per rank and step.

chunks, one per rank --> OwnWorkPrompts --> OwnWorkExecutor --> reports, one per rank
"""

from __future__ import annotations

from collections.abc import Sequence

from ..progress import Progress
from ..work import Chunk, ChunkReport, Forget, WarmUp
from .own_work_executor import OwnWorkExecutor


class OwnWorkPrompts:
    """Runs the chunks of all ranks. An `OwnPromptExecutor`. Every method that works raises RankLost if a rank is gone,
    hangs or has no memory for its chunk; then the node must end."""

    def __init__(self, executor: OwnWorkExecutor) -> None:
        self._executor, self._engine = executor, executor.own.executor.engine
        self._keys: set[int] = set()

    @property
    def context_len(self) -> int:
        return self._engine.context_len

    @property
    def vocab_size(self) -> int:
        return self._engine.model_config.vocab_size

    @property
    def longest_chunk(self) -> tuple[int, float] | None:
        return self._engine.longest_chunk

    @property
    def runs_ahead(self) -> bool:
        """False: a step begins when the one before has ended on all ranks."""
        return False

    @property
    def keys(self) -> frozenset[int]:
        """Keys of the prompts of which a rank may keep states: those that were not forgotten."""
        return frozenset(self._keys)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture the graphs of all ranks, as `PromptExecutor.warm_up`."""
        self._executor.capture(WarmUp(expects_prompts=True), progress)

    def run(self, chunks: Sequence[Chunk | None]) -> list[ChunkReport]:
        """Compute chunks[i] on rank i, drafts after the first tokens included."""
        self._keys.update(row.key for chunk in chunks if chunk is not None for row in chunk.rows)
        reports = self._executor.run(chunks)
        return [report for report in reports if isinstance(report, ChunkReport)]

    def forget(self, key: int) -> None:
        """Free what a rank keeps of a prompt."""
        self._keys.discard(key)
        self._executor.run([Forget(key)] * len(self._executor.queues))

    def expect(self, grammar: str | None) -> None:
        """Prepare for a request with this grammar, without waiting; None: it has none."""
        self._engine.grammars.prepare(grammar)
