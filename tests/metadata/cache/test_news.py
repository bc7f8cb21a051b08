"""News of a node's prefix cache: when batches go out, and what follows a loss."""

from __future__ import annotations

import pytest

from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.cache import changes
from baton.metadata.cache.changes import BUSY_INTERVAL_S, INTERVAL_S, CacheNews
from baton.metadata.wire.membership import CachedPages

from .test_changes import PAGE, store


class Session:
    """A session with a router, whose link may have no room."""

    def __init__(self) -> None:
        self.cache = PrefixCache(PagePool(100, PAGE))
        self.sent: list[CachedPages] = []
        self.has_room = True
        self.news = CacheNews(self._send)

    def _send(self, message: CachedPages) -> bool:
        if self.has_room:
            self.sent.append(message)
        return self.has_room


@pytest.fixture
def session() -> Session:
    return Session()


def test_batches_are_numbered_and_a_few_per_second(session: Session) -> None:
    session.news.begin(session.cache, b"key")
    assert session.news.wait_s(1.0) == 0.0
    session.news.tell(1.0)
    assert session.news.wait_s(1.0) is None, "nothing has changed"
    store(session.cache, [1] * 8)
    assert session.news.wait_s(1.0) == pytest.approx(INTERVAL_S)
    session.news.tell(1.1)
    assert len(session.sent) == 1
    session.news.tell(1.0 + INTERVAL_S)
    assert [(each.number, len(each.stored), each.is_whole) for each in session.sent] == [(0, 0, True), (1, 32, True)]
    assert session.sent[-1].num_changes == session.cache.num_changes == 2


def test_a_batch_is_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "BATCH_PAGES", 3)
    store(session.cache, list(range(40)))
    session.news.begin(session.cache, b"key")
    now = 0.0
    while (wait_s := session.news.wait_s(now)) is not None:
        assert wait_s <= BUSY_INTERVAL_S + 1e-9
        now += wait_s
        session.news.tell(now)
    assert [len(each.stored) // 16 for each in session.sent] == [3, 3, 3, 1]
    assert [each.is_whole for each in session.sent] == [False, False, False, True]


@pytest.mark.parametrize("loss", ["the link has no room", "the router asks"])
def test_after_a_loss_the_whole_cache_is_told_anew(session: Session, loss: str) -> None:
    session.news.begin(session.cache, b"key")
    session.news.tell(0.0)
    store(session.cache, [1] * 8)
    session.has_room = loss != "the link has no room"
    session.news.tell(1.0)
    session.has_room = True
    if loss == "the router asks":
        session.news.begin_anew()
    session.news.tell(2.0)
    assert (session.sent[-1].number, len(session.sent[-1].stored), session.sent[-1].is_whole) == (0, 32, True)


def test_each_session_names_pages_by_its_own_key_and_ends_alone(session: Session) -> None:
    store(session.cache, [1] * 8)
    other = Session()
    other.cache = session.cache
    for each, key in ((session, b"one"), (other, b"two")):
        each.news.begin(session.cache, key)
        each.news.tell(0.0)
    assert session.sent[0].stored != other.sent[0].stored
    session.news.end()
    store(session.cache, [2] * 8)
    session.news.tell(1.0)
    other.news.tell(1.0)
    assert (len(session.sent), len(other.sent)) == (1, 2)
