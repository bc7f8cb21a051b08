"""The log lines in both formats."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from baton.metadata.config import ProcessConfig
from baton.metadata.logs import Throttle, log_uncaught, setup_logging, size_in_words

logger = logging.getLogger("baton.test")
Lines = Callable[..., list[str]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Return `lines(do, **config)`: it sets logging up, calls `do`, and returns the lines on stderr."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = (list(root.handlers), root.level, baton.level)

    def run(do: Callable[[], object], **config: object) -> list[str]:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(ProcessConfig(**config), "decode-0")  # pyright: ignore[reportArgumentType]
        do()
        return stream.getvalue().splitlines()

    yield run
    root.handlers[:], root.level = before[0], before[1]
    baton.setLevel(before[2])


def test_a_text_line_has_time_level_process_and_fields(lines: Lines) -> None:
    (line,) = lines(lambda: logger.info("admitted in %d ms", 7, extra={"pages": 3, "rid": "abc"}))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d I decode-0 rid=abc admitted in 7 ms pages=3", line
    )


def test_a_json_line_has_all_fields_even_odd_values(lines: Lines) -> None:
    extra = {"rid": "abc", "pages": 3, "rate": float("nan"), "odd": {1}, "bad": "\ud800", "level": "mine"}
    (line,) = lines(lambda: logger.warning("admitted\nnow", extra=extra), log_format="json")
    entry = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry.pop("time"))
    assert entry == {
        "level": "warning",
        "node": "decode-0",
        "logger": "baton.test",
        "event": "admitted\nnow",
        "rid": "abc",
        "pages": 3,
        "rate": "nan",
        "odd": "{1}",
        "bad": "\ud800",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_says_where_and_not_with_which_text(lines: Lines, log_format: str) -> None:
    text = "a client's words"

    def fail() -> None:
        try:
            try:
                raise ValueError(text)
            except ValueError as error:
                raise KeyError(text) from error
        except KeyError:
            logger.exception("failed", extra={"rid": "abc"})

    got = lines(fail, log_format=log_format)
    page = "\n".join(got)
    assert "raise KeyError(text)" in page and page.index("ValueError") < page.index("KeyError")
    assert text not in page, "an exception's message may quote a prompt or an output"
    assert (len(got) == 1) == (log_format == "json")


def test_a_task_that_fails_unseen_is_logged_without_its_exceptions_message(lines: Lines) -> None:
    text = "a client's words"

    async def fail() -> None:
        raise ValueError(text)

    async def forget() -> None:
        await asyncio.wait([asyncio.create_task(fail())])
        gc.collect()

    page = "\n".join(lines(lambda: asyncio.run(forget())))
    assert "Task exception was never retrieved" in page and "raise ValueError(text)" in page
    assert text not in page


def test_an_exception_that_ends_a_process_or_a_thread_is_logged_without_its_message(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    error = ValueError("the prompt")

    def fail() -> None:
        raise error

    def end() -> None:
        log_uncaught()
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        sys.excepthook(ValueError, error, error.__traceback__)

    said = lines(end)
    assert sum("ended by a defect" in line for line in said) == said.count("ValueError") == 2
    assert not any("the prompt" in line for line in said)


def test_text_from_a_peer_cannot_forge_a_log_line(lines: Lines) -> None:
    (line,) = lines(lambda: logger.error("refused: %s", "x\n12:00:00.000 I router\x1b[2J", extra={"rid": "a\rb"}))
    assert r"x\n12:00:00.000 I router\x1b[2J" in line
    assert r"rid=a\rb" in line


def test_log_level_hides_less_severe_lines(lines: Lines) -> None:
    def speak() -> None:
        logger.debug("one")
        logger.info("two")
        logging.getLogger("aiohttp").info("three")
        logging.getLogger("aiohttp").warning("four")

    assert [line.split()[-1] for line in lines(speak)] == ["two", "four"]
    assert [line.split()[-1] for line in lines(speak, log_level="debug")] == ["one", "two", "four"]
    assert [line.split()[-1] for line in lines(speak, log_level="error")] == ["four"]


def test_a_second_setup_replaces_the_first(lines: Lines) -> None:
    first = lines(lambda: logger.info("x"))
    assert len(first) == len(lines(lambda: logger.info("x"), log_format="json")) == 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_event_is_allowed_once_per_interval() -> None:
    clock = Clock()
    throttle = Throttle(2.0, clock)
    assert [throttle.is_due(), throttle.is_due()] == [True, False]
    clock.now += 1.9
    assert not throttle.is_due()
    clock.now += 0.1
    assert [throttle.is_due(), throttle.is_due()] == [True, False]


def test_events_are_allowed_several_times_per_interval_from_the_first_on() -> None:
    clock = Clock()
    throttle = Throttle(2.0, clock, most=2)
    assert throttle.is_due()
    clock.now += 1.5
    assert [throttle.is_due(), throttle.is_due()] == [True, False]
    clock.now += 0.5
    assert [throttle.is_due(), throttle.is_due(), throttle.is_due()] == [True, True, False]


def test_sizes_are_rounded_to_the_unit_that_fits() -> None:
    sizes = [size_in_words(each) for each in (7, 1234, 45_678, 999_600_000, 1.5e9)]
    assert sizes == ["7 bytes", "1.2 kB", "46 kB", "1.0 GB", "1.5 GB"]
