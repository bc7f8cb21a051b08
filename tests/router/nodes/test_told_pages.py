"""What a node has told of its cached pages, and how far the router relies on it."""

from __future__ import annotations

import pytest

from baton.metadata.cache.names import PageNames, PromptNames
from baton.metadata.errors import ProtocolError
from baton.metadata.wire.membership import CachedPages
from baton.router.nodes.told_pages import LATE_S, ToldPages

NAMES = PageNames(b"k" * 32, 4, 0)
IDS = list(range(200))


def column(ids: list[int], pages: range, salt: str = "", *, are_tails: bool = False) -> bytes:
    """Return the names of some pages of a text as nodes send them."""
    prompt = PromptNames(NAMES, [*ids, 0], salt)
    list(prompt)
    return b"".join(NAMES.of_tail(prompt._whole[page]) if are_tails else prompt._whole[page] for page in pages)


def batch(
    number: int, stored: bytes = b"", removed: bytes = b"", num_changes: int = 0, *, is_whole: bool = True
) -> CachedPages:
    return CachedPages(number=number, stored=stored, removed=removed, num_changes=num_changes, is_whole=is_whole)


def matched(told: ToldPages, ids: list[int], num_tails: int = 0, salt: str = "") -> int:
    return told.num_matched(PromptNames(NAMES, ids, salt), num_tails)


@pytest.fixture
def told() -> ToldPages:
    return ToldPages(100)


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 49])
def test_the_leading_pages_of_a_prompt_are_found(told: ToldPages, num_pages: int) -> None:
    told.take(batch(0, column(IDS, range(num_pages))))
    for prompt_len in (0, 1, 4, 5, 64, 65, 200):
        assert matched(told, IDS[:prompt_len]) == min(num_pages, max(0, prompt_len - 1) // 4)
    assert matched(told, [7, *IDS[1:]]) == matched(told, IDS, salt="another tenant") == 0


def test_a_text_that_leaves_another_one_shares_the_pages_before(told: ToldPages) -> None:
    told.take(batch(0, column(IDS, range(20)) + column([*IDS[:40], *IDS[:40]], range(10, 20))))
    assert matched(told, [*IDS[:40], *IDS[:40], 5]) == 20
    assert matched(told, [*IDS[:44], *IDS[:40], 5]) == 11


@pytest.mark.parametrize(
    ("tails", "num_tails", "found"),
    [
        ([], 1, 0),
        ([9], 1, 10),
        ([3], 1, 4),
        ([3, 8], 2, 0),
        ([3, 4, 8], 2, 5),
        ([0], 2, 1),
        ([7, 8, 9], 3, 10),
        ([12], 1, 0),
    ],
)
def test_work_continues_only_behind_cached_tail_pages(
    told: ToldPages, tails: list[int], num_tails: int, found: int
) -> None:
    column_of_tails = b"".join(column(IDS, range(page, page + 1), are_tails=True) for page in tails)
    told.take(batch(0, column(IDS, range(10)) + column_of_tails))
    assert matched(told, IDS, num_tails) == found


def test_removed_pages_are_forgotten_and_may_come_again_in_one_batch(told: ToldPages) -> None:
    told.take(batch(0, column(IDS, range(10))))
    told.take(batch(1, removed=column(IDS, range(6, 10))))
    assert matched(told, IDS) == 6 and len(told) == 6
    told.take(batch(2, stored=column(IDS, range(5, 8)), removed=column(IDS, range(5, 6))))
    assert len(told) == 8 and matched(told, IDS) == 8


def test_nothing_counts_before_everything_is_told(told: ToldPages) -> None:
    assert told.state(0.0) == "none"
    told.take(batch(0, is_whole=False))
    assert told.state(0.0) == "none"
    told.take(batch(1))
    assert told.state(0.0) == "whole" and not told.asks(0.0)


def test_after_a_gap_the_node_is_asked_once_and_its_news_is_late_until_it_is_whole(told: ToldPages) -> None:
    told.take(batch(0))
    told.take(batch(2, column(IDS, range(3))))
    assert told.state(0.0) == "late" and told.asks(0.0)
    told.take(batch(3))
    assert not told.asks(0.1), "batches that were under way"
    assert told.asks(0.2 + LATE_S), "the question may be lost, too"
    told.take(batch(0, column(IDS, range(5)), is_whole=False))
    assert told.state(1.0) == "late"
    told.take(batch(1, column(IDS, range(5, 9))))
    assert told.state(1.0) == "whole" and not told.asks(9.0) and matched(told, IDS) == 9


def test_a_first_batch_that_is_lost_is_a_gap(told: ToldPages) -> None:
    told.take(batch(1))
    assert told.asks(0.0)


def test_news_is_late_if_the_heartbeat_counts_changes_that_no_batch_tells(told: ToldPages) -> None:
    told.take(batch(0, num_changes=10))
    told.count(10, 0.0)
    assert told.state(1.0 + LATE_S) == "whole", "nothing has changed"
    told.count(12, 10.0)
    told.count(15, 11.0)
    assert told.state(9.9 + LATE_S) == "whole" and told.state(10.1 + LATE_S) == "late"
    assert told.asks(10.1 + LATE_S)
    told.take(batch(1, num_changes=12))
    assert told.state(20.0) == "whole"
    for now in range(20, 40):  # a busy node is always a little behind its heartbeats
        told.count(now, float(now))
        assert told.state(float(now)) == "whole"
        told.take(batch(now - 18, num_changes=now))


def test_a_node_cannot_tell_more_pages_than_it_has() -> None:
    told = ToldPages(8)
    told.take(batch(0, column(IDS, range(8))))
    with pytest.raises(ProtocolError, match="a node with 8 pages told 9 cached ones"):
        told.take(batch(1, column(IDS, range(8, 9))))
    assert told.state(0.0) == "late" and len(told) == 0 and told.asks(0.0)
