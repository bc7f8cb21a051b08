"""The prefix cache: examples of each rule, then random lives of requests against a model that only knows dicts."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import Lease, PrefixCache
from baton.metadata.errors import OutOfPages

PAGE = 4


def new_cache(num_pages: int = 20, lookahead: int = 0, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PagePool(num_pages, PAGE), lookahead, enabled)


def remember(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    """Run a request over `token_ids` to its end; returns the block table that it had."""
    lease = cache.acquire(token_ids, salt)
    table = lease.pages + cache.allocate(-(-len(token_ids) // PAGE) - len(lease.pages), Owner.REQUEST)
    cache.insert(token_ids, table[: len(token_ids) // PAGE], salt, lease)
    cache.release(lease, table)
    return table


def assert_idle_then_empty(cache: PrefixCache) -> None:
    ledger = cache.ledger()
    assert (ledger.request, ledger.ticket, ledger.cache_referenced) == (0, 0, 0)
    assert cache.flush() == ledger.cache
    assert cache.pool.num_free == cache.pool.num_usable and cache.num_pages == 0


def test_match_is_the_longest_common_prefix_of_whole_pages():
    cache = new_cache()
    table = remember(cache, list(range(14)))
    assert cache.num_pages == 3 and cache.pool.num_free == 16
    lease = cache.acquire([*range(8), 99, 9, 10, 11])
    assert lease.pages == table[:2]
    assert cache.match([*range(7)]) == 1 and cache.match([99, *range(13)]) == 0 and cache.match([]) == 0
    cache.release(lease)
    assert_idle_then_empty(cache)


def test_limit_keeps_the_last_prompt_position_out():
    cache = new_cache()
    prompt = list(range(8))
    remember(cache, prompt)
    assert cache.match(prompt) == 2
    assert cache.match(prompt, limit_pages=(len(prompt) - 1) // PAGE) == 1
    assert cache.match(prompt, limit_pages=0) == 0


def test_salts_share_nothing():
    cache = new_cache()
    tokens = list(range(8))
    one, two = remember(cache, tokens, "one"), remember(cache, tokens, "two")
    assert not set(one) & set(two) and cache.num_pages == 4
    assert cache.match(tokens, "three") == cache.match(tokens) == 0
    assert cache.acquire(tokens, "one").pages == one


@pytest.mark.parametrize("lookahead", [1, 3])
def test_pages_are_keyed_by_the_next_tokens_too(lookahead: int):
    cache = new_cache(lookahead=lookahead)
    tokens = list(range(8 + lookahead))
    remember(cache, tokens)
    assert cache.num_pages == 2
    assert cache.match(tokens) == 2
    assert cache.match(tokens[:-1]) == 1, "the next tokens of the second page are unknown"
    assert cache.match([*tokens[:-1], 99]) == 1, "another token follows the second page"
    assert cache.match([*range(4)]) == 0
    assert_idle_then_empty(cache)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_page_of_unknown_next_tokens_is_not_inserted_until_they_are_known(lookahead: int):
    cache = new_cache(lookahead=lookahead)
    tokens = list(range(8))
    table = cache.allocate(2, Owner.REQUEST)
    lease = cache.insert(tokens, table)
    assert lease.pages == table[:1] and lease.private(table) == table[1:]
    assert cache.insert(tokens + [8] * lookahead, table, lease=lease) is lease and lease.pages == table
    cache.release(lease, table)
    assert_idle_then_empty(cache)


def test_insert_while_running_keeps_the_block_table():
    cache = new_cache()
    table = cache.allocate(3, Owner.REQUEST)
    lease = cache.insert(list(range(5)), table[:1])
    assert cache.match(list(range(12))) == 1, "another request profits at once"
    cache.insert(list(range(12)), table, lease=lease)
    assert lease.pages == table and lease.private(table) == []
    assert cache.num_evictable == 0 and cache.evict(3) == 0
    cache.release(lease, table)
    assert cache.num_evictable == 3


def test_duplicates_stay_with_the_request_and_later_pages_hang_below():
    cache = new_cache()
    tokens = list(range(12))
    mine, theirs = cache.allocate(3, Owner.REQUEST), cache.allocate(3, Owner.REQUEST)
    first = cache.insert(tokens, mine[:2])
    second = cache.insert(tokens, theirs)
    assert second.pages == [*mine[:2], theirs[2]] and second.private(theirs) == theirs[:2]
    assert [cache.pool.owner(page) for page in theirs] == [Owner.REQUEST, Owner.REQUEST, Owner.CACHE]
    cache.release(first, mine)
    assert cache.num_evictable == 0, "the second request reads the first one's pages by its lease"
    cache.release(second, theirs)
    assert cache.num_pages == 3
    assert_idle_then_empty(cache)


def test_switching_to_the_leased_pages_frees_the_duplicates():
    cache = new_cache()
    tokens = list(range(8))
    remember(cache, tokens)
    table = cache.allocate(3, Owner.REQUEST)
    lease = cache.insert(tokens, table[:2])
    superseded = lease.private(table[: len(lease.pages)])
    table[: len(lease.pages)] = lease.pages
    cache.pool.release(superseded)
    cache.release(lease, table)
    assert_idle_then_empty(cache)


def test_tickets_hand_over_too_and_leases_are_shared():
    cache = new_cache()
    table = cache.allocate(2, Owner.TICKET)
    lease = cache.insert(list(range(4)), table[:1])
    choice = cache.share(lease)
    assert choice.pages == lease.pages
    cache.release(lease, table)
    assert cache.num_referenced == 1 and cache.ledger().cache_referenced == 1
    cache.release(choice)
    assert_idle_then_empty(cache)


def test_eviction_takes_leaves_released_longest_ago():
    cache = new_cache()
    trunk = list(range(4))
    old = remember(cache, [*trunk, 1, 1, 1, 1])
    new = remember(cache, [*trunk, 2, 2, 2, 2])
    cache.release(cache.acquire([*trunk, 1, 1, 1, 1]))  # now `old` is the newer one
    assert cache.evict(1) == 1 and cache.pool.owner(new[1]) is Owner.FREE
    assert cache.evict(1) == 1 and cache.pool.owner(old[1]) is Owner.FREE
    assert cache.match(trunk) == 1
    assert cache.evict(5) == 1 and cache.pool.num_free == cache.pool.num_usable


def test_allocate_evicts_only_what_is_missing_and_nothing_in_vain():
    cache = new_cache(num_pages=6)
    remember(cache, list(range(12)))
    pinned = cache.acquire(list(range(4)))
    assert cache.available == 4
    with pytest.raises(OutOfPages, match="5 pages were asked for; of 5, 2 are free and 2 are cached"):
        cache.allocate(5, Owner.REQUEST)
    assert cache.num_pages == 3
    table = cache.allocate(3, Owner.REQUEST)
    assert cache.num_pages == 2 and cache.match(list(range(12))) == 2
    assert not set(table) & set(pinned.pages)
    cache.release(pinned, pinned.pages + table)
    assert_idle_then_empty(cache)


def test_disabled_finds_and_keeps_nothing():
    cache = new_cache(enabled=False)
    tokens = list(range(8))
    table = cache.allocate(2, Owner.REQUEST)
    lease = cache.insert(tokens, table)
    assert lease.pages == [] and lease.private(table) == table and cache.match(tokens) == 0
    cache.release(lease, table)
    assert cache.pool.num_free == cache.pool.num_usable


def test_misuse_is_caught():
    cache = new_cache()
    table = cache.allocate(2, Owner.REQUEST)
    lease = cache.insert(list(range(8)), table)
    with pytest.raises(AssertionError, match="other tokens"):
        cache.insert([9] * 12, [*table, 3], lease=lease)
    with pytest.raises(AssertionError, match="other"):
        cache.insert(list(range(8)), table, "other", lease)
    with pytest.raises(AssertionError, match="CACHE"):
        cache.insert([9] * 8, table)
    with pytest.raises(AssertionError, match="CACHE"):
        cache.pool.release(table)
    cache.release(lease, table)
    with pytest.raises(AssertionError, match="released"):
        cache.release(lease)
    with pytest.raises(AssertionError, match="released"):
        cache.share(lease)


Content = tuple[str, tuple[int, ...]]  # what a page's KV depends on: the salt and every token up to its last key token


@dataclass(eq=False)
class Running:
    salt: str
    tokens: list[int]
    lease: Lease
    table: list[int]
    content: list[Content] = field(default_factory=list)  # what this request must read in each page


class Lives(RuleBasedStateMachine):
    """Random requests, leases and evictions. `memory` stands for the KV tensor; `cached` is the whole cache's model."""

    lookahead = 0
    num_pages = 14

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PagePool(self.num_pages, 2), self.lookahead)
        self.memory: dict[int, Content | None] = {}
        self.cached: dict[Content, int] = {}
        self.released_at: dict[Content, int] = {}
        self.running: list[Running] = []
        self.shared: list[tuple[Lease, list[Content]]] = []
        self.clock = 0

    def contents(self, salt: str, tokens: list[int]) -> list[Content]:
        num_keyed = max(0, len(tokens) - self.lookahead) // 2
        return [(salt, tuple(tokens[: 2 * i + 2 + self.lookahead])) for i in range(num_keyed)]

    def expected(self, salt: str, tokens: list[int], limit: int | None) -> list[Content]:
        found: list[Content] = []
        for content in self.contents(salt, tokens)[:limit]:
            if content not in self.cached:
                break
            found.append(content)
        return found

    def referenced(self) -> set[int]:
        return {page for lease in self.leases() for page in lease.pages}

    def leases(self) -> list[Lease]:
        return [run.lease for run in self.running] + [lease for lease, _ in self.shared]

    def model_evict(self, n: int) -> None:
        pinned = self.referenced()
        for _ in range(n):
            idle = [content for content, page in self.cached.items() if page not in pinned]
            leaves = [leaf for leaf in idle if not any(self.is_below(other, leaf) for other in self.cached)]
            victim = min(leaves, key=lambda leaf: self.released_at[leaf])
            del self.cached[victim]

    @staticmethod
    def is_below(other: Content, leaf: Content) -> bool:
        return other != leaf and other[0] == leaf[0] and other[1][: len(leaf[1])] == leaf[1]

    def model_release(self, lease: Lease) -> None:
        self.clock += 1
        for content, page in self.cached.items():
            if page in lease.pages:
                self.released_at[content] = self.clock

    def allocate(self, n: int) -> list[int] | None:
        available = self.num_pages - 1 - len(self.private_pages()) - len(self.referenced())
        assert self.cache.available == available
        before = self.cache.ledger()
        if n > available:
            with pytest.raises(OutOfPages):
                self.cache.allocate(n, Owner.REQUEST)
            assert self.cache.ledger() == before
            return None
        self.model_evict(max(0, n - before.free))
        pages = self.cache.allocate(n, Owner.REQUEST)
        assert pages == sorted(set(pages)) and len(pages) == n
        self.memory.update(dict.fromkeys(pages))  # overwritten by whoever got them
        return pages

    def private_pages(self) -> list[int]:
        return [page for run in self.running for page in run.lease.private(run.table)]

    def compute(self, run: Running) -> None:
        """Write what is new and whole; a page whose next tokens are unknown has no checked content yet."""
        known = self.contents(run.salt, run.tokens)
        for i in range(len(run.content), len(known)):
            if run.table[i] not in run.lease.pages:
                self.memory[run.table[i]] = known[i]
            run.content.append(known[i])

    @rule(
        salt=st.sampled_from(["", "b"]),
        num_alike=st.integers(1, 14),
        tail=st.lists(st.integers(0, 1), max_size=3),
        limited=st.booleans(),
    )
    def start(self, salt: str, num_alike: int, tail: list[int], limited: bool) -> None:
        tokens = [0] * num_alike + tail
        limit = (len(tokens) - 1) // 2 if limited else None
        expected = self.expected(salt, tokens, limit)
        assert self.cache.match(tokens, salt, limit) == len(expected)
        lease = self.cache.acquire(tokens, salt, limit)
        assert [self.memory[page] for page in lease.pages] == expected
        assert lease.pages == [self.cached[content] for content in expected]
        run = Running(salt, tokens, lease, list(lease.pages))
        self.running.append(run)
        fresh = self.allocate(-(-len(tokens) // 2) - len(lease.pages))
        if fresh is None:
            self.end(run)
        else:
            run.table += fresh
            self.compute(run)

    def end(self, run: Running) -> None:
        self.running.remove(run)
        self.model_release(run.lease)
        self.cache.release(run.lease, run.table)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        run = data.draw(st.sampled_from(self.running))
        need = -(-(len(run.tokens) + len(tokens)) // 2) - len(run.table)
        fresh = self.allocate(need)
        if fresh is None:
            self.end(run)  # preempted
        else:
            run.tokens, run.table = run.tokens + tokens, run.table + fresh
            self.compute(run)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), partly=st.booleans(), switch=st.booleans(), as_ticket=st.booleans(), finish=st.booleans())
    def insert(self, data: st.DataObject, partly: bool, switch: bool, as_ticket: bool, finish: bool) -> None:
        run = data.draw(st.sampled_from(self.running))
        num_computed = data.draw(st.integers(0, len(run.tokens))) if partly else len(run.tokens)
        if as_ticket:
            self.cache.pool.transfer(run.lease.private(run.table), Owner.TICKET)
        start, stop = len(run.lease.pages), min(num_computed // 2, len(run.content))
        for i, content in list(enumerate(self.contents(run.salt, run.tokens)))[start:stop]:
            self.cached.setdefault(content, run.table[i])
        assert self.cache.insert(run.tokens, run.table[: num_computed // 2], run.salt, run.lease) is run.lease
        assert len(run.lease.pages) == max(start, stop)
        assert [self.memory[page] for page in run.lease.pages] == run.content[: len(run.lease.pages)]
        if switch:
            superseded = run.lease.private(run.table[: len(run.lease.pages)])
            run.table[: len(run.lease.pages)] = run.lease.pages
            self.cache.pool.release(superseded)
        if finish:
            self.end(run)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running and len(self.shared) < 3)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        lease = self.cache.share(run.lease)
        assert lease.pages == run.lease.pages
        self.shared.append((lease, run.content[: len(lease.pages)]))

    @precondition(lambda self: self.shared)
    @rule()
    def unshare(self) -> None:
        lease, _ = self.shared.pop(0)
        self.model_release(lease)
        self.cache.release(lease)

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        n = min(n, len(self.cached) - len(self.referenced()))
        self.model_evict(n)
        assert self.cache.evict(n) == n

    @precondition(lambda self: len(self.cached) > 6)  # rarely: what is flushed cannot be found again
    @rule()
    def flush(self) -> None:
        idle = len(self.cached) - len(self.referenced())
        self.model_evict(idle)
        assert self.cache.flush() == idle

    @invariant()
    def every_page_has_one_owner(self) -> None:
        ledger, private = self.cache.ledger(), self.private_pages()
        assert len(private) == len(set(private)) == ledger.request + ledger.ticket
        assert not set(private) & set(self.cached.values())
        assert ledger.cache == len(set(self.cached.values())) == len(self.cached) == self.cache.num_pages
        assert ledger.cache_referenced == len(self.referenced()) == self.cache.num_referenced
        assert sum((ledger.free, ledger.padding, ledger.request, ledger.ticket, ledger.cache)) == self.num_pages
        assert all(self.cache.pool.owner(page) is Owner.CACHE for page in self.cached.values())
        assert all(self.memory[page] == content for content, page in self.cached.items())

    @invariant()
    def nobody_loses_a_page(self) -> None:
        for run in self.running:
            assert [self.memory[page] for page in run.table[: len(run.content)]] == run.content
        for lease, content in self.shared:
            assert [self.memory[page] for page in lease.pages] == content

    def teardown(self) -> None:
        for run in list(self.running):
            self.end(run)
        for lease, _ in self.shared:
            self.cache.release(lease)
        assert_idle_then_empty(self.cache)


class LivesLookahead1(Lives):
    lookahead = 1


class LivesLookahead3(Lives):
    lookahead = 3


Lives.TestCase.settings = LivesLookahead1.TestCase.settings = LivesLookahead3.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
may_shrink = pytest.mark.timeout(400)  # a run takes a second; shrinking a failure up to five minutes
TestLives = may_shrink(Lives.TestCase)
TestLivesLookahead1 = may_shrink(LivesLookahead1.TestCase)
TestLivesLookahead3 = may_shrink(LivesLookahead3.TestCase)
