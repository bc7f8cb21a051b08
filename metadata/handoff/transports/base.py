"""Transports move pages from a prefill node's pools into those of a decode node. The decode node copies them, so no
process writes the memory of another.

A transport is one subclass of `Transport` in a file of its own, and one line in registry.py. The class says

    name, needs_*, is_*, since     the pairs of nodes for which it works (`can_reach`, `can_serve`)
    welcome, prepare               the prefill node's part: publish its pools, and prepare pages before each offer
    open, step, receive, forget    the decode node's part: move the pages
    sockets, read, ask             if they come on a socket of the transport's own

The decode node lists its transports in LinkHello, best first. The prefill node answers with LinkWelcome, or a message
derived from it, and names the first that works. An instance belongs to one open link of a decode node. `HandoffClient`
gives it moves and takes the pages that landed. A transport knows nothing of tickets or leases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import zmq
from msgspec import Struct

from ...errors import ProtocolError
from ...wire.data_link import LinkHello, LinkWelcome, Pages, Pull
from ...wire.protocol import PROTOCOL_MIN, known
from ...wire.request import Unit
from ..descriptor_inbox import DescriptorInbox
from ..memory import PageMemory, whole_part
from ..pages import DevicePool, OfferedPages
from ..ranks.orders import PullOrder
from ..ranks.shards import PagePart
from ..schema.kv_layout import KvLayout

POLL_BYTES = 64 << 20  # most bytes of pages that a node copies before other work gets its turn
INBOX_SINCE = 8  # the protocol in which descriptors of host memory go to the inbox
PULL_BYTES = 4 << 20  # most bytes of pages that one Pull may ask for; it may always ask for one page


class Move(Struct, frozen=True):
    """One page to fetch: number `source` in the peer's pools, `target` in ours."""

    unit: Unit
    index: int  # in the ticket
    source: int
    target: int
    generation: int  # as offered
    checksums: bytes  # as offered


class Checked(NamedTuple):
    """The result of a check: the first block of the page whose checksum is wrong; None if all are right."""

    wrong_block: int | None


class Landed(NamedTuple):
    """A page that has been copied.

    `generation` is that of the source page, read after the copy. `checksums` are those of our own copy if the page lies
    in a pool on a GPU already; None means that it lies in `memory`, unchecked. `checked` is there if the ranks of this
    node have checked the page.
    """

    move: Move
    generation: int
    checksums: bytes | None = None
    checked: Checked | None = None


class PullTeam(Protocol):
    """The ranks of the decode node, as its rank 0 sees them."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def layouts(self) -> Sequence[KvLayout]:
        """The layouts of whole pages: target, then draft."""
        ...

    def send(self, rank: int, order: PullOrder) -> None:
        """Give an order to a rank, rank 0 included."""
        ...


@dataclass(frozen=True, slots=True)
class PeerHost:
    """Where a prefill node is, for transports that connect to it: the address of its data links, and how long the
    handshake there and a round trip take, seconds."""

    data_address: str
    has_keys: bool  # the data link is under CURVE
    context: zmq.Context[zmq.Socket[bytes]]
    clock: Callable[[], float]
    handshake_s: float = 0.0
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullEnd:
    """The decode node's part of an open transport: its pools, and a function that asks the peer for pages."""

    memory: tuple[PageMemory, ...]  # target, then draft
    send: Callable[[Pull], None]
    device: DevicePool | None = None  # the pools on a GPU, whose host mirror `memory` is
    inbox: DescriptorInbox | None = None
    part: PagePart | None = None  # of each page that comes over the link; None: the whole page
    team: PullTeam | None = None  # on the link of rank 0 that has the tickets
    protocol: int = PROTOCOL_MIN  # the peer is addressed in it
    peer: PeerHost | None = None


def is_near(hello: LinkHello, host: str) -> bool:
    """Return whether a prefill node on `host` and the decode node that said this hello can share memory: by the inbox
    of the hello, which is in reach, or because one may open the other's /proc/PID/fd."""
    return hello.host == host or shares_by_inbox(hello)


def shares_by_inbox(hello: LinkHello) -> bool:
    """Return whether the decode node that said this hello takes host memory from its inbox, which is in reach."""
    return bool(hello.inbox) and known(hello.protocol) >= INBOX_SINCE


