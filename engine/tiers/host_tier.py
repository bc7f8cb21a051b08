"""The host tier: slots of host memory for pages that the prefix cache evicts from the pool.

    pool page --evict: store--> slot --oldest leaf--> gone
              <--restore: load--

A slot holds all bytes of one page, in all layers and pools; tail pages have slots of their own. The nodes of the prefix
cache's tree name the slots, so the tier has no index: a prompt finds a slot by its tokens, as it finds a page.

A page that is loaded keeps its slot, so it can be evicted again without a copy. When slots are short, the tier first
takes those whose page lies in the pool, too. Then it takes those that are unused longest. A node is evicted from the
pool after its children, and loaded after its parent. So among the nodes that lie in slots alone, in the order in which
they came, every node comes before its parent: the first one is a leaf.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ...metadata.estimate import Estimate, Fading
from ...metadata.wire.node_info import HostFigures, SlotLedger, TierLedger
from ..state.cached_node import CachedNode
from .disk_tier import DiskTier, Fetch
from .page_files import Kind

_LOADED = Fading(to=0.0, after=30.0, half_life=30.0)  # a slow load must not be the last one

_WAITED = 0.5  # a prompt waits for files at most this part of the time that computing takes

SlotField = Literal["slot", "tail_slot"]


class TimedLoad(NamedTuple):
    """Pages that were loaded, and the seconds that it took."""

    num_pages: int
    seconds: float


class PageCopies(Protocol):
    """Copies of whole pages between the pools of a node and slots of host memory. The device does them in the order of
    the calls: work that is submitted before a call comes before the copy, and later work comes after it. So a page may
    be written again, and a slot may be loaded, as soon as the call returns.

    Slots of tail pages are numbered behind the others, as tail pages are."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_tail_slots(self) -> int: ...

    @property
    def is_settled(self) -> bool:
        """Whether all loads are done, so that other processes may read the pages."""
        ...

    @property
    def num_ahead(self) -> int:
        """How many pages it pays to store at once before they are evicted; 0: it does not pay."""
        ...

    def store(self, pages: Sequence[int], slots: Sequence[int], *, is_ahead: bool = False) -> None:
        """Copy pages, which are all tail pages or all others, into slots. With `is_ahead`, the pages must stay as they
        are until `await_ahead`."""
        ...

    def await_ahead(self) -> None:
        """Let later work wait for all copies that were made ahead."""
        ...

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots into pages likewise."""
        ...

    def rows(self, slot: int) -> list[np.ndarray]:
        """Return the memory of a slot, uint8, of each rank that has pages of its own."""
        ...

    def fence(self) -> Callable[[], object]:
        """Return a function, for any thread, that waits until the copies so far are done."""
        ...

    def take_loads(self) -> list[TimedLoad]:
        """Return the loads that were done since the last call."""
        ...


class HostSlots:
    """The books of slots of one kind. `field` is the node's field that names the slot."""

    def __init__(self, slots: range, field: SlotField) -> None:
        self._field: SlotField = field
        self._free = list(reversed(slots))
        self._alone: OrderedDict[CachedNode, None] = OrderedDict()  # not in the pool; unused longest first
        self._doubled: OrderedDict[CachedNode, None] = OrderedDict()  # in the pool, too
        self._reading: set[int] = set()  # into which a file is read
        self._ages = dict.fromkeys(slots, 0)  # how often each was taken
        self.num_slots = len(slots)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def ledger(self) -> SlotLedger:
        """Count the slots."""
        num_cached, num_reading = len(self._alone) + len(self._doubled), len(self._reading)
        assert self.num_used == num_cached + num_reading, (self.num_used, num_cached, num_reading)
        return SlotLedger(len(self._free), num_cached, len(self._doubled), num_reading)

    @property
    def nodes(self) -> list[CachedNode]:
        """All nodes that have a slot, those whose page lies nowhere else first, each before its parent."""
        return [*self._alone, *self._doubled]

    def of(self, node: CachedNode) -> int | None:
        """Return the node's slot."""
        return getattr(node, self._field)

    def take(self, drop: Callable[[CachedNode], object], *, is_ahead: bool = False) -> int | None:
        """Return a slot to write, which the caller gives to a node. `drop(node)` is called for a node that loses its
        only copy. None: there is no slot. With `is_ahead`, no node loses its second copy: it may be the next one that
        needs it."""
        if not self._free:
            if self._doubled and not is_ahead:
                self.free(next(iter(self._doubled)))
            elif self._alone:
                drop(next(iter(self._alone)))
        if not self._free:
            return None
        self._ages[self._free[-1]] += 1
        return self._free.pop()

    def watch(self, slot: int) -> Callable[[], bool]:
        """Return a function, for any thread, which says whether the slot still holds what it holds now."""
        ages, age = self._ages, self._ages[slot]
        return lambda: ages[slot] == age

    def begin_read(self, slot: int) -> None:
        """A file is read into a slot that was taken."""
        self._reading.add(slot)

    def end_read(self, slot: int, node: CachedNode | None) -> None:
        """The file was read: the node gets the slot, unless it has one. None: nobody wants it."""
        self._reading.remove(slot)
        if node is None or self.of(node) is not None:
            self._free.append(slot)
            return
        self.leave_pool(node, slot)
        if (node.page if self._field == "slot" else node.tail) is not None:
            self.enter_pool(node)

    def touch(self, node: CachedNode) -> None:
        """The node is used: if the slot has its only copy, it is the last one to go."""
        if node in self._alone:
            self._alone.move_to_end(node)

    def hold(self, node: CachedNode) -> None:
        """Keep the node's slot until `leave_pool` or `enter_pool`."""
        self._alone.pop(node, None)
        self._doubled.pop(node, None)

    def leave_pool(self, node: CachedNode, slot: int) -> None:
        """The slot, which is on hold or new, has the only copy of the node's page."""
        setattr(node, self._field, slot)
        self._alone[node] = None

    def enter_pool(self, node: CachedNode) -> None:
        """The pool has the node's page, too."""
        self.hold(node)
        self._doubled[node] = None

    def free(self, node: CachedNode) -> None:
        """Take the node's slot."""
        slot = self.of(node)
        assert slot is not None
        setattr(node, self._field, None)
        self._alone.pop(node, None)
        self._doubled.pop(node, None)
        self._free.append(slot)


