"""The prefix cache: a radix tree over whole KV pages, shared by all requests of a node.

A node of the tree is one page. Its edge is keyed by the page's tokens and the next `lookahead` tokens, because a
shifted drafter's KV at position i depends on tokens up to i + lookahead. The first edge is keyed by the salt as well,
so requests of different salts share no page. A `Lease` holds one reference on every page from the root to its last
page:

    lease = cache.acquire(prompt, salt, limit)               # pins the pages that are cached already
    table = lease.pages + cache.allocate(n, Owner.REQUEST)   # evicts pages if too few are free
    cache.insert(tokens, table[:num_computed // page_size], salt, lease)   # at any time, as often as wanted
    cache.release(lease, table)                              # gives back all pages of the request

A node may have a tail page, too (tail_pages.py): rows of the same tokens in layers that read back a little way alone.
Work may continue behind a cached page only if the tail pages that these layers read are cached. `acquire` finds the
last such page. Requests give the cache all tail pages that they read no more. An unused tail page can be evicted alone;
then no work continues behind its node. The cache first evicts tail pages in the middle of a text behind which no
request has continued.

A page without references can be evicted. Then its KV may go on in the host tier (engine/tiers/host_tier.py), and its
node in the tree. `restore` brings such pages back into the pool, where `acquire` finds them. A node in the pool has a
parent in the pool. `_idle` lists the pages that can be evicted, the longest idle first. Releases run from the last page
towards the root, so every page comes before its parent. Therefore the first entry always has no child in the pool, and
an eviction takes O(1).
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...metadata.errors import OutOfPages
from ...metadata.handoff.pages import CachedText, LentPages
from ...metadata.wire.node_info import PoolLedger, TierLedger
from ..tiers.disk_tier import Fetch
from ..tiers.host_tier import HostTier
from ..tiers.page_files import Kind
from .cached_node import CachedNode
from .pages import Owner, PagePool


@dataclass(slots=True, eq=False)
class Lease:
    """References on the cached pages that cover a sequence from its start. Only `PrefixCache` makes and ends leases."""

    salt: str
    pages: list[int]  # read-only to others; page i covers tokens i * page_size ..
    node: CachedNode | None  # of the last page (the root if there is none); None after the release
    tails: list[CachedNode] = field(default_factory=list[CachedNode])  # whose tail pages are pinned

    @property
    def tail_pages(self) -> list[int]:
        """The pinned tail pages. After `acquire` these are of the last pages."""
        return [node.tail for node in self.tails if node.tail is not None]

    def private(self, block_table: Sequence[int]) -> list[int]:
        """Return the pages of `block_table` that belong to the request: those that are not the lease's own."""
        assert self.node is not None, "the lease was released"
        covered = [own for own, cached in zip(block_table, self.pages, strict=False) if own != cached]
        return covered + list(block_table[len(self.pages) :])


class _Restorable(NamedTuple):
    """Nodes of a prefix that the host tier makes longer."""

    in_pool: list[CachedNode]
    absent: list[CachedNode]  # behind them
    ends: list[CachedNode]  # the last ones, whose tail pages are read
    tails: list[CachedNode]  # those of them whose tail pages are not in the pool
    num_new: int  # pages by which the prefix becomes longer


