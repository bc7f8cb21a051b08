"""Times of chunks of padding on a prefill node, measured before prompts come."""

from __future__ import annotations

import time

from .prompt_executor import OwnPromptExecutor, PromptExecutor
from .work import BatchRow, Chunk, ChunkRow

_KEY = -1  # of the padding's prompt; no request has it


def measure_prompt(prompts: PromptExecutor, page_size: int, num_tokens: int) -> float:
    """Return the seconds of a chunk of `num_tokens` tokens of one prompt, the host's part included. Raises OutOfMemory
    as `PromptExecutor.submit`."""
    started = time.monotonic()
    prompts.submit(_padding(num_tokens, page_size)).wait()
    seconds = time.monotonic() - started
    prompts.forget(_KEY)
    return seconds


def measure_own_prompts(prompts: OwnPromptExecutor, num_ranks: int, page_size: int, num_tokens: int) -> float:
    """Return the seconds in which each rank computes a chunk of `num_tokens` tokens of a prompt of its own. Raises
    RankLost."""
    started = time.monotonic()
    prompts.run([_padding(num_tokens, page_size)] * num_ranks)
    seconds = time.monotonic() - started
    prompts.forget(_KEY)
    return seconds


def _padding(num_tokens: int, page_size: int) -> Chunk:
    """Return a chunk whose tokens are all padding: their KV goes to page 0, which no prompt has. No prompt ends in it,
    and drafters read one token beyond it."""
    token_ids = [0] * (num_tokens + 1)
    row = BatchRow(token_ids[:-1], 0, [0] * -(-len(token_ids) // page_size), 0)
    return Chunk([ChunkRow(_KEY, token_ids, row, 0)], [])
