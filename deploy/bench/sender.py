"""A whole load: each request is sent at its time, whatever became of the others (open loop).

A busy client measures itself. So the sender keeps by how much requests were sent late, how long its event loop stood
still, and how much of a core it took.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import aiohttp
import uvloop

from .client import Reply, Target, Turns, send
from .load import Pieces, Planned

Result = TypeVar("Result")
Prompt = str | list[int] | Turns

_TICK_S = 0.02  # between two looks at how late the event loop is


class SentRequest(NamedTuple):
    """A request that was sent, and what came of it."""

    at_s: float  # when it was due, since the start of the load
    late_s: float  # by which it was sent after that
    turn: int  # from 1 on
    num_tokens: int  # that it asked for
    prompt: Prompt
    reply: Reply


@dataclass(slots=True)
class Sender:
    """Sends one load and keeps what came of it."""

    session: aiohttp.ClientSession
    target: Target
    think_s: float = 0.0  # from the end of an answer to the next turn
    asked: list[SentRequest] = field(default_factory=list)
    stalls_s: array[float] = field(default_factory=lambda: array("d"))  # by which the event loop was late, at each tick
    took_s: float = 0.0
    cpu_share: float = 0.0  # of a core
    is_complete: bool = True  # not ended by Ctrl-C
    _started: float = 0.0

    async def run(self, planned: Sequence[Planned]) -> None:
        """Send all requests and wait for their answers. Being cancelled ends the load: what came so far is kept."""
        first = [self._first(each) for each in planned]
        bodies = [self.target.body(prompt, each.num_tokens) for prompt, each in zip(first, planned, strict=True)]
        gc.collect()
        gc.disable()  # a collection would hold up all streams, and the figures would blame the server
        watch = asyncio.create_task(self._watch())
        self._started, cpu_s = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as tasks:
                for each, prompt, body in zip(planned, first, bodies, strict=True):
                    await _sleep_until(self._started + each.at_s)
                    tasks.create_task(self._converse(each, prompt, body))
        except asyncio.CancelledError:
            self.is_complete = False
        finally:
            self.took_s = time.perf_counter() - self._started
            self.cpu_share = (time.process_time() - cpu_s) / self.took_s
            watch.cancel()
            gc.enable()

    async def _converse(self, planned: Planned, prompt: Prompt, body: bytes) -> None:
        """Ask all turns of a conversation. It ends early if a request fails."""
        due = self._started + planned.at_s
        for turn in range(1, len(planned.later) + 2):
            reply = Reply()
            late_s = time.perf_counter() - due
            self.asked.append(SentRequest(due - self._started, late_s, turn, planned.num_tokens, prompt, reply))
            await send(self.session, self.target, body, reply)
            if reply.error is not None or turn > len(planned.later):
                return
            due = reply.end_s + self.think_s
            prompt = self._further(prompt, reply, planned.later[turn - 1])
            body = self.target.body(prompt, planned.num_tokens)
            await _sleep_until(due)

    def _first(self, planned: Planned) -> Prompt:
        prompt = planned.prompt if isinstance(planned.prompt, str) else joined(planned.prompt)
        return [{"role": "user", "content": str(prompt)}] if self.target.is_chat else prompt

    def _further(self, prompt: Prompt, reply: Reply, more: Pieces) -> Any:
        """Return the prompt of the next turn: the history, the answer and what the turn adds."""
        if isinstance(prompt, str):
            return f"{prompt}{reply.text} {joined(more)}"
        if not self.target.is_chat:
            return [*prompt, *reply.ids, *more]
        answer = {"role": "assistant", "content": reply.text}
        return [*prompt, answer, {"role": "user", "content": joined(more)}]

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.stalls_s.append(time.perf_counter() - due)


def joined(pieces: Pieces) -> Any:
    """Return a prompt as a request holds it: ids, or words in one text."""
    return " ".join(map(str, pieces)) if isinstance(pieces[0], str) else pieces


async def _sleep_until(at: float) -> None:
    while (rest_s := at - time.perf_counter()) > 0:
        await asyncio.sleep(rest_s)


def run_on_uvloop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on uvloop and return its result. Ctrl-C cancels it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