class Transport(ABC):
    """Moves the pages of one peer into `memory` (target pool, then draft), or a `part` of each page."""

    name: ClassVar[str]
    needs_same_host: ClassVar[bool] = False  # it reads the peer's memory (`is_near`)
    needs_device: ClassVar[bool] = False  # the pools of both nodes must lie on GPUs
    needs_inbox: ClassVar[bool] = False  # the decode node must have an inbox for file descriptors
    needs_page_port: ClassVar[bool] = False  # pages come from the prefill node's page port, so both need keys
    is_readable: ClassVar[bool] = False  # on the network; nodes with keys use it only if the operator has said so
    is_automatic: ClassVar[bool] = True  # `auto` may take it
    since: ClassVar[int] = PROTOCOL_MIN  # the first protocol that has its welcome

    def __init__(self, memory: Sequence[PageMemory], part: PagePart | None = None) -> None:
        self.memory = tuple(memory)
        self.part = part or whole_part(memory)
        self.page_bytes = self.part.page_bytes
        self._queue: deque[Move] = deque()

    # --- the prefill node's side -----------------------------------------------------------------------------------

    @classmethod
    def missing(cls) -> str:
        """Return what this machine lacks for the transport, and how to install it; empty if it lacks nothing."""
        return ""

    @classmethod
    def can_serve(cls, pages: OfferedPages) -> bool:
        """Return whether a prefill node with these pools can serve them by this transport."""
        return not cls.needs_device or pages.device is not None

    @classmethod
    def can_reach(cls, hello: LinkHello, host: str) -> bool:
        """Return whether this transport works between a prefill node on `host` (host_identity) and the decode node that
        said this hello, whose inbox is left only if it is in reach."""
        return (
            (not cls.needs_same_host or is_near(hello, host))
            and (not cls.needs_inbox or bool(hello.inbox))
            and known(hello.protocol) >= cls.since
        )

    @classmethod
    def welcome(cls, welcome: LinkWelcome, pages: OfferedPages, hello: LinkHello) -> LinkWelcome:  # noqa: ARG003
        """Return the welcome with what the decode node needs to reach the pages. Raises TransferError if that fails;
        the prefill node then tries the next transport."""
        return welcome

    @classmethod  # noqa: B027 - most have nothing to do
    def prepare(cls, pages: OfferedPages, numbers: Sequence[int]) -> None:
        """Make pages of these numbers readable by a decode node. The server calls it before it sends their offer."""

    @classmethod  # noqa: B027 - most have nothing to do
    def begin_serving(cls, pages: OfferedPages) -> None:
        """Do what would take too long when the first decode node comes."""

    # --- the decode node's side ------------------------------------------------------------------------------------

    @classmethod  # noqa: B027 - most have nothing to do
    def begin_pulls(cls, memory: Sequence[PageMemory], own_host: str) -> None:
        """Do what would take too long when the first link is opened. `own_host` is this host's address in the network
        of the nodes."""

    @classmethod
    @abstractmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> Self:
        """Return a transport for the link that this welcome opened. Raises TransferError, with nothing left mapped or
        open, if it cannot work; the decode node then says hello again without this transport."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether `step` has something to do without waiting for the peer."""

    @property
    def is_waiting(self) -> bool:
        """Whether the peer owes an answer."""
        return False

    @property
    def wait_s(self) -> float | None:
        """How many seconds the loop may wait on the sockets before it calls `step`; None: until something comes."""
        return 0.0 if self.is_busy else None

    def fetch(self, moves: Iterable[Move]) -> None:
        """Queue moves. Their pages land in later calls of `step` or `receive`."""
        self._queue.extend(moves)

    @property
    def next_unit(self) -> Unit:
        """The unit for which the device has no memory, when `step` has said so: that of the first queued move."""
        return self._queue[0].unit

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets of this transport that the loop polls for input."""
        return []

    def read(self) -> tuple[Pages, memoryview] | None:
        """Return the next message of pages on a socket of this transport, for `receive`; None if none waits. Raises
        ProtocolError if it is not one of the peer's."""
        return None

    def ask(self) -> bool:
        """Ask the peer whether it has read the requests for pages, because answers stay away. If it has and they were
        lost, `step` raises TransferError. Return False if the pages come over the data link, which asks itself."""
        return False

    @abstractmethod
    def step(self, max_bytes: int) -> Iterator[Landed]:
        """Continue with the queued moves and copy about `max_bytes` at most. Each page is yielded before the next is
        copied, so that the caller checks it while it lies in the processor's cache. Raises OutOfMemory, after the last
        page, if the device has no memory for queued moves, which stay queued; TransferError if no page can come any
        more; and Unreachable if another transport may have a way."""

    def receive(self, message: Pages, data: memoryview) -> Iterator[Landed]:  # noqa: ARG002
        """Take the peer's pages, one after the other. If the caller stops iterating, the rest is not written. Raises
        ProtocolError if this transport asked for no such pages."""
        raise ProtocolError(f"pages of {message.unit} arrived on a link that uses {self.name}", rid=message.unit.rid)

    def forget(self, unit: Unit) -> None:
        """Drop the unit's moves. After this call no page of the unit is written; its target pages may be reused."""
        self._queue = deque(move for move in self._queue if move.unit != unit)

    def close(self) -> None:
        """Stop all moves and unmap the peer's memory. May be called twice."""
        self._queue.clear()
