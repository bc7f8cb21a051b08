"""Plain values for the orders of rank 0 to the other ranks about handoffs, and for the reports of these ranks.

                  order          does                                                     report
    to pull       BeginPulling   makes the rank's RankPuller                              -
                  ExpectPages    marks pages that will be written, like GPU fences        -
                  OpenSource     opens links to the ranks of another node                 SourceLost, if one is over
                  FetchPages     copies a rank's heads of pages, and checks them          FetchedPages, FetchFailed
                  ForgetUnit     stops the copies of a unit                               -
                  CloseSource    closes the links to another node                         -
    to serve      BeginServing   makes the rank's PageServer                              its address
                  DigestAhead    begins to digest pages that work under way computes      -
                  OfferPages     digests computed pages, and lets a unit's reader pull    OfferDigests, OfferFailed
                  ServeUnit      names the node that may pull a unit's pages              OfferFailed, without memory
                  EndUnit        ends the unit's ticket: nobody pulls its pages any more  -
                  CloseReader    closes the links of another node                         -

Decode nodes pull prompts, and prefill nodes serve them. Nodes of both roles do both with the pages of prefix caches
(loans.py).

Each rank has one line to rank 0. Orders are done in the order in which they and other work were sent. So a page that is
forgotten is not written after the next work, and a page is digested after the work that computed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...wire.node_info import HostMemory, Peer
from ...wire.request import Unit

# --- the begin of handoffs: the first order to a rank (engine/ranks/handoffs.py) ---


@dataclass(frozen=True, slots=True)
class BeginPulling:
    """The rank pulls its heads in this epoch of its decode node. `fingerprints` as in `Endpoint`."""

    epoch: str
    fingerprints: tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class BeginServing:
    """The rank serves its heads in this epoch of its prefill node. Rank 0 binds at `bind_host`, and counts generations
    in the memory `counted`."""

    epoch: str
    fingerprints: tuple[str, str | None]
    bind_host: str
    counted: HostMemory


# --- to pull: RankPuller does these ---


@dataclass(frozen=True, slots=True)
class ExpectPages:
    """Pages of ours that fetches will write. The writes wait for all work that was sent before."""

    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A prefill node, and the addresses at which its ranks serve pages, by rank. `number` names the links in
    reports."""

    number: int
    peer: Peer
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Pages to fetch from the prefill node of this epoch, as columns. `number` names the fetch in reports.

    `checksums` are those of the rank's own heads, for each page in the order of its pools; empty without checksums."""

    number: int
    epoch: str
    unit: Unit
    indices: Sequence[int]  # in the ticket
    sources: Sequence[int]  # pages there
    targets: Sequence[int]  # pages here
    generations: Sequence[int]  # as offered
    checksums: bytes


@dataclass(frozen=True, slots=True)
class ForgetUnit:
    """A unit whose pages are not written any more, from the next order or work on."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class CloseSource:
    """The epoch of a prefill node whose links are over."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FetchedPages:
    """Pages of one fetch that were copied and checked. `generations` were read after the copies. `wrong_blocks` has,
    by index, the first block of the whole page whose checksum is wrong here."""

    epoch: str
    number: int
    indices: Sequence[int]
    generations: Sequence[int]
    wrong_blocks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The device of the rank has no memory for fetching or checking pages of this unit."""

    epoch: str
    number: int
    unit: Unit
    reason: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A link of the rank to the prefill node of this epoch is over. `number` is that of OpenSource. `is_refused`: the
    two can never hand over."""

    epoch: str
    number: int
    reason: str
    is_refused: bool


PullOrder = ExpectPages | OpenSource | FetchPages | ForgetUnit | CloseSource
PullReport = FetchedPages | FetchFailed | SourceLost

# --- to serve: PageServer does these ---


@dataclass(frozen=True, slots=True)
class DigestAhead:
    """Pages that the work sent so far completes, and that will be offered. A GPU digests them behind that work, but
    before later work."""

    pages: Sequence[int]
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class OfferPages:
    """Computed pages of a unit's ticket, as columns. `number` names the offer in reports."""

    number: int
    unit: Unit
    indices: Sequence[int]  # in the ticket
    pages: Sequence[int]
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class ServeUnit:
    """The unit's ticket is claimed by the decode node of this epoch."""

    unit: Unit
    epoch: str


@dataclass(frozen=True, slots=True)
class EndUnit:
    """A unit whose ticket has ended."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class CloseReader:
    """The epoch of a decode node whose links are over."""

    epoch: str


@dataclass(frozen=True, slots=True)
class OfferDigests:
    """The checksums of an offer's pages, of the rank's own heads, page by page."""

    number: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class OfferFailed:
    """The device of the rank has no memory for handing over pages of this unit."""

    unit: Unit
    reason: str


ServeOrder = DigestAhead | OfferPages | ServeUnit | EndUnit | CloseReader
ServeReport = OfferDigests | OfferFailed


OrderT_contra = TypeVar("OrderT_contra", bound=PullOrder | ServeOrder, contravariant=True)
ReportT_co = TypeVar("ReportT_co", bound=PullReport | ServeReport, covariant=True)


class RankLine(Protocol[OrderT_contra, ReportT_co]):
    """The line from rank 0 to the other ranks of its node, for orders and reports of one kind. Only the main thread of
    rank 0 uses it."""

    @property
    def size(self) -> int:
        """The number of ranks, rank 0 included."""
        ...

    @property
    def has_reports(self) -> bool:
        """Whether `receive` has reports that no file descriptor tells of any more."""
        ...

    def send(self, rank: int, order: OrderT_contra) -> None:
        """Send an order to rank 1 or above, behind all work that was sent before. Raises RankLost if it is gone."""
        ...

    def receive(self) -> Sequence[tuple[int, ReportT_co]]:
        """Return the reports that have come, and the rank of each. Does not wait. Raises RankLost if a rank is gone."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Return the file descriptors that become readable when a report comes."""
        ...


PullLine = RankLine[PullOrder, PullReport]
ServeLine = RankLine[ServeOrder, ServeReport]
