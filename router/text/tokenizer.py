"""The tokenizer of a model, made from the tokenizer.json that a node sent, and the model's chat template.

Encoding uses `async_encode`, which does not block the event loop.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, cast

import tokenizers
import xxhash
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...metadata.errors import ProtocolError, RequestError
from ...metadata.wire.node_info import ModelCard
from ..reasoning_parsers.registry import parser_for_template as reasoning_parser_for
from ..tool_parsers.registry import parser_for_template as tool_parser_for

MAX_TOKENIZER_BYTES = 256 << 20


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
        decoder: dict[str, Any] = description.get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}  # of tokens that have been asked for

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

    def token_text(self, token_id: int) -> str:
        """Return one token alone as text. A fragment of a character becomes U+FFFD."""
        if self.is_byte_level:
            return self.byte_level_bytes(token_id).decode("utf-8", "replace")
        return self.inner.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token alone as bytes."""
        return self.byte_level_bytes(token_id) if self.is_byte_level else self.token_text(token_id).encode()


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


class ChatTemplate:
    """Chat template of a model. It runs in jinja2's sandbox, with the helper functions that templates expect."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ProtocolError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
        names = cast("dict[str, Any]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _to_json
        names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ProtocolError(f"the model's chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)
        tree = environment.parse(source)
        self.knows_developer = any(each.value == "developer" for each in tree.find_all(Const))  # as a role of messages
        self._variables = {each.name for each in tree.find_all(Name) if each.ctx == "load"}
        self.knows_tools = "tools" in self._variables
        self.tool_parser = tool_parser_for(source)  # names of parsers; None if it does not tell
        self.reasoning_parser = reasoning_parser_for(source)

    @classmethod
    def of(cls, card: ModelCard) -> ChatTemplate | None:
        """Return the template of a model, None if it has none."""
        return cls(card.chat_template, card.special_tokens) if card.chat_template else None

    @cached_property
    def late_roles(self) -> frozenset[str]:
        """Which of system and developer are roles whose messages the template also writes behind other messages."""
        return frozenset(role for role in ("system", "developer") if self._writes_late(role))

    def knows(self, variable: str) -> bool:
        """Whether the template uses a variable of this name."""
        return variable in self._variables

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. Raises RequestError if the template refuses it."""
        given: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        taken = sorted(given.keys() & options.keys())
        if taken:
            raise RequestError(f"chat_template_kwargs: {taken[0]} has its own field", param="chat_template_kwargs")
        variables = {**options, **self._special_tokens, "tools": tools, "documents": None, **given}
        try:
            return self._template.render(variables)
        except Exception as error:  # templates are foreign code and may raise anything
            words = str(error) if isinstance(error, TemplateError) else "they are not of the kind that it knows"
            raise RequestError(f"the model's chat template refuses these messages: {words}", param="messages") from None

    def _writes_late(self, role: str) -> bool:
        conversation = [("system", "first"), ("user", "hello"), (role, "behind")]
        messages = [{"role": each, "content": text} for each, text in conversation]
        try:
            return "behind" in self.render(messages, add_generation_prompt=True, options={})
        except RequestError:
            return False


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training. Here its body is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
