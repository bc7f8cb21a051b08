"""The tokenizer of a model, made from the tokenizer.json that a node sent.

Encoding uses `async_encode`, which does not block the event loop.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers
import xxhash

from ...metadata.errors import ProtocolError

MAX_TOKENIZER_BYTES = 256 << 20
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # of vocabularies with byte fallback


async def start_threads() -> None:
    """Start the threads in which the tokenizers library encodes. It needs descriptors for them, and cannot go on if
    there are none when the first text comes."""
    await tokenizers.Tokenizer(tokenizers.models.BPE()).async_encode("")


class TextTokenizer:
    """Text to ids and back. All groups with the same tokenizer digest share one."""

    def __init__(self, data: bytes) -> None:
        """`data` is the contents of tokenizer.json. Raises ProtocolError if it cannot be read."""
        try:
            self.inner = tokenizers.Tokenizer.from_buffer(data)
            description: dict[str, Any] = json.loads(data)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ProtocolError(f"the node's tokenizer.json cannot be read: {error}") from None
        self.data = data
        self.inner.no_truncation()
        self.inner.no_padding()
        self._decoders: frozenset[str] = frozenset(_types_of_decoders(description.get("decoder")))
        self.is_byte_level = self._decoders == frozenset({"ByteLevel"})
        self._bytes: dict[int, bytes] = {}  # of tokens that have been asked for
        self._texts: dict[int, str | None] = {}  # likewise, of byte-level vocabularies

    @classmethod
    def from_compressed(cls, data: bytes, digest: str) -> TextTokenizer:
        """Return the tokenizer of a zlib-compressed file whose xxh3_128 is `digest`.

        Raises ProtocolError if the file is damaged or too large.
        """
        inflate = zlib.decompressobj()
        try:
            plain = inflate.decompress(data, MAX_TOKENIZER_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"the node's tokenizer file is damaged: {error}") from None
        if not inflate.eof:
            raise ProtocolError("the node's tokenizer file is cut off or larger than 256 MiB")
        if xxhash.xxh3_128_hexdigest(plain) != digest:
            raise ProtocolError("the node's tokenizer file does not have the digest that the node announced")
        return cls(plain)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token. It bounds the number of tokens of a text from below."""
        return max(map(len, self.inner.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `skip_special_tokens` leaves out of text."""
        added = self.inner.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_by_text(self) -> dict[str, int]:
        """Ids of special tokens by their text."""
        added = self.inner.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def grammar_ids(self) -> dict[str, int]:
        """Ids by text of the tokens that llguidance knows by their id alone, since no text of a grammar means them:
        special ones, and added ones such as <think>."""
        added = self.inner.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        encoding = await self.inner.async_encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids

    async def encode_end(self, text: str, num_kept: int, *, add_special_tokens: bool) -> list[int]:
        """Return at most `num_kept` ids of a text: the special tokens that encoding adds, and the end of the rest.

        So does the tokenizers library if it truncates on the left.
        """
        encoding = await self.inner.async_encode(text, add_special_tokens=False)
        num_added = self.inner.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, num_kept - num_added), direction="left")
        return self.inner.post_process(encoding, None, add_special_tokens).ids[-num_kept:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Ids outside the vocabulary are left out."""
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def byte_level_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token of a byte-level vocabulary stands for."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = _bytes_of(self.inner.id_to_token(token_id) or "")
        return data

    def byte_level_text(self, token_id: int) -> str | None:
        """Return the text that a token of a byte-level vocabulary stands for; None: its bytes alone are no text."""
        try:
            return self._texts[token_id]
        except KeyError:
            data = self.byte_level_bytes(token_id)
        try:
            text: str | None = data.decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a text, as text. A fragment of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun."""
        if self.is_byte_level:
            return self.byte_level_bytes(token_id)
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._decoded_bytes(token_id)
        return data

    def first_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that it begins. Many decoders drop a space there."""
        data = self.token_bytes(token_id)
        return data if self.is_byte_level or data[:1] >= b"\x80" else self.inner.decode([token_id], False).encode()

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that encoding adds before and behind a text."""
        mask = self.inner.encode("a").special_tokens_mask
        ids = self.inner.encode("a").ids
        plain = [place for place, is_added in enumerate(mask) if not is_added]
        return (ids[: plain[0]], ids[plain[-1] + 1 :]) if plain else (ids, [])

    def _decoded_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token by the tokenizer's own decoder: what the token adds behind itself."""
        token = self.inner.id_to_token(token_id) or ""
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(token) is not None:
            return bytes([int(token[3:5], 16)])
        once, twice = (self.inner.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else token
        return _bytes_of(token) if "ByteLevel" in self._decoders and "\ufffd" in text else text.encode()


def _types_of_decoders(decoder: dict[str, Any] | None) -> Iterator[str]:
    """Yield the types of the steps of a decoder of tokenizer.json."""
    if decoder is not None and decoder.get("type") == "Sequence":
        for each in decoder["decoders"]:
            yield from _types_of_decoders(each)
    elif decoder is not None:
        yield str(decoder.get("type"))


def _byte_characters() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable stand-in characters means."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_characters()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # added tokens are stored as plain text
        return token.encode()
