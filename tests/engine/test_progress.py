"""What is seen of loading and capturing: a bar on a terminal, lines in any other log."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from baton.engine.progress import ProgressBar, tracked
from baton.metadata.config import ProcessConfig
from baton.metadata.logs import setup_logging

logger = logging.getLogger("baton.test")
MIB = 1 << 20
ERASE = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0  # seconds

    def load(self, bar: ProgressBar, *steps: tuple[float, int, int]) -> None:
        """Steps of (seconds since the start, MiB done, MiB in all)."""
        for at, num_done, num_total in steps:
            self.now = 100.0 + at
            bar(num_done * MIB, num_total * MIB)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setenv("COLUMNS", "80")
    return clock


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Callable[..., io.StringIO]]:
    """`stderr(stream, **config)`: sets logging up over it."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = (list(root.handlers), root.level, baton.level)

    def use(stream: io.StringIO, **config: object) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(ProcessConfig(**config), "p")  # pyright: ignore[reportArgumentType]
        return stream

    yield use
    root.handlers[:], root.level = before[0], before[1]
    baton.setLevel(before[2])


def messages(text: str) -> list[str]:
    return [line.split(" p ")[1] for line in text.splitlines()]


STEPS = ((0.05, 10, 2468), (0.5, 617, 2468), (1.2, 1000, 2468), (1.9, 1200, 2468), (3.0, 1234, 2468), (3.1, 2468, 2468))


def test_a_terminal_shows_one_line_redrawn(stderr: Callable[..., io.StringIO], clock: Clock) -> None:
    stream = stderr(Terminal())
    with ProgressBar("loading weights", "MiB", MIB) as bar:
        clock.load(bar, *STEPS)
        text = stream.getvalue()
        drawn = text.split(ERASE)
        assert drawn[0] == "" and len(drawn) == 6  # the first came too soon
        assert drawn[4] == "loading weights  [##########----------]  50 %  1,234 of 2,468 MiB  3 s"
        assert drawn[5] == "loading weights  [####################] 100 %  2,468 of 2,468 MiB  3 s\n"
        clock.load(bar, (3.15, 1, 2), (3.2, 1, 2), (3.3, 2, 2))  # a drafter, on a line of its own
        assert stream.getvalue()[len(text) :].count("\n") == 1
        assert stream.getvalue().endswith("2 of 2 MiB  0 s\n")
    assert stream.getvalue().endswith("s\n") and not stream.getvalue().endswith("\n\n")


def test_lines_of_the_log_do_not_tear_a_bar(stderr: Callable[..., io.StringIO], clock: Clock) -> None:
    stream = stderr(Terminal())
    with pytest.raises(ValueError, match="no such"), ProgressBar("loading weights", "MiB", MIB) as bar:
        clock.load(bar, (1.0, 1, 4))
        before = stream.getvalue()
        logger.info("one")
        logger.info("two")
        said = stream.getvalue().removeprefix(before)
        assert said.startswith(ERASE) and said.count(ERASE) == 1, "the line of the log takes the bar's place"
        assert messages(said.removeprefix(ERASE)) == ["one", "two"]
        clock.load(bar, (2.0, 2, 4))
        raise ValueError("no such tensor")
    assert stream.getvalue().endswith("2 of 4 MiB  2 s\n"), "what is printed next begins a line"


@pytest.mark.parametrize("columns", ["20", "40"])
def test_a_bar_never_wraps(
    columns: str, stderr: Callable[..., io.StringIO], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = stderr(Terminal())
    clock.load(ProgressBar("loading weights", "MiB", MIB), *STEPS)
    assert {len(line.rstrip("\n")) for line in stream.getvalue().split(ERASE)[1:]} == {int(columns) - 1}


def test_other_logs_have_a_line_a_second_and_the_last(stderr: Callable[..., io.StringIO], clock: Clock) -> None:
    stream = stderr(io.StringIO())
    with ProgressBar("loading weights", "MiB", MIB) as bar:
        clock.load(bar, *STEPS)
    text = stream.getvalue()
    assert messages(text) == [f"loading weights: {done} of 2468 MiB" for done in (1000, 1234, 2468)]
    assert "".join(text.splitlines()).isprintable()


def test_so_has_json_on_a_terminal(stderr: Callable[..., io.StringIO], clock: Clock) -> None:
    stream = stderr(Terminal(), log_format="json")
    clock.load(ProgressBar("loading weights", "MiB", MIB), *STEPS)
    assert stream.getvalue().count('"event": "loading weights: ') == 3 and ERASE not in stream.getvalue()


def test_nothing_is_shown_where_lines_are_not_wanted(stderr: Callable[..., io.StringIO], clock: Clock) -> None:
    stream = stderr(Terminal(), log_level="warning")
    clock.load(ProgressBar("loading weights", "MiB", MIB), *STEPS)
    assert stream.getvalue() == ""


def test_items_are_told_when_they_are_done() -> None:
    """As graphs are captured: one is done when the next is asked for, the last with the end."""
    seen: list[tuple[int, int]] = []
    items = tracked("abc", lambda *counts: seen.append(counts))
    assert (next(items), seen) == ("a", [])
    assert (next(items), seen) == ("b", [(1, 3)])
    assert (list(items), seen) == (["c"], [(1, 3), (2, 3), (3, 3)])
    assert list(tracked("ab", None)) == ["a", "b"]
