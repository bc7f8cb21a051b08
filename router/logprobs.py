"""Log-probabilities in the two forms that OpenAI's routes give them."""

from __future__ import annotations

from collections.abc import Sequence

from ..metadata.request import TokenLogprobs
from .api_types import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob
from .tokenizer import TextTokenizer


def legacy_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
    text_offset: int,
) -> tuple[LegacyLogprobs, int]:
    """The columns for these tokens, and the text offset after them. None stands for a prompt's first token. The
    sampled token is always among `top_logprobs`, as OpenAI has it."""
    tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(tokens, logprobs, strict=True):
        if entry is None:
            tops.append(None)
            continue
        top = {tokenizer.token_text(i): p for i, p in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)}
        top.setdefault(token, entry.logprob)
        tops.append(top)
    values = [entry.logprob if entry is not None else None for entry in logprobs]
    return LegacyLogprobs(tokens, values, tops, offsets), text_offset


def chat_logprobs(
    tokenizer: TextTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """One entry a token with its `num_top` likeliest rivals."""
    content: list[TokenLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        pairs = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        tops = [TopLogprob(tokenizer.token_text(i), p, list(tokenizer.token_bytes(i))) for i, p in pairs]
        text, data = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
        content.append(TokenLogprob(text, entry.logprob, data, tops))
    return ChatLogprobs(content)
