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

A page without references can be evicted. `_idle` lists these pages, the longest idle first. Releases run from the last
page towards the root, so every page comes before its parent. Therefore the first entry is always a leaf, and an
eviction takes O(1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...metadata.errors import OutOfPages
from ...metadata.wire.node_info import PoolLedger
from .pages import Owner, PagePool


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    key: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    num_references: int = 0
    is_cached: bool = True  # False once its page is evicted
    tail: int | None = None  # its tail page
    num_tail_uses: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """References on the cached pages that cover a sequence from its start. Only `PrefixCache` makes and ends leases."""

    salt: str
    pages: list[int]  # read-only to others; page i covers tokens i * page_size ..
    node: _Node | None  # of the last page (the root if there is none); None after the release
    tails: list[_Node] = field(default_factory=list[_Node])  # whose tail pages are pinned

    @property
    def tail_pages(self) -> list[int]:
        """The pinned tail pages. After `acquire` these are of the last pages."""
        return [node.tail for node in self.tails if node.tail is not None]

    def private(self, block_table: Sequence[int]) -> list[int]:
        """Return the pages of `block_table` that belong to the request: those that are not the lease's own."""
        assert self.node is not None, "the lease was released"
        covered = [own for own, cached in zip(block_table, self.pages, strict=False) if own != cached]
        return covered + list(block_table[len(self.pages) :])


class PrefixCache:
    """Owns the pages of `pool` that outlive their request. With `enabled=False` it finds and keeps no page."""

    def __init__(self, pool: PagePool, lookahead: int = 0, enabled: bool = True) -> None:
        assert lookahead >= 0, lookahead
        self.pool = pool
        self.lookahead = lookahead
        self.enabled = enabled
        self._root = _Node(page=0, key=b"", parent=None)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._idle_tails: OrderedDict[_Node, None] = OrderedDict()  # nodes whose tail page nobody uses, as `_idle`
        self._passed_tails: OrderedDict[_Node, None] = OrderedDict()  # likewise, before the end of a text, never used
        self._num_pages = self._num_tails = 0
        self._watchers: tuple[Callable[[_Node], object], ...] = ()
        self.num_changes = 0  # how often a page or tail page was stored or removed

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    def first_pages(self) -> list[_Node]:
        """Return the nodes of all first pages of texts."""
        return list(self._root.children.values())

    def watch(self, note: Callable[[_Node], object]) -> None:
        """Call `note(node)` whenever a page or tail page of a node is stored or removed. It is called in the middle of
        a step, so it only notes the node."""
        self._watchers += (note,)

    def unwatch(self, note: Callable[[_Node], object]) -> None:
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
        while n > self.pool.num_free_tails:
            self._drop_tail(next(iter(self._passed_tails or self._idle_tails)))
        return self.pool.allocate_tails(n, owner)

    def match(
        self, token_ids: Sequence[int], salt: str = "", limit_pages: int | None = None, num_tails: int = 0
    ) -> int:
        """Return how many pages `acquire` would find now. It pins no page, and it does not count as a use."""
        return len(_resumable(list(self._walk(token_ids, salt, limit_pages)), num_tails))

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
        found = _resumable(list(self._walk(token_ids, salt, limit_pages)), num_tails)
        for node in found:
            self._extend(lease, node)
        for node in found[-num_tails:] if num_tails else ():
            self._use_tail(lease, node)
        return lease

    def lend(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Return the cached pages that cover these tokens from the start. They are not pinned, but count as just used,
        so that others are evicted before them."""
        lease = self.acquire(token_ids, salt)
        pages = list(lease.pages)
        self.release(lease)
        return pages

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
                self.pool.transfer((tail,), Owner.CACHE)
                node.tail = tail
                self._num_tails += 1
                self._changed(node)
                is_end = end is not None and index >= end
                (self._idle_tails if is_end else self._passed_tails)[node] = None
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
            node = lease.node.children.get(key) or self._adopt(page, key, lease.node)
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
        for node in lease.tails:
            node.num_tail_uses -= 1
            if node.num_tail_uses == 0:
                self._idle_tails[node] = None
        lease.tails.clear()
        for node in self._path(lease):
            node.num_references -= 1
            if node.num_references == 0:
                self._idle[node] = None
        lease.node = None

    def evict(self, n: int) -> int:
        """Free up to `n` pages without references, the longest idle first. Return how many were freed."""
        n = min(n, len(self._idle))
        for _ in range(n):
            node, _ = self._idle.popitem(last=False)
            assert not node.children and node.num_references == 0 and node.parent is not None, node.page
            del node.parent.children[node.key]
            node.is_cached = False
            if node.tail is not None:
                self._drop_tail(node)
            self.pool.release((node.page,), Owner.CACHE)
            self._changed(node)
        self._num_pages -= n
        return n

    def flush(self) -> int:
        """Free every page without references, and every unused tail page. Return how many pages were freed, tail pages
        not counted."""
        for node in [*self._passed_tails, *self._idle_tails]:
            self._drop_tail(node)
        return self.evict(len(self._idle))

    def _use_tail(self, lease: Lease, node: _Node) -> None:
        """Pin the tail page of a node until the lease is released."""
        self._idle_tails.pop(node, None)
        self._passed_tails.pop(node, None)
        node.num_tail_uses += 1
        lease.tails.append(node)

    def _drop_tail(self, node: _Node) -> None:
        """Free the tail page of a node, which nobody uses."""
        assert node.tail is not None and node.num_tail_uses == 0, (node.tail, node.num_tail_uses)
        (self._passed_tails if node in self._passed_tails else self._idle_tails).pop(node)
        self.pool.release((node.tail,), Owner.CACHE)
        self._num_tails -= 1
        node.tail = None
        self._changed(node)

    def _changed(self, node: _Node) -> None:
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

    def _walk(self, token_ids: Sequence[int], salt: str, limit_pages: int | None) -> Iterator[_Node]:
        num_keyed = self._num_keyed(len(token_ids))
        stop = num_keyed if limit_pages is None else min(num_keyed, limit_pages)
        node = self._root
        for key in self._keys(token_ids, salt, 0, stop):
            child = node.children.get(key)
            if child is None:
                return
            yield (node := child)

    def _path(self, lease: Lease) -> Iterator[_Node]:
        """Yield the leased nodes, last page first."""
        assert lease.node is not None, "the lease was released"
        node = lease.node
        while node.parent is not None:
            yield node
            node = node.parent

    def _adopt(self, page: int, key: bytes, parent: _Node) -> _Node:
        self.pool.transfer((page,), Owner.CACHE)
        node = parent.children[key] = _Node(page, key, parent)
        self._num_pages += 1
        self._changed(node)
        return node

    def _extend(self, lease: Lease, node: _Node) -> None:
        if node.num_references == 0:
            self._idle.pop(node, None)  # a page just adopted was never idle
        node.num_references += 1
        lease.pages.append(node.page)
        lease.node = node


def _resumable(nodes: list[_Node], num_tails: int) -> list[_Node]:
    """Return the nodes up to the last one behind which work may continue: it and those before it, `num_tails` in all,
    have their tail pages."""
    if num_tails == 0:
        return nodes
    end = run = 0  # `run`: nodes in a row that have tail pages
    for index, node in enumerate(nodes):
        run = 0 if node.tail is None else run + 1
        if run >= min(num_tails, index + 1):
            end = index + 1
    return nodes[:end]
