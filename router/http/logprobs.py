"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ...metadata.wire.request import TokenLogprobs
from ..text.tokenizer import TextTokenizer
from .openai_types import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob


class LegacyColumns:
    """Columns of one sequence for /v1/completions, made chunk by chunk. It tracks the text offset of the next token.

    A token that is only a fragment of a character is named by its bytes, `bytes:\\xe4\\xbd`, as OpenAI does. As
    replacement characters all fragments would share one key of `top_logprobs`. Its offset is that of its character.
    """

    def __init__(self, tokenizer: TextTokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> LegacyLogprobs:
        """Return the columns for the next tokens. The logprobs of a prompt's first token are None.

        The sampled token is always among `top_logprobs`, as in OpenAI's API.
        """
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            offsets.append(self._offset)
            self._offset += self._text_len(token_id)
            tops.append(self._top(token_id, entry) if entry is not None else None)
        values = [entry.logprob if entry is not None else None for entry in logprobs]
        return LegacyLogprobs([self._name(token_id) for token_id in token_ids], values, tops, offsets)

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        pairs = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        for top_id, value in (*pairs, (token_id, entry.logprob)):
            top.setdefault(self._name(top_id), value)
        return top

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text_len(self, token_id: int) -> int:
        return len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))


def chat_logprobs(
    tokenizer: TextTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """Return one entry per token, with the `num_top` likeliest tokens at its position."""
    content: list[TokenLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        pairs = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        tops = [TopLogprob(tokenizer.token_text(i), p, list(tokenizer.token_bytes(i))) for i, p in pairs]
        text, data = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
        content.append(TokenLogprob(text, entry.logprob, data, tops))
    return ChatLogprobs(content)
