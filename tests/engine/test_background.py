"""Work beside the start: its result, its error, and that nobody has to wait for it."""

from __future__ import annotations

import threading

import pytest

from baton.engine.background import begin


def test_the_result_is_waited_for() -> None:
    go = threading.Event()
    future = begin(lambda: go.wait(10) and threading.current_thread().name, "digests")
    assert not future.done(), "it runs beside its caller"
    go.set()
    assert future.result(10) == "digests"


def test_an_error_reaches_who_asks_for_the_result() -> None:
    def fail() -> None:
        raise ValueError("cut short")

    with pytest.raises(ValueError, match="cut short"):
        begin(fail, "digests").result(10)


def test_a_process_may_end_before_it() -> None:
    go = threading.Event()
    begin(lambda: go.wait(10), "endless")
    (thread,) = (each for each in threading.enumerate() if each.name == "endless")
    assert thread.daemon
    go.set()
