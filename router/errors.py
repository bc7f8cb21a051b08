"""Errors that the router raises beside those of metadata/errors.py. http/server/errors.py maps them to answers."""

from __future__ import annotations

from ..metadata.errors import BatonError, OutOfMemory, OutOfPages, Overloaded, RequestError, Unavailable


class NotFound(RequestError):
    """The model, node, request or route does not exist."""

    code = "not_found"


class Conflict(BatonError):
    """The present state of a node does not allow the change that an operator asks for."""

    code = "http_error"


class DeadlineExceeded(BatonError):
    """The request took longer than its own time limit, or than the router's limit for all requests."""

    code = "timeout"


class RequestCancelled(BatonError):
    """Someone other than the waiting client has cancelled the request."""

    code = "cancelled"


class ThreadRefused(RequestError):
    """The client asked for a conversation that the server stores. Anthropic's clients go on without one."""


class Unauthorized(BatonError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class Forbidden(BatonError):
    """The key is valid, but the route needs the admin key."""

    code = "admin_key_required"


class Foreign(BatonError):
    """The request comes from a web page of a foreign origin, or names a foreign host."""

    code = "foreign"


class NodeFault(BatonError):
    """A node failed at the request.

    The message may hold whatever the node wrote, so only the log gets it. The client gets `shown`.
    """

    code = "node_failed"

    def __init__(self, message: str, code: str, shown: str | None = None) -> None:
        super().__init__(message)
        if code in _SHOWN:
            self.code = code
        self.shown = shown or _SHOWN.get(code, "a node failed at this request; its log says why")


class NoNode(Unavailable):
    """No node of a role takes requests. Every client gets `shown`; callers who may operate nodes get the message."""

    def __init__(self, shown: str, words: str | None = None) -> None:
        super().__init__(words or shown)
        self.shown = shown


_SHOWN = {
    RequestError.code: "the nodes cannot serve this request: its prompt or its parameters are more than they can hold",
    OutOfPages.code: "the request is larger than a decode node's memory: shorten the prompt or ask for fewer tokens",
    OutOfMemory.code: "a node's device has no memory left for this request: shorten the prompt or ask for less at once",
    Unavailable.code: "the node that served the request is gone",
}


def outcome_of(error: BatonError) -> str:
    """Return the outcome that metrics and traces record for a request that ended with `error`."""
    match error:
        case Overloaded():
            return "refused"
        case RequestCancelled():
            return "cancelled"
        case _:
            return "failed"