class PrefixCache:
    """Owns the pages of `pool` that outlive their request. With `enabled=False` it finds and keeps no page."""

    def __init__(self, pool: PagePool, lookahead: int = 0, enabled: bool = True, tier: HostTier | None = None) -> None:
        """`tier` gets the pages that are evicted; None: they are gone."""
        assert lookahead >= 0, lookahead
        self.pool = pool
        self.lookahead = lookahead
        self.enabled = enabled
        self.tier = tier
        self._root = CachedNode(b"", None)
        self._idle: OrderedDict[CachedNode, None] = OrderedDict()
        self._idle_tails: OrderedDict[CachedNode, None] = OrderedDict()  # nodes whose tail page nobody uses, as `_idle`
        self._passed_tails: OrderedDict[CachedNode, None] = (
            OrderedDict()
        )  # likewise, before the end of a text, never used
        self._num_pages = self._num_tails = 0
        self._watchers: tuple[Callable[[CachedNode], object], ...] = ()
        self.num_changes = 0  # how often watchers were told of a change

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    def first_pages(self) -> list[CachedNode]:
        """Return the nodes of all first pages of texts."""
        return list(self._root.children.values())

    def watch(self, note: Callable[[CachedNode], object]) -> None:
        """Call `note(node)` whenever a page or tail page of a node is stored or removed, or comes to another tier. It
        is called in the middle of a step, so it only notes the node."""
        self._watchers += (note,)

    def unwatch(self, note: Callable[[CachedNode], object]) -> None:
        """End `watch`."""
        self._watchers = tuple(each for each in self._watchers if each != note)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    @property
    def num_referenced(self) -> int:
        return self._num_pages - len(self._idle)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give: free ones and cached ones without references."""
        return self.pool.num_free + len(self._idle)

    def ledger(self) -> PoolLedger:
        """Count the pool's pages by owner, and the cached pages that have references."""
        ledger = self.pool.ledger(cache_referenced=self.num_referenced)
        assert ledger.cache == self._num_pages, (ledger, self._num_pages)
        return ledger

    def allocate(self, n: int, owner: Owner) -> list[int]:
        """Take `n` pages as `PagePool.allocate` does, and evict cached pages first if too few are free.

        Raises OutOfPages if even that does not suffice. Then nothing is evicted.
        """
        if n > self.available:
            raise OutOfPages(
                f"{n} pages were asked for; of {self.pool.num_usable}, {self.pool.num_free} are free"
                f" and {self.num_evictable} are cached without a reference"
            )
        self.evict(max(0, n - self.pool.num_free))
        return self.pool.allocate(n, owner)

    @property
    def available_tails(self) -> int:
        """Number of tail pages that `allocate_tails` can give."""
        return self.pool.num_free_tails + self._num_idle_tails

    @property
    def _num_idle_tails(self) -> int:
        return len(self._idle_tails) + len(self._passed_tails)

    def tail_ledger(self) -> PoolLedger | None:
        """Count the tail pages by owner, and the cached ones that are in use. None: the pool has none."""
        if not self.pool.num_tails:
            return None
        ledger = self.pool.tail_ledger(self._num_tails - self._num_idle_tails)
        assert ledger.cache == self._num_tails, (ledger, self._num_tails)
        return ledger

    def allocate_tails(self, n: int, owner: Owner) -> list[int]:
        """Take `n` tail pages as `allocate` does."""
        if n > self.available_tails:
            raise OutOfPages(f"{n} tail pages were asked for, {self.available_tails} are free or cached and unused")
        passed_first = itertools.chain(self._passed_tails, self._idle_tails)
        self._evict_tails(list(itertools.islice(passed_first, max(0, n - self.pool.num_free_tails))))
        return self.pool.allocate_tails(n, owner)

    @property
    def is_settled(self) -> bool:
        """Whether all cached pages that came from the host tier are there for other processes."""
        return self.tier is None or self.tier.copies.is_settled

    def tier_ledger(self) -> TierLedger | None:
        """Count the slots of the host tier; None: there is no tier."""
        return None if self.tier is None else self.tier.ledger()

    def match(
        self, token_ids: Sequence[int], salt: str = "", limit_pages: int | None = None, num_tails: int = 0
    ) -> int:
        """Return how many pages `acquire` would find now. It pins no page, and it does not count as a use."""
        return _num_resumable(list(self._walk(token_ids, salt, limit_pages)), num_tails, _tail_in_pool)

    def acquire(
        self, token_ids: Sequence[int], salt: str = "", limit_pages: int | None = None, num_tails: int = 0
    ) -> Lease:
        """Find the longest cached prefix, pin it until `release`, and return its lease.

        The lease has at most `limit_pages` pages. Callers pass (prompt_len - 1) // page_size, so that the last prompt
        position is computed and yields logits. A page is matched only if `token_ids` has the `lookahead` tokens after
        it. `num_tails`: tail pages that must be there for the last pages of the prefix, or for all if these are fewer.
        They are pinned, too.
        """
        lease = Lease(salt, [], self._root)
        walked = list(self._walk(token_ids, salt, limit_pages))
        found = walked[: _num_resumable(walked, num_tails, _tail_in_pool)]
        for node in found:
            self._extend(lease, node)
        for node in found[-num_tails:] if num_tails else ():
            self._use_tail(lease, node)
        return lease

    def lend(
        self, token_ids: Sequence[int], salt: str, limit_pages: int | None = None, num_tails: int = 0
    ) -> LentPages:
        """Return the pages that `acquire` finds, after those that lie in the host tier have come back from it. They are
        not pinned, but count as just used, so that others are evicted before them. Other processes may read them when
        the cache `is_settled`."""
        num_pages = self._num_keyed(len(token_ids)) if limit_pages is None else limit_pages
        self.restore(token_ids, salt, limit_pages, num_tails, num_pages=num_pages)
        lease = self.acquire(token_ids, salt, limit_pages, num_tails)
        lent = LentPages(list(lease.pages), lease.tail_pages)
        self.release(lease)
        return lent

    def texts(self) -> Iterator[CachedText]:
        """Yield the texts of unused pages in the pool, those used last first, each with all pages before it. A text
        that goes on in the pool is yielded with what is behind it alone."""
        num_bytes = 4 * (self.page_size + self.lookahead)
        for last in reversed(list(self._idle)):
            if last.page is None or any(child.page is not None for child in last.children.values()):
                continue
            path, node = list[CachedNode](), last
            while node.parent is not None:
                path.append(node)
                node = node.parent
            salt, tokens = path[-1].key[:-num_bytes].decode(), array("i")
            for each in reversed(path):
                tokens.frombytes(each.key[-num_bytes:][: 4 * self.page_size])
            tokens.frombytes(last.key[len(last.key) - 4 * self.lookahead :])
            yield CachedText(tokens.tolist(), salt, len(path))

    def take_pages(self, n: int) -> list[int]:
        """Take pages of the pool, at most `available`, for a text that another node lends."""
        return self.allocate(n, Owner.REQUEST)

    def take_tails(self, n: int) -> list[int] | None:
        """Take tail pages of the pool for pages that another node lends; None: there are not so many."""
        return None if n > self.available_tails else self.allocate_tails(n, Owner.REQUEST)

    def land_tails(self, lease: Lease, tails: Sequence[int], num_landed: int) -> None:
        """Give the first `num_landed` tail pages of `take_tails`, which are those of the lease's last pages, to the
        cache, and free the others. The lease then pins the tail pages of these pages alone."""
        if num_landed:
            self._release_tails(lease)
        nodes = list(itertools.islice(self._path(lease), num_landed))[::-1]
        assert len(nodes) == num_landed, (len(nodes), num_landed)
        for node, tail in zip(nodes, tails, strict=False):
            if node.tail is None:
                self._adopt_tail(tail, node, self._idle_tails)
            else:
                self.pool.release((tail,))
            self._use_tail(lease, node)
        self.pool.release(tails[num_landed:])

    def give_tails(
        self, lease: Lease, first: int, tails: Sequence[int], end: int | None = None, *, pins: bool = True
    ) -> list[int]:
        """Give computed tail pages of a request to the cache: those of the lease's pages from page `first` on. Those
        from page `end` on (None: no one) are at the end of a text, which may continue. The lease pins these if `pins`.
        Return those that the cache took. It takes none of a page that has one."""
        taken: list[int] = []
        nodes = list(self._path(lease))[::-1]
        for index, (node, tail) in enumerate(zip(nodes[first:], tails, strict=False), first):
            if node.tail is None and self.enabled:
                is_end = end is not None and index >= end
                self._adopt_tail(tail, node, self._idle_tails if is_end else self._passed_tails)
                taken.append(tail)
                if is_end and pins:
                    self._use_tail(lease, node)
        return taken

    def share_tails(self, lease: Lease, first: int, tails: Sequence[int], end: int) -> int:
        """Give tail pages, as `give_tails`, up to the first page that has one. Return how many the cache took. The
        request may read those that the lease pins."""
        nodes = list(self._path(lease))[::-1][first:]
        num_new = next((index for index, node in enumerate(nodes) if node.tail is not None), len(nodes))
        return len(self.give_tails(lease, first, tails[:num_new], end))

    def exchange_tails(
        self, lease: Lease, first: int, tails: Sequence[int], owner: Owner, end: int | None = None
    ) -> list[int]:
        """Give tail pages, as `give_tails`, that a request reads no more, and take as many others for it. Return the
        tail pages that it has now. This never fails: the pages that were given can be evicted again."""
        taken = self.give_tails(lease, first, tails, end, pins=False)
        others = dict(zip(taken, self.allocate_tails(len(taken), owner), strict=True))
        return [others.get(tail, tail) for tail in tails]

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], salt: str = "", lease: Lease | None = None
    ) -> Lease:
        """Give computed pages of a sequence to the cache. They stay valid and pinned, under their page numbers.

        `pages` covers `token_ids` from the start. Every slot of these pages is computed and will not be written again.
        `token_ids` may be longer. The cache takes the pages beyond `lease` whose next `lookahead` tokens are known. It
        extends `lease` in place (None: it makes one) and returns it. The caller releases it.

        If the cache already holds an equal page, the lease gets that page, and the given one stays with the caller. So
        pages[i] belongs to the cache if lease.pages[i] == pages[i]. The caller frees every other page, once;
        `lease.private(table)` lists these. A request may continue with its own copies until it ends. Or it puts
        lease.pages into its block table, and frees the private ones when no work under way uses them.
        """
        lease = lease or Lease(salt, [], self._root)
        assert lease.node is not None and lease.salt == salt, (lease.salt, salt, lease.node)
        start, stop = len(lease.pages), min(len(pages), self._num_keyed(len(token_ids)))
        if not self.enabled or start >= stop:
            return lease
        if start:
            covered = next(self._keys(token_ids, salt, start - 1, start))
            assert lease.node.key == covered, f"other tokens than those of the leased page {lease.node.page}"
        for page, key in zip(pages[start:stop], self._keys(token_ids, salt, start, stop), strict=True):
            node = lease.node.children.get(key)
            if node is None:
                node = lease.node.children[key] = CachedNode(key, lease.node)
            if node.page is None:
                self._adopt(page, node)
            self._extend(lease, node)
        return lease

    def share(self, lease: Lease) -> Lease:
        """Return a second lease on the same pages, for another choice of one prompt. It is released separately."""
        shared = Lease(lease.salt, [], self._root)
        for node in reversed(list(self._path(lease))):
            self._extend(shared, node)
        return shared

    def release(self, lease: Lease, block_table: Sequence[int] = ()) -> None:
        """End a lease, once, and free the pages of `block_table` that belong to the request. No work may use them any
        more."""
        self.pool.release(lease.private(block_table))
        self._release_tails(lease)
        for node in self._path(lease):
            node.num_references -= 1
            if node.num_references == 0:
                self._idle[node] = None
        lease.node = None

    def _release_tails(self, lease: Lease) -> None:
        for node in lease.tails:
            node.num_tail_uses -= 1
            if node.num_tail_uses == 0:
                self._idle_tails[node] = None
        lease.tails.clear()

    def evict(self, n: int) -> int:
        """Free up to `n` pages without references, the longest idle first. Return how many were freed. The host tier
        gets a copy of them."""
        nodes = list(itertools.islice(self._idle, n))
        if self.tier is not None:
            self.tier.store(nodes, self._drop_slot)
        self._evict_tails([node for node in nodes if node.tail is not None])
        self._free(nodes)
        return len(nodes)

    def tend(self) -> None:
        """Let the tiers work. To be called once per step."""
        if self.tier is not None:
            self._store_ahead()
            if self.tier.disk is not None:
                self.tier.disk.poll()

    def _store_ahead(self) -> None:
        """Copy pages that are idle longest to the host tier while the pool has few free ones, if it pays to copy them
        before they are evicted."""
        assert self.tier is not None
        num_short = min(self.tier.copies.num_ahead, self.pool.num_usable // 8) - self.pool.num_free
        if num_short > 0:
            self.tier.store_ahead(list(itertools.islice(self._idle, num_short)), self._drop_slot)

    def flush(self) -> int:
        """Free every page without references, and every unused tail page, and all that the tiers have. Return how many
        pages of the pool were freed, tail pages not counted."""
        if self.tier is not None:
            for node in self.tier.disk.clear() if self.tier.disk is not None else ():
                self._changed_tail(node)
                self.lose(node)
            for node in self.tier.tails.nodes:
                self._drop_tail_slot(node)
            for node in self.tier.kept.nodes:
                if node.slot is not None:  # it was not behind another one
                    self._drop_slot(node)
        self._free_tails([*self._passed_tails, *self._idle_tails])
        nodes = list(self._idle)
        self._free(nodes)
        return len(nodes)

    def forget(self, salt_prefix: str) -> int:
        """Remove the pages of all salts that begin so, with their tail pages, in all tiers, but those with references.
        Return how many pages were removed."""
        num_token_bytes = 4 * (self.page_size + self.lookahead)
        start = salt_prefix.encode()
        left = [node for node in self.first_pages() if node.key[:-num_token_bytes].startswith(start)]
        ordered: list[CachedNode] = []
        while left:
            ordered.append(left.pop())
            left += ordered[-1].children.values()
        for node in reversed(ordered):  # children first
            self._forget(node)
        return sum(not node.is_cached for node in ordered)

    def _forget(self, node: CachedNode) -> None:
        if self.tier is not None:
            if self.tier.disk is not None:
                self.tier.disk.forget(node)
            if node.tail_slot is not None:
                self.tier.tails.free(node)
            if node.slot is not None:
                self.tier.kept.free(node)
        if node.tail is not None and node.num_tail_uses == 0:
            self._free_tails([node])
        if node.page is not None and node.num_references == 0:
            self._free([node])
        else:
            self._left(node)

    def restore(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        limit_pages: int | None = None,
        num_tails: int = 0,
        *,
        num_pages: int,
    ) -> int:
        """Copy pages of a prefix from the host tier back into the pool, if that is sooner than to compute them, so that
        `acquire` finds them. Return by how many pages the prefix became longer.

        The arguments are those of `acquire`. Nothing is copied unless the pool then still has room for a request of
        `num_pages` pages in all, those of the prefix included."""
        found = self._in_tier(token_ids, salt, limit_pages, num_tails)
        if found is None:
            return 0
        in_pool, absent, ends, tails, num_new = found
        pinned = Lease(salt, [], self._root)
        for node in in_pool:
            self._extend(pinned, node)
        for node in ends:
            if node.tail is not None:
                self._use_tail(pinned, node)
        has_room = num_pages - len(in_pool) <= self.available and len(tails) <= self.available_tails
        if has_room:
            self._load(absent, tails)
        self.release(pinned)
        return num_new if has_room else 0

    def fetch(
        self, token_ids: Sequence[int], salt: str = "", limit_pages: int | None = None, num_tails: int = 0
    ) -> Fetch | None:
        """Begin to read files of a prefix into the host tier, if that is sooner than to compute their tokens. The
        arguments are those of `acquire`. Return what the prompt waits for; None: nothing."""
        if self.tier is None or self.tier.disk is None:
            return None
        walked = list(self._walk(token_ids, salt, limit_pages, _anywhere))
        num_found = _num_resumable(walked, num_tails, _tail_anywhere)
        in_memory = list(itertools.takewhile(_in_memory, walked[:num_found]))
        num_new = num_found - _num_resumable(in_memory, num_tails, _tail_in_memory)
        absent = [node for node in walked[:num_found] if not node.is_in_memory]
        tails = [node for node in walked[max(0, num_found - num_tails) : num_found] if not node.has_tail_in_memory]
        if num_new <= 0:
            return None
        for node in reversed(walked[:num_found]):  # their slots are not to be taken for the others
            self.tier.kept.touch(node)
            self.tier.tails.touch(node)
        drops = self._drop_slot, self._drop_tail_slot
        return self.tier.fetch(absent, tails, num_new * self.page_size, drops)

    def close(self) -> None:
        """End what the tiers do. Files stay."""
        if self.tier is not None and self.tier.disk is not None:
            self.tier.disk.thread.close()

    def is_awaited(self, fetch: Fetch | None) -> bool:
        """Return whether a prompt still waits for files."""
        if fetch is None or self.tier is None or self.tier.disk is None:
            return False
        return not self.tier.disk.is_over(fetch)

    def node_behind(self, parent: CachedNode | None, key: bytes) -> CachedNode:
        """Return the node of a page that lies in a file, which is made if need be. `parent` None: it is a first page,
        and its key begins with the salt."""
        before = parent or self._root
        if key not in before.children:
            before.children[key] = CachedNode(key, before)
        return before.children[key]

    def note_file(self, node: CachedNode) -> None:
        """A node, or its tail page, lies in a file that was found or written."""
        self._changed(node)

    def lose(self, node: CachedNode) -> None:
        """A file of the node is gone: if nothing is left of its page, the node leaves the tree."""
        self._left(node)

    def take_read(self, node: CachedNode | None, kind: Kind, slot: int) -> None:
        """Give a node the slot that its file was read into. None: free the slot."""
        assert self.tier is not None
        (self.tier.kept if kind == "page" else self.tier.tails).end_read(slot, node)

    def may_restore(
        self, token_ids: Sequence[int], salt: str = "", limit_pages: int | None = None, num_tails: int = 0
    ) -> bool:
        """Return whether `restore` would copy pages, given room."""
        return self._in_tier(token_ids, salt, limit_pages, num_tails) is not None

    def _in_tier(
        self, token_ids: Sequence[int], salt: str, limit_pages: int | None, num_tails: int
    ) -> _Restorable | None:
        """Return the part of a prefix that lies in the host tier alone; None: there is none, or computing it is
        sooner."""
        if self.tier is None:
            return None
        walked = list(self._walk(token_ids, salt, limit_pages, _in_memory))
        num_found = _num_resumable(walked, num_tails, _tail_in_memory)
        in_pool = list(itertools.takewhile(lambda node: node.page is not None, walked[:num_found]))
        num_new = num_found - _num_resumable(in_pool, num_tails, _tail_in_pool)
        absent = walked[len(in_pool) : num_found]
        ends = walked[max(0, num_found - num_tails) : num_found]
        tails = [node for node in ends if node.tail is None]
        if num_new <= 0 or not self.tier.is_sooner(len(absent) + len(tails), num_new * self.page_size):
            return None
        return _Restorable(in_pool, absent, ends, tails, num_new)

    def _load(self, nodes: list[CachedNode], tails: list[CachedNode]) -> None:
        """Copy the pages of nodes and the tail pages of others from the host tier. The pages before them are pinned."""
        assert self.tier is not None
        for node in nodes:
            self.tier.kept.hold(node)
        for node in tails:
            self.tier.tails.hold(node)
        pages = self.allocate(len(nodes), Owner.REQUEST)
        self.tier.load(self.tier.kept, nodes, pages)
        for node, page in zip(nodes, pages, strict=True):
            self._adopt(page, node)
        for node in reversed(nodes):
            self._idle[node] = None
        own = self.allocate_tails(len(tails), Owner.REQUEST)
        self.tier.load(self.tier.tails, tails, own)
        for node, tail in zip(tails, own, strict=True):
            self._adopt_tail(tail, node, self._idle_tails)

    def _free(self, nodes: Sequence[CachedNode]) -> None:
        """Free the pages of idle nodes, which come before their parents. Those that lie nowhere else leave the tree."""
        for node in nodes:
            assert node.num_references == 0 and node.page is not None, node.page
            del self._idle[node]
            self.pool.release((node.page,), Owner.CACHE)
            node.page = None
            self._left(node)
        self._num_pages -= len(nodes)

    def _evict_tails(self, nodes: Sequence[CachedNode]) -> None:
        """Free the tail pages of nodes, which nobody uses. The host tier gets those behind which a text may go on."""
        if self.tier is not None:
            ends = [node for node in nodes if node.is_cached and node in self._idle_tails]
            self.tier.store_tails(ends, self._drop_tail_slot)
        self._free_tails(nodes)

    def _free_tails(self, nodes: Sequence[CachedNode]) -> None:
        for node in nodes:
            assert node.tail is not None and node.num_tail_uses == 0, (node.tail, node.num_tail_uses)
            (self._passed_tails if node in self._passed_tails else self._idle_tails).pop(node)
            self.pool.release((node.tail,), Owner.CACHE)
            self._num_tails -= 1
            node.tail = None
            if not node.has_tail:
                self._changed(node)

    def _drop_slot(self, node: CachedNode) -> None:
        """Take the slot of a node. If its page lies nowhere else, it leaves the tree."""
        assert self.tier is not None
        self.tier.kept.free(node)
        self._left(node)

    def _left(self, node: CachedNode) -> None:
        """The page of a node has left one of its places. If it lies nowhere, the node leaves the tree."""
        if node.is_cached:
            self._changed(node)
        else:
            self._remove(node)

    def _drop_tail_slot(self, node: CachedNode) -> None:
        assert self.tier is not None
        self.tier.tails.free(node)
        self._changed_tail(node)

    def _changed_tail(self, node: CachedNode) -> None:
        """If the rows of a node's tail page lie nowhere any more, note that."""
        if not node.has_tail:
            self._changed(node)

    def _remove(self, node: CachedNode) -> None:
        """Take a node whose page lies nowhere out of the tree, with all nodes behind it, which are not in the pool."""
        assert node.parent is not None
        if node.parent.children.get(node.key) is not node:
            return  # it went with one before it
        del node.parent.children[node.key]
        left = [node]
        while left:
            gone = left.pop()
            left += gone.children.values()
            assert gone.page is None and gone.tail is None, (gone.page, gone.tail)
            if self.tier is not None and gone.slot is not None:
                self.tier.kept.free(gone)
            if self.tier is not None and gone.tail_slot is not None:
                self.tier.tails.free(gone)
            if self.tier is not None and self.tier.disk is not None:
                self.tier.disk.forget(gone)
            self._changed(gone)

    def _use_tail(self, lease: Lease, node: CachedNode) -> None:
        """Pin the tail page of a node until the lease is released."""
        self._idle_tails.pop(node, None)
        self._passed_tails.pop(node, None)
        node.num_tail_uses += 1
        lease.tails.append(node)

    def _changed(self, node: CachedNode) -> None:
        self.num_changes += 1
        for note in self._watchers:
            note(node)

    def _num_keyed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.lookahead) // self.pool.page_size

    def _keys(self, token_ids: Sequence[int], salt: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of pages start .. stop - 1. All token parts have one length, so a salt in front of one cannot
        be mistaken for tokens."""
        page_size = self.pool.page_size
        tokens = array("i", token_ids[start * page_size : stop * page_size + self.lookahead])
        data, step = tokens.tobytes(), page_size * tokens.itemsize
        width = step + self.lookahead * tokens.itemsize
        for page in range(stop - start):
            key = data[page * step : page * step + width]
            yield key if page or start else salt.encode() + key

    def _walk(
        self,
        token_ids: Sequence[int],
        salt: str,
        limit_pages: int | None,
        is_there: Callable[[CachedNode], bool] = lambda node: node.page is not None,
    ) -> Iterator[CachedNode]:
        """Yield the nodes of the tokens, up to the first one that `is_there` does not find: by default, in the pool."""
        num_keyed = self._num_keyed(len(token_ids))
        stop = num_keyed if limit_pages is None else min(num_keyed, limit_pages)
        node = self._root
        for key in self._keys(token_ids, salt, 0, stop):
            child = node.children.get(key)
            if child is None or not is_there(child):
                return
            yield (node := child)

    def _path(self, lease: Lease) -> Iterator[CachedNode]:
        """Yield the leased nodes, last page first."""
        assert lease.node is not None, "the lease was released"
        node = lease.node
        while node.parent is not None:
            yield node
            node = node.parent

    def _adopt(self, page: int, node: CachedNode) -> None:
        """Give a node a page of a request."""
        self.pool.transfer((page,), Owner.CACHE)
        node.page = page
        self._num_pages += 1
        if node.slot is not None and self.tier is not None:
            self.tier.kept.enter_pool(node)
        self._changed(node)

    def _adopt_tail(self, tail: int, node: CachedNode, order: OrderedDict[CachedNode, None]) -> None:
        """Give a node a tail page of a request, which nobody uses."""
        self.pool.transfer((tail,), Owner.CACHE)
        is_new = not node.has_tail
        node.tail = tail
        order[node] = None
        self._num_tails += 1
        if node.tail_slot is not None and self.tier is not None:
            self.tier.tails.enter_pool(node)
        if is_new:
            self._changed(node)

    def _extend(self, lease: Lease, node: CachedNode) -> None:
        if node.num_references == 0:
            self._idle.pop(node, None)  # a page just adopted was never idle
        assert node.page is not None, "the page lies in the host tier alone"
        node.num_references += 1
        lease.pages.append(node.page)
        lease.node = node


def _tail_in_pool(node: CachedNode) -> bool:
    return node.tail is not None


def _in_memory(node: CachedNode) -> bool:
    return node.is_in_memory


def _anywhere(node: CachedNode) -> bool:
    return node.is_cached


def _tail_in_memory(node: CachedNode) -> bool:
    return node.has_tail_in_memory


def _tail_anywhere(node: CachedNode) -> bool:
    return node.has_tail


def _num_resumable(nodes: Sequence[CachedNode], num_tails: int, has_tail: Callable[[CachedNode], bool]) -> int:
    """Return how many nodes there are up to the last one behind which work may continue: it and those before it,
    `num_tails` in all, have their tail pages."""
    if num_tails == 0:
        return len(nodes)
    end = run = 0  # `run`: nodes in a row that have tail pages
    for index, node in enumerate(nodes):
        run = run + 1 if has_tail(node) else 0
        if run >= min(num_tails, index + 1):
            end = index + 1
    return end
