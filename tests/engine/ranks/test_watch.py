"""A rank that says nothing for a while is reported, once; one that speaks or has ended is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from patience import wait_until

from baton.engine.ranks import watch as rank_watch
from baton.engine.ranks.watch import SILENCE_S, RankWatch, beat

LATER_S = SILENCE_S + 1.0


class Watched:
    """A watch of ranks of which the first one speaks. Time passes only when the test says so."""

    def __init__(self, num_ranks: int) -> None:
        self.now = 0.0
        self.silent: list[tuple[int, str]] = []
        self.ended: list[int] = []
        ours, theirs = zip(*(Pipe(duplex=False) for _ in range(num_ranks)), strict=True)
        self.pipes: list[Connection] = list(theirs)
        self.watch = RankWatch(ours, lambda rank, what: self.silent.append((rank, what)), self.ended.append)

    def start(self) -> None:
        self.watch.start()
        beat(self.pipes[0])

    def pass_time(self, seconds: float, step_s: float = 0.4) -> None:
        """Let time pass in steps. After each one the watch hears the rank that speaks."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            wait_until(lambda: self.watch.silences_s()[0] == 0.0, "the watch hears the first rank")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Watched]]:
    made: list[Watched] = []

    def make_one(num_ranks: int) -> Watched:
        made.append(watched := Watched(num_ranks))
        clock = SimpleNamespace(monotonic=lambda: watched.now, sleep=time.sleep)
        monkeypatch.setattr(rank_watch, "time", clock)
        return watched

    monkeypatch.setattr(rank_watch, "BEAT_S", 0.01)
    yield make_one
    for each in made:
        each.watch.close()
        each.watch.close()


def test_a_silent_rank_is_reported_once(make: Callable[[int], Watched]) -> None:
    watched = make(2)
    watched.start()
    watched.pass_time(3 * LATER_S)
    assert watched.silent == [(2, "was silent for 3 s")]


def test_the_watch_says_for_how_long_ranks_are_silent(make: Callable[[int], Watched]) -> None:
    watched = make(2)
    assert watched.watch.silences_s() == (), "ranks may load for as long as they need"
    watched.start()
    watched.pass_time(2.0)
    assert watched.watch.silences_s() == (0.0, pytest.approx(2.0))


def test_a_rank_that_has_ended_is_not_silent(make: Callable[[int], Watched]) -> None:
    watched = make(2)
    watched.start()
    watched.pipes[1].close()
    watched.pass_time(LATER_S)
    assert not watched.silent


def test_a_rank_counts_as_heard_after_this_process_was_away(make: Callable[[int], Watched]) -> None:
    """While this process is stopped, a rank can beat and be stopped, too. It gets its time anew."""
    watched = make(2)
    watched.start()
    watched.pass_time(10 * LATER_S, step_s=10 * LATER_S)
    assert not watched.silent
    watched.pass_time(LATER_S)
    assert [rank for rank, _ in watched.silent] == [2]


def test_the_end_of_a_rank_is_told_once(make: Callable[[int], Watched]) -> None:
    watched = make(3)
    watched.start()
    watched.pipes[1].close()  # the third one is silent
    watched.pass_time(2 * LATER_S)
    assert watched.ended == [2, 3] and [rank for rank, _ in watched.silent] == [3]
