"""The one place where errors become HTTP: a status and OpenAI's body {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from ..metadata.errors import BatonError, OutOfPages, Overloaded, RequestError, Unavailable


class NotFound(RequestError):
    """No such model, or no such route."""

    code = "not_found"


class DeadlineExceeded(BatonError):
    """The request's own time limit, or the router's for all, is over."""

    code = "timeout"


class RequestCancelled(BatonError):
    """Somebody else than the waiting client has cancelled the request."""

    code = "cancelled"


class Unauthorized(BatonError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class Forbidden(BatonError):
    """The key is good, but not for this route."""

    code = "admin_key_required"


class Foreign(BatonError):
    """The request comes from a web page, or is for a host, that has no business here."""

    code = "foreign"


class NodeFault(BatonError):
    """Nodes could not do it. Its text is for the log: nodes write what they like; `shown` is for the client."""

    def __init__(self, message: str, code: str, shown: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code in _SHOWN else "node_failed"
        self.shown = shown or _SHOWN.get(code, "a node failed at this request; its log says why")


class NoNode(Unavailable):
    """No node of a role takes requests. `shown` is for every client; who may operate is told which nodes, and why."""

    def __init__(self, shown: str, words: str | None = None) -> None:
        super().__init__(words or shown)
        self.shown = shown


class HttpRefusal(BatonError):
    """The HTTP request itself is at fault: method, size, type or encoding of its body. `headers` go with the answer."""

    code = "http_error"

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` names the field of the request at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every response that is no success."""

    error: ErrorDetail


_SHOWN = {
    RequestError.code: "the nodes cannot serve this request: its prompt or its parameters are more than they can hold",
    OutOfPages.code: "the request is larger than a decode node's memory: shorten the prompt or ask for fewer tokens",
    Unavailable.code: "the node that served the request is gone",
}
_STATUS = {RequestError.code: 400, OutOfPages.code: 503, Unavailable.code: 503}
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
_PATH = re.compile(r"(?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def status_of(error: BatonError) -> int:
    """The HTTP status of an error."""
    match error:
        case HttpRefusal():
            return error.status
        case NodeFault():
            return _STATUS.get(error.code, 500)
        case NotFound():
            return 404
        case RequestError():
            return 400
        case Unauthorized():
            return 401
        case Forbidden() | Foreign():
            return 403
        case Overloaded():
            return 429
        case RequestCancelled():
            return 499  # nginx's: clients do not try it again by themselves, as they do 409 and 5xx
        case Unavailable() | OutOfPages():
            return 503
        case DeadlineExceeded():
            return 504
        case _:
            return 500


def body_of(error: BatonError, *, may_operate: bool = False) -> ErrorBody:
    """The JSON body of an error. It says nothing of our insides: what went wrong there is in the log."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, RequestError) else None
    if isinstance(error, NodeFault) or (isinstance(error, NoNode) and not may_operate):
        words = error.shown
    else:
        words = str(error) if status != 500 else "internal error; the router's log has the details"
    words = words.encode("utf-8", "backslashreplace").decode()  # headers may hold what is no text
    return ErrorBody(ErrorDetail(words, kind, param, error.code if status != 400 else None))


def outcome_of(error: BatonError) -> str:
    """What a request that ended so is counted as."""
    match error:
        case Overloaded():
            return "refused"
        case RequestCancelled():
            return "cancelled"
        case _:
            return "failed"


def response_of(error: BatonError, *, may_operate: bool = False) -> web.Response:
    """The whole HTTP response of an error, with Retry-After where the client may come again. `may_operate`: its reader
    may be told of nodes."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))  # the official clients' own
    elif isinstance(error, Unavailable) or (isinstance(error, NodeFault) and error.code == Unavailable.code):
        headers["Retry-After"] = "1"
    elif isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"  # the official clients try a 504 again by themselves
    elif isinstance(error, HttpRefusal):
        headers.update(error.headers)
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    data = msgspec.json.encode(body_of(error, may_operate=may_operate))
    return web.Response(status=status_of(error), body=data, content_type="application/json", headers=headers)


def from_validation(error: msgspec.ValidationError) -> RequestError:
    """A field of the body is missing, unknown, of the wrong type or out of bounds: say which."""
    text = str(error)
    path = _PATH.search(text)
    inner = path.group(1) if path else ""
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    field = ".".join(part for part in (inner, named.group(1) if named else "") if part)
    words = text[: path.start()].removesuffix(" - at ").strip() if path else text
    return RequestError(f"{field}: {words}" if field else words, param=re.split(r"[.\[]", field)[0] or None)


def from_malformed(body: bytes, error: Exception) -> RequestError:
    """The body is no JSON. Python writes NaN and Infinity into JSON; then the field that holds it is named."""
    if isinstance(error, UnicodeDecodeError):
        return RequestError("the body is not valid UTF-8")
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply")
    try:
        fields: Any = json.loads(body) if len(body) < 1 << 20 else None
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        for name, value in fields.items():  # pyright: ignore[reportUnknownVariableType]
            if _holds_non_finite(value):
                return RequestError(f"{name}: NaN and Infinity are no JSON numbers", param=str(name))  # pyright: ignore[reportUnknownArgumentType]
    return RequestError(f"the body is not valid JSON: {error}")


def _holds_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_holds_non_finite(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return any(_holds_non_finite(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return False
