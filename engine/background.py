"""Work of the start that runs in a thread beside the rest of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a daemon thread of this name, so that a start that fails need not wait for it. The future's
    `result` raises what the function raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            found = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
