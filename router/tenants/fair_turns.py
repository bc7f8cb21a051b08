"""Turns of callers at work that takes long. No caller waits for more than one piece of work of each other caller."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from ...metadata.errors import Overloaded, Unavailable

ASKER: ContextVar[Hashable] = ContextVar("asker", default=None)  # whose HTTP request is being served

_T = TypeVar("_T")


class FairTurns:
    """Runs pieces of work in `num_threads` threads. If more wait, callers take turns.

    `most_waiting` bounds the waiting pieces of each caller. The threads start with the first piece.
    """

    def __init__(self, name: str, num_threads: int, most_waiting: int) -> None:
        self._name = name
        self._most_waiting = most_waiting
        self._num_threads = self._num_free = num_threads
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()  # the next caller is first
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of a piece of work of the caller ASKER. Raises Overloaded if the caller has too many."""
        await self._take_turn(ASKER.get())
        self._executor = self._executor or ThreadPoolExecutor(self._num_threads, self._name)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._end_turn)  # also if the client has left before the work ends
        return await asyncio.shield(running)

    def close(self, last: Callable[[], None]) -> None:
        """Start no more work, and refuse what waits. `last` is called behind the work that runs."""
        self._is_closed = True
        for turn in (turn for waiting in self._waiting.values() for turn in waiting):
            if not turn.done():
                turn.set_exception(Unavailable("the router is shutting down"))
        self._waiting.clear()
        if self._executor is not None:
            self._executor.submit(last)
            self._executor.shutdown(wait=False)
            self._executor = None

    async def _take_turn(self, caller: Hashable) -> None:
        if self._is_closed:
            raise Unavailable("the router is shutting down")
        if self._num_free:
            self._num_free -= 1
            return
        waiting = self._waiting.setdefault(caller, deque())
        if len(waiting) >= self._most_waiting:
            raise Overloaded(f"{self._most_waiting} {self._name} of this client wait already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_turn()
            elif turn in waiting:
                waiting.remove(turn)
                if not waiting and self._waiting.get(caller) is waiting:
                    del self._waiting[caller]
            raise

    def _end_turn(self, done: asyncio.Future[_T]) -> None:
        if not done.cancelled():
            done.exception()  # the caller may have left, and nobody else reads it
        self._give_turn()

    def _give_turn(self) -> None:
        """Let the next caller's first piece of work begin."""
        while self._waiting:
            caller, waiting = self._waiting.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
