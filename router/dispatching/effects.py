"""Effects: actions that the dispatcher returns after an event. The runner (runner.py) carries them out in order."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from ...metadata.errors import BatonError
from ...metadata.wire.membership import LedgerReport
from ...metadata.wire.messages import ToNode
from ..nodes.node import Node
from ..requests.delta import Delta
from ..requests.request import Request, Sequence
from ..requests.trace import TraceRecorder


class Send(NamedTuple):
    """Send a message to a node. If that fails, the dispatcher must be told (`on_send_failed`)."""

    node: Node
    message: ToNode


class SendUnknown(NamedTuple):
    """Send a message, in this protocol version, to a peer that may not have joined. A failure is ignored."""

    peer: bytes
    message: ToNode
    protocol: int


class Output(Struct, frozen=True, gc=False):  # made once per token: a Struct costs half of a NamedTuple
    """Tell the request's listener of new output."""

    sequence: Sequence
    delta: Delta


class Done(NamedTuple):
    """Tell the request's listener that every sequence has ended."""

    request: Request


class Error(NamedTuple):
    """Tell the request's listener that the request ended with an error."""

    request: Request
    error: BatonError


class Over(NamedTuple):
    """A request is over: its timeline may be exported."""

    trace: TraceRecorder


class Ledger(NamedTuple):
    """A node has answered a question about its page ledger."""

    node: Node
    report: LedgerReport


Effect = Send | SendUnknown | Output | Done | Error | Over | Ledger
Effects = list[Effect]  # one list, owned by the dispatcher; the parts that it is made of append to it
