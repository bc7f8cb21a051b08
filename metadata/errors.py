"""Errors that Baton raises for faults of the world outside. `assert` is for our own defects.

The router maps these to HTTP in one place (`router/http/server/errors.py`); a node maps them to one `Failed` message.
"""

from __future__ import annotations


class BatonError(Exception):
    """Base of all errors. `rid` and `node` name the request and the node, if known. A process that ends with the error
    exits with `exit_status`."""

    code = "internal_error"
    exit_status = 1

    def __init__(self, message: str, *, rid: str | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.rid = rid
        self.node = node


class ConfigError(BatonError):
    """A flag or a configuration field has a value that cannot work. The message names the value and the fix."""

    code = "config_error"
    exit_status = 2


class ModelError(BatonError):
    """A model directory is missing, truncated, or of a kind that Baton does not serve."""

    code = "model_error"
    exit_status = 2


class RequestError(BatonError):
    """The client's request cannot be served as it is. `param` names the wrong field."""

    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, rid: str | None = None) -> None:
        super().__init__(message, rid=rid)
        self.param = param


class Overloaded(BatonError):
    """A bounded queue is full. `retry_after_s` estimates when it will have room."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(BatonError):
    """No node can take the request: none has joined, or all of a role are gone or draining."""

    code = "unavailable"


class OutOfPages(BatonError):
    """A pool cannot give the pages asked for, either now (retry when others finish) or ever."""

    code = "out_of_pages"


class OutOfMemory(BatonError):
    """A device has no memory left for the work that it was asked to do. Other work may still fit."""

    code = "out_of_memory"


class ChunkOutOfMemory(OutOfMemory):
    """A device has no memory for the chunk of prompts beside a round. Neither of them was computed."""


class RoundOutOfMemory(OutOfMemory):
    """A device has no memory for a round. The chunk of prompts beside it was computed."""


class RankLost(BatonError):
    """A rank of the node died, hangs, or did not do what the others did. The node must start again."""

    code = "rank_lost"


class ProtocolError(BatonError):
    """A frame is not a message of this protocol, or arrived where such messages are not allowed."""

    code = "protocol_error"


class StaleMessage(ProtocolError):
    """A message about something that has ended here. Ordinary cancels cause such messages."""


class Refused(BatonError):
    """Two processes cannot work together. The message names both sides' values."""

    code = "refused"
    exit_status = 3


class TransferError(BatonError):
    """KV pages did not arrive whole: wrong checksum or generation, a revoked ticket, or a peer that is gone."""

    code = "transfer_error"


class Unreachable(TransferError):
    """A transport has no way to the peer, whose data link is open. Another transport may have one."""
