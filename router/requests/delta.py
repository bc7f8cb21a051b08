"""New output of a request for its client, and how token ids become its text."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

from msgspec import Struct

from ...metadata.wire.request import FinishReason, TokenLogprobs


class TokenText(Struct, frozen=True):
    """The text that appeared with a token. `is_draft`: it is an accepted draft; None: its node does not say."""

    text: str
    is_draft: bool | None


class Delta(NamedTuple):
    """New output of a sequence. `logprobs` and `drafts` have one entry per token if the client asked for them."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafts: abc.Sequence[TokenText] = ()


class TextOptions(NamedTuple):
    """Options for turning ids into text. Special tokens whose text is one of `markers` are in it in any case, since a
    parser reads them."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    markers: frozenset[str] = frozenset()
