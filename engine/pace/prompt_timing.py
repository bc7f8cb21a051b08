"""Times of chunks of padding on a prefill node, measured before prompts come."""

from __future__ import annotations

import time

from ..prompts.executor import PromptExecutor
from ..work import BatchRow, Chunk, ChunkRow

_KEY = -1  # of the padding's prompt; no request has it
_STEP = 7919  # between token ids; a prime, so that the ids are spread over the vocabulary


def measure_prompt(prompts: PromptExecutor, page_size: int, num_tokens: int) -> float:
    """Return the seconds of a chunk of `num_tokens` tokens of one prompt, the host's part included. Raises OutOfMemory
    as `PromptExecutor.submit`.

    The tokens differ, since equal ones would all choose the same experts of a mixture. Their KV goes to page 0, which
    no prompt has. No prompt ends in the chunk, and drafters read one token beyond it."""
    token_ids = [_STEP * index % prompts.vocab_size for index in range(num_tokens + 1)]
    row = BatchRow(token_ids[:-1], 0, [0] * -(-len(token_ids) // page_size), 0)
    started = time.monotonic()
    prompts.submit(Chunk([ChunkRow(_KEY, token_ids, row, 0)], [])).wait()
    seconds = time.monotonic() - started
    prompts.forget(_KEY)
    return seconds