class HostTier:
    """Owns the slots of one node's host memory. The prefix cache alone uses it."""

    def __init__(self, copies: PageCopies) -> None:
        self.copies = copies
        num_slots = copies.num_slots
        self.kept = HostSlots(range(num_slots), "slot")
        self.tails = HostSlots(range(num_slots, num_slots + copies.num_tail_slots), "tail_slot")
        self.compute_token_s: Callable[[], float] = lambda: 0.0  # seconds per prompt token, as the node measures them
        self._page_s = Estimate(num_kept=3, memory=8, fading=_LOADED)  # of a load, per page
        self.disk: DiskTier | None = None
        self.num_stored = self.num_restored = 0  # pages, tail pages included
        self.restore_s = 0.0

    @property
    def figures(self) -> HostFigures:
        """The slots in use now, and the pages copied and the seconds of loads since the start."""
        figures = HostFigures(
            num_slots=self.kept.num_slots + self.tails.num_slots,
            num_used=self.kept.num_used + self.tails.num_used,
            num_stored=self.num_stored,
            num_restored=self.num_restored,
            restore_seconds=self.restore_s,
        )
        return figures if self.disk is None else self.disk.add_figures(figures)

    def store(self, nodes: Sequence[CachedNode], drop: Callable[[CachedNode], object]) -> None:
        """Give slots to nodes whose pages the pool is about to free, and copy the pages there. The nodes come before
        their parents. If there are not slots for all, the first ones get none. `drop`: as of `HostSlots.take`."""
        self._store(self.kept, nodes, [node.page for node in nodes], drop)

    def store_tails(self, nodes: Sequence[CachedNode], drop: Callable[[CachedNode], object]) -> None:
        """Store the tail pages of nodes likewise."""
        self._store(self.tails, nodes, [node.tail for node in nodes], drop)

    def store_ahead(self, nodes: Sequence[CachedNode], drop: Callable[[CachedNode], object]) -> None:
        """Copy pages into slots that the pool will free soon, so that nothing waits for a copy then."""
        moves: list[tuple[CachedNode, int, int]] = []
        for node in nodes:
            if node.slot is None and node.page is not None and len(moves) < self.copies.num_ahead:
                slot = self.kept.take(drop, is_ahead=True)
                if slot is None:
                    break
                moves.append((node, node.page, slot))
        if moves:
            self.copies.store([page for _, page, _ in moves], [slot for _, _, slot in moves], is_ahead=True)
            self.num_stored += len(moves)
        for node, _, slot in moves:
            self.kept.leave_pool(node, slot)
            self.kept.enter_pool(node)

    def load(self, slots: HostSlots, nodes: Sequence[CachedNode], pages: Sequence[int]) -> None:
        """Copy the slots of nodes, which are on hold, into pages of the pool."""
        named = [slot for node in nodes if (slot := slots.of(node)) is not None]
        assert len(named) == len(pages), (named, pages)
        if named:
            self.copies.load(named, pages)
            self.num_restored += len(named)
        for node in nodes:
            slots.enter_pool(node)

    @property
    def most_pages(self) -> int:
        """The most pages and tail pages that slots and files hold."""
        num_slots = self.kept.num_slots + self.tails.num_slots
        if self.disk is None:
            return num_slots
        return num_slots + self.disk.num_bytes // min(self.slot_bytes.values(), default=1)

    @property
    def slot_bytes(self) -> dict[Kind, int]:
        """Bytes of a slot of each kind that has slots."""
        firsts: dict[Kind, int] = {"page": 0, "tail": self.kept.num_slots}
        sizes = {"page": self.kept.num_slots, "tail": self.tails.num_slots}
        return {
            kind: sum(row.nbytes for row in self.copies.rows(first)) for kind, first in firsts.items() if sizes[kind]
        }

    def ledger(self) -> TierLedger:
        """Count the slots of each kind."""
        disk = None if self.disk is None else self.disk.ledger()
        return TierLedger(self.kept.ledger(), self.tails.ledger() if self.tails.num_slots else None, disk)

    def is_sooner(self, num_pages: int, num_tokens: int) -> bool:
        """Return whether to load so many pages takes less time than to compute so many tokens. What was not measured
        counts as quick to load and slow to compute."""
        now, token_s = time.monotonic(), self.compute_token_s()
        self._learn(now)
        return not token_s or num_pages * self._page_s.at(now) < num_tokens * token_s

    def _learn(self, now: float) -> None:
        for load in self.copies.take_loads():
            self._page_s.observe(load.seconds / load.num_pages, now)
            self.restore_s += load.seconds

    def _store(
        self,
        slots: HostSlots,
        nodes: Sequence[CachedNode],
        pages: Sequence[int | None],
        drop: Callable[[CachedNode], object],
    ) -> None:
        known = [slots.of(node) for node in nodes]
        for node in nodes:
            slots.hold(node)  # until all have one
        num_known = len(known) - known.count(None)
        if num_known:
            self.copies.await_ahead()
        new = [place for place, slot in enumerate(known) if slot is None]
        left_out = set(new[: max(0, len(new) - (slots.num_slots - num_known))])
        own = [slots.take(drop) if slot is None and place not in left_out else slot for place, slot in enumerate(known)]
        moves = [
            (page, slot)
            for page, slot, before in zip(pages, own, known, strict=True)
            if page is not None and slot is not None and before is None
        ]
        if moves:
            self.copies.store([page for page, _ in moves], [slot for _, slot in moves])
            self.num_stored += len(moves)
        for node, slot in zip(nodes, own, strict=True):
            if slot is not None:
                slots.leave_pool(node, slot)
        if self.disk is not None:
            wait, kind = self.copies.fence(), self._kind(slots)
            for node, slot in zip(nodes, own, strict=True):
                if slot is not None:
                    self.disk.write(node, kind, self.copies.rows(slot), slots.watch(slot), wait)

    def _read(
        self, slots: HostSlots, node: CachedNode, kind: Kind, fetch: Fetch, drop: Callable[[CachedNode], object]
    ) -> bool:
        """Begin to read a file. False: there is no slot for it."""
        assert self.disk is not None
        if self.disk.join(node, kind, fetch):
            return True
        slot = slots.take(drop)
        if slot is None:
            return False
        slots.begin_read(slot)
        if not (node.is_filed if kind == "page" else node.tail_is_filed):  # it went with what was dropped for it
            slots.end_read(slot, None)
            return False
        self.disk.read(node, kind, slot, self.copies.rows(slot), self.copies.fence(), fetch)
        return True

    def _kind(self, slots: HostSlots) -> Kind:
        return "page" if slots is self.kept else "tail"

    def fetch(
        self,
        nodes: Sequence[CachedNode],
        tails: Sequence[CachedNode],
        num_tokens: int,
        drops: tuple[Callable[[CachedNode], object], Callable[[CachedNode], object]],
    ) -> Fetch | None:
        """Begin to read files of nodes, and of tail pages of others, into slots. `num_tokens`: that a prompt then need
        not compute. `drops`: as of `HostSlots.take`, for both kinds of slots. Return what the prompt waits for; None if
        it is sooner computed."""
        assert self.disk is not None
        num_pages, now = len(nodes) + len(tails), time.monotonic()
        limit_s = num_tokens * self.compute_token_s() * _WAITED
        if self.disk.expected_s(num_pages) > limit_s:
            return None
        fetch = Fetch(num_pages, num_pages, now, now + limit_s)
        for slots, own, drop in ((self.kept, nodes, drops[0]), (self.tails, tails, drops[1])):
            kind = self._kind(slots)
            for node in own:
                if not self._read(slots, node, kind, fetch, drop):
                    fetch.num_left -= 1
        return fetch
