"""Declaration of one route: everything that the HTTP server and the OpenAPI document must know about it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from .access import KeyLevel
from .api import Api
from .errors import ErrorBody

Handler = Callable[[Api, web.Request], Awaitable[web.StreamResponse]]

_PATTERN = re.compile(r":[^{}]+(?=})")  # in `{name:pattern}`


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or in the query. `kind` is its type, with bounds as msgspec's Meta."""

    name: str
    kind: Any
    description: str
    where: Literal["path", "query"] = "query"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path. `path` is a pattern of aiohttp: `{name}` stands for a segment, `{name:.+}` for several.

    `answer` is the type of the JSON answer, `text` the media type of an answer that is text, and `chunk` the type of
    the events of a stream; a route may have several of them. `body` is the type of the JSON body of the request, and
    `anthropic_answer` is the type of the answer to a client that sends the header anthropic-version, if it is another.
    `statuses` are those of errors that are not already implied by the other fields. `error` is the type of their body.
    `last_event` is the data of an event that follows the last chunk.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    operation_id: str
    tag: str
    summary: str
    needs: KeyLevel = KeyLevel.KEY
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    is_body_required: bool = True
    answer: Any = None
    anthropic_answer: Any = None
    text: str | None = None
    chunk: Any = None
    statuses: tuple[int, ...] = ()
    error: type[Struct] = ErrorBody
    last_event: str | None = "[DONE]"

    @property
    def template(self) -> str:
        """The path without patterns, as OpenAPI and `Resource.canonical` write it."""
        return _PATTERN.sub("", self.path)
