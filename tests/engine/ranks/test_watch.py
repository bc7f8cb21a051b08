"""A rank that says nothing for a while is reported, once; one that speaks or has ended is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from baton.engine.ranks import watch as rank_watch
from baton.engine.ranks.watch import RankWatch, beat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.02)
    monkeypatch.setattr(rank_watch, "SILENCE_S", 0.3)


@pytest.fixture
def silent() -> list[tuple[int, str]]:
    """The ranks that were reported."""
    return []


@pytest.fixture
def pipes(silent: list[tuple[int, str]]) -> Iterator[list[Connection]]:
    """The ends of ranks 1 and 2, to whose other ends a watch listens."""
    ours, theirs = zip(*(Pipe(duplex=False) for _ in range(2)), strict=True)
    watch = RankWatch(ours, lambda rank, what: silent.append((rank, what)))
    watch.start()
    yield list(theirs)
    watch.close()
    watch.close()


def test_a_silent_rank_is_reported_once(pipes: list[Connection], silent: list[tuple[int, str]]) -> None:
    beat(pipes[0])
    time.sleep(1.0)
    assert silent == [(2, "was silent for 0.3 s")]


def test_the_watch_says_for_how_long_ranks_are_silent() -> None:
    ours, theirs = zip(*(Pipe(duplex=False) for _ in range(2)), strict=True)
    watch = RankWatch(ours, lambda rank, what: None)
    assert watch.silences_s() == (), "ranks may load for as long as they need"
    watch.start()
    beat(theirs[0])
    time.sleep(0.25)
    speaking_s, silent_s = watch.silences_s()
    assert speaking_s < 0.15 < 0.2 < silent_s < 5.0
    watch.close()


def test_a_rank_that_has_ended_is_not_silent(pipes: list[Connection], silent: list[tuple[int, str]]) -> None:
    beat(pipes[0])
    pipes[1].close()
    time.sleep(0.6)
    assert not silent


def test_a_rank_counts_as_heard_after_this_process_was_away(
    pipes: list[Connection], silent: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this process is stopped, a rank can beat and be stopped, too. It gets its time anew."""
    clock, away_s = time.monotonic, 0.0
    monkeypatch.setattr(rank_watch.time, "monotonic", lambda: clock() + away_s)
    pipes[0].send_bytes(b".")
    beat(pipes[1])
    time.sleep(0.1)
    away_s = 5.0
    time.sleep(0.15)
    assert not silent
    time.sleep(0.6)
    assert [rank for rank, _ in silent] == [1]


def test_the_end_of_a_rank_is_told_once(silent: list[tuple[int, str]]) -> None:
    ours, theirs = zip(*(Pipe(duplex=False) for _ in range(3)), strict=True)
    ended: list[int] = []
    watch = RankWatch(ours, lambda rank, what: silent.append((rank, what)), ended.append)
    watch.start()
    beat(theirs[0])
    theirs[1].close()  # the third one is silent
    time.sleep(1.0)
    watch.close()
    assert ended == [2, 3] and [rank for rank, _ in silent] == [3]
