"""Errors as HTTP answers: a status and OpenAI's body {"error": {message, type, param, code}}. The only such place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from ....metadata.errors import BatonError, OutOfMemory, OutOfPages, Overloaded, RequestError, Unavailable
from ...errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    Foreign,
    NodeFault,
    NoNode,
    NotFound,
    RequestCancelled,
    ThreadRefused,
    Unauthorized,
)

_HALF_PAIR = re.compile("[\ud800-\udfff]")


class HttpRefusal(BatonError):
    """The HTTP request itself is at fault: its method, or the size, type or encoding of its body.

    The answer carries `headers`.
    """

    code = "http_error"

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ErrorDetail(msgspec.Struct, frozen=True):
    """Description of one error. `param` names the field of the request that is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success, and last event of a stream that fails."""

    error: ErrorDetail


class ThreadDetails(msgspec.Struct, frozen=True):
    """Details that tell Anthropic's clients to send whole conversations."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("threads",)


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """Description of one error in Anthropic's shape."""

    type: str
    message: str
    details: ThreadDetails | UnsetType = UNSET


class MessagesErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Body of every answer under /v1/messages that is not a success, and last event of a stream that fails there."""

    error: MessagesErrorDetail
    request_id: str | None = None


INTERNAL = "internal error; the router's log has the details"

_STATUSES: tuple[tuple[type[BatonError], int], ...] = (  # the first class that fits counts
    (NotFound, 404),
    (RequestError, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (Foreign, 403),
    (Conflict, 409),
    (Overloaded, 429),
    (RequestCancelled, 499),  # nginx's own; clients retry 409 and 5xx by themselves, but not this
    (Unavailable, 503),
    (OutOfPages, 503),
    (DeadlineExceeded, 504),
)
_STATUS_OF_NODE_FAULT = {RequestError.code: 400, OutOfMemory.code: 503, OutOfPages.code: 503, Unavailable.code: 503}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
_MESSAGES_TYPES = {  # Anthropic's types by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PATH = re.compile(r"(?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpRefusal):
        return error.status
    if isinstance(error, NodeFault):
        return _STATUS_OF_NODE_FAULT.get(error.code, 500)
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def all_statuses() -> set[int]:
    """Return every status that `status_of` can return for an error that is not an HttpRefusal."""
    return {500, *_STATUS_OF_NODE_FAULT.values(), *(status for _, status in _STATUSES)}


def body_of(error: BatonError, *, may_operate: bool = False) -> ErrorBody:
    """Return the JSON body of an error. It hides the router's internals; the log has them."""
    status = status_of(error)
    param = error.param if isinstance(error, RequestError) else None
    if isinstance(error, NodeFault) or (isinstance(error, NoNode) and not may_operate):
        words = error.shown
    else:
        words = str(error) if status != 500 else INTERNAL
    words = words.encode("utf-8", "backslashreplace").decode()  # a header may hold bytes that are not UTF-8
    default_type = "invalid_request_error" if status < 500 else "server_error"
    return ErrorBody(ErrorDetail(words, _TYPES.get(status, default_type), param, error.code if status != 400 else None))


def messages_body_of(error: BatonError, *, request_id: str | None, may_operate: bool = False) -> MessagesErrorBody:
    """Return the body of an error in Anthropic's shape."""
    status, words = status_of(error), body_of(error, may_operate=may_operate).error.message
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = ThreadDetails() if isinstance(error, ThreadRefused) else UNSET
    return MessagesErrorBody(MessagesErrorDetail(kind, words, details), request_id)


def response_of(
    error: BatonError, *, may_operate: bool = False, in_anthropics: bool = False, request_id: str | None = None
) -> web.Response:
    """Return the HTTP response of an error. It has Retry-After if the client may try again.

    If `may_operate`, the caller may read which nodes are at fault. `in_anthropics`: the body has Anthropic's shape.
    """
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))  # OpenAI's clients read this
    elif isinstance(error, Unavailable) or (isinstance(error, NodeFault) and error.code == Unavailable.code):
        headers["Retry-After"] = "1"
    elif isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"  # OpenAI's clients would retry a 504 by themselves
    elif isinstance(error, HttpRefusal):
        headers.update(error.headers)
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if in_anthropics:
        body = messages_body_of(error, request_id=request_id, may_operate=may_operate)
    else:
        body = body_of(error, may_operate=may_operate)
    return web.Response(
        status=status_of(error), body=msgspec.json.encode(body), content_type="application/json", headers=headers
    )


def from_validation(error: msgspec.ValidationError) -> RequestError:
    """Return an error that names the field of the body that is missing, unknown, mistyped or out of bounds."""
    text = str(error)
    path = _PATH.search(text)
    inner = path.group(1) if path else ""
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    field = ".".join(name for name in (inner, named.group(1) if named else "") if name)
    words = text[: path.start()].removesuffix(" - at ").strip() if path else text
    return RequestError(f"{field}: {words}" if field else words, param=re.split(r"[.\[]", field)[0] or None)


def from_malformed(body: bytes, error: Exception) -> RequestError:
    """Return an error for a body that is not JSON. If it is JSON but for NaN, Infinity or half a surrogate pair, the
    error names the field."""
    encoding = json.detect_encoding(body)
    if encoding.startswith(("utf-16", "utf-32")) and _is_text(body, encoding):
        return RequestError(f"the body is in {encoding[:6].upper()}; send it in UTF-8")
    if isinstance(error, UnicodeDecodeError):
        return RequestError("the body is not valid UTF-8")
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply")
    try:
        fields: Any = json.loads(body) if len(body) < 1 << 20 else None  # Python's decoder takes all three
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        for name, value in cast(dict[str, Any], fields).items():
            for words in map(_fault_of, _leaves([name, value])):
                if words is not None:
                    field = _escaped(name)
                    return RequestError(f"{field}: {words}", param=field)
    return RequestError(f"the body is not valid JSON: {error}")


def _is_text(body: bytes, encoding: str) -> bool:
    try:
        return body.decode(encoding).lstrip().startswith(("{", "["))
    except UnicodeDecodeError:
        return False


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and plain values in a decoded value. Its depth does not matter."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += chain.from_iterable(cast(dict[str, Any], each).items())
        elif isinstance(each, list):
            left += cast(list[Any], each)
        else:
            yield each


def _fault_of(leaf: Any) -> str | None:
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return "NaN and Infinity are no JSON numbers"
    if isinstance(leaf, str) and (half := _HALF_PAIR.search(leaf)) is not None:
        return f"{_escaped(half[0])} is half of a surrogate pair; send the whole character, or leave it out"
    return None


def _escaped(text: str) -> str:
    """Return the text with an escape in place of each half of a surrogate pair, which no answer can hold."""
    return text.encode(errors="backslashreplace").decode()
