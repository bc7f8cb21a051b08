"""Log-probabilities in the two formats of OpenAI's API.

The bytes of a token are those that it adds to the text of the answer: none if it is left out of the text, as special
tokens are. Its name is the text of its bytes, or its own text if it is left out.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from ....metadata.wire.request import TokenLogprobs
from ...text.detokenizer import TokenBytes
from ...text.tokenizer import TextTokenizer
from ..generation.types import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob


class LegacyColumns:
    """Columns of one sequence for /v1/completions, made chunk by chunk. It tracks the text offset of the next token.

    A token that is only a fragment of a character is named by its bytes, `bytes:\\xe4\\xbd`, as OpenAI does. As
    replacement characters all fragments would share one key of `top_logprobs`. Its offset is that of its character.
    """

    def __init__(self, tokenizer: TextTokenizer, num_top: int, text_bytes: TokenBytes | None = None) -> None:
        """`text_bytes`: bytes of the tokens to come; None: they begin a text that has all of them."""
        self._text_bytes = text_bytes or TokenBytes(tokenizer)
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], hidden: Collection[int] = ()
    ) -> LegacyLogprobs:
        """Return the columns for the next tokens. The logprobs of a prompt's first token are None. The text has nothing
        of the tokens at the places `hidden`.

        The sampled token is always among `top_logprobs`, as in OpenAI's API.
        """
        names: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for place, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
            names.append(self._name(token_id))
            offsets.append(self._offset)
            tops.append(self._top(token_id, entry) if entry is not None else None)
            if place not in hidden:
                self._offset += len(self._decoder.decode(self._text_bytes.take(token_id)))
        return LegacyLogprobs(names, [None if each is None else each.logprob for each in logprobs], tops, offsets)

    def follow(self, text: str, text_bytes: TokenBytes) -> None:
        """Go on behind a text, such as a prompt. `text_bytes`: bytes of the tokens to come."""
        self._text_bytes, self._offset = text_bytes, len(text)
        self._decoder.reset()

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        pairs = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        for top_id, value in (*pairs, (token_id, entry.logprob)):
            top.setdefault(self._name(top_id), value)
        return top

    def _name(self, token_id: int) -> str:
        data = self._text_bytes.name(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
    text_bytes: TokenBytes | None = None,
    hidden: Collection[int] = (),
) -> ChatLogprobs:
    """Return one entry per token, with the `num_top` likeliest tokens at its position. `text_bytes` and `hidden` are
    those of LegacyColumns."""
    reader = text_bytes or TokenBytes(tokenizer)
    content: list[TokenLogprob] = []
    for place, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
        pairs = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        tops = [TopLogprob(_text(reader.name(top_id)), value, list(reader.of(top_id))) for top_id, value in pairs]
        name = _text(reader.name(token_id))
        data = b"" if place in hidden else reader.take(token_id)
        content.append(TokenLogprob(name, entry.logprob, list(data), tops))
    return ChatLogprobs(content)


def joined(first: LegacyLogprobs, second: LegacyLogprobs) -> LegacyLogprobs:
    """Return the columns of both."""
    return LegacyLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
