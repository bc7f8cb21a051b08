"""The runner connects the dispatcher to the event loop. It passes events with their time and carries out effects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from ...metadata.bus.hub import Hub
from ...metadata.wire.membership import LedgerReport
from ...metadata.wire.messages import ToRouter
from ..config import RouterConfig
from ..figures.metrics import Metrics
from ..nodes.node import Node, NodeGroup
from ..requests.request import Request
from ..requests.trace import TraceRecorder
from ..waiting.admission import Asked
from .dispatcher import Dispatcher
from .effects import Done, Effect, Error, Ledger, Output, Over, Send, SendUnknown

logger = logging.getLogger(__name__)

TICK_S = 0.05
LEDGER_S = 5.0  # a node that has not sent its ledger within so many seconds counts as silent


class RunningDispatcher:
    """A dispatcher, the hub that it sends through, and its clock. All methods belong to the event loop's thread.

    Effects are done after the event that caused them, in order. A listener may call back: the effects of that call
    follow those that are already due.
    """

    def __init__(self, config: RouterConfig, epoch: str, metrics: Metrics) -> None:
        self.on_over: Callable[[TraceRecorder], None] | None = None
        self._dispatcher = dispatcher = Dispatcher(config, epoch, metrics)
        # To be read only: requests that are not over, timelines of those that are, nodes, queues, Cancels under way.
        self.epoch, self.requests, self.finished = epoch, dispatcher.requests, dispatcher.finished
        self.registry, self.health = dispatcher.registry, dispatcher.health
        self.queues, self.cancels = dispatcher.queues, dispatcher.cancels
        self._due: deque[Effect] = deque()
        self._is_busy = False
        self._hub: Hub | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._next_query = 1
        self._queries: dict[int, dict[str, asyncio.Future[LedgerReport]]] = {}  # for ledgers, by number and node

    def start(self, hub: Hub) -> None:
        """Serve from now on, in the running event loop."""
        self._hub = hub
        self._tick()

    def close(self) -> None:
        """End every request with an error, and stop."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._do(self._dispatcher.close(time.monotonic()))

    # Events of clients and operators

    def check_room(self, group: NodeGroup, asked: Asked) -> None:
        """Raises Overloaded or RequestError if requests like these may not wait now."""
        self.queues.check_room(group, asked, time.monotonic())

    def make_room(self, group: NodeGroup, asked: Asked) -> None:
        """Check the room right before `submit`, and have requests of lower priority refused if that makes room."""
        self._do(self._dispatcher.make_room(group, asked, time.monotonic()))

    def submit(self, request: Request) -> None:
        """Take a request in. Its listener hears of it from now on. Raises Overloaded, Unavailable or RequestError."""
        self._do(self._dispatcher.submit(request, time.monotonic()))

    def cancel(self, request: Request, reason: str) -> None:
        """End a request without telling its listener. Nothing happens if it is over."""
        self._do(self._dispatcher.cancel(request, reason, time.monotonic()))

    def abort(self, request: Request, reason: str) -> None:
        """End a request that someone other than its waiting client cancels. Its listener gets one clear error."""
        self._do(self._dispatcher.abort(request, reason, time.monotonic()))

    def refuse(self, request: Request, reason: str) -> None:
        """End a request that waits, because there is no room for it."""
        self._do(self._dispatcher.refuse(request, reason, time.monotonic()))

    def set_paused(self, request: Request, is_paused: bool) -> None:
        """Take a request off its nodes, or let it go on."""
        self._do(self._dispatcher.set_paused(request, is_paused, time.monotonic()))

    def drain(self, node_id: str, timeout_s: float | None = None) -> Node:
        """Give a node no new work, and move its unfinished work to other nodes after a time. Raises NotFound."""
        self._do(self._dispatcher.drain(node_id, timeout_s, time.monotonic()))
        return self._named(node_id)

    def undrain(self, node_id: str) -> Node:
        """Undo `drain`. Raises NotFound, and Conflict if the node itself said that it leaves."""
        self._do(self._dispatcher.undrain(node_id, time.monotonic()))
        return self._named(node_id)

    def forget_salts(self, prefix: str) -> None:
        """Have the cached pages of all salts that begin so removed: now, and again when no request has such a salt."""
        self._do(self._dispatcher.forget_salts(prefix, time.monotonic()))

    async def ledgers(self, *, flush: bool) -> dict[str, LedgerReport | None]:
        """Return the page ledger of every node by node id, None for a node that does not answer in time.

        If `flush`, nodes empty their prefix caches of unreferenced pages first.
        """
        query, loop = self._next_query, asyncio.get_running_loop()
        self._next_query += 1
        futures = {node.node_id: loop.create_future() for node in self.registry.nodes.values()}
        self._queries[query] = futures
        self._do(self._dispatcher.ask_ledgers(query, time.monotonic(), flush=flush))
        try:
            if futures:
                await asyncio.wait(futures.values(), timeout=LEDGER_S)
        finally:
            del self._queries[query]
        return {name: future.result() if future.done() else None for name, future in futures.items()}

    # Events of the bus, and time

    def on_message(self, peer: bytes, message: ToRouter) -> None:
        """A node's message has come."""
        self._do(self._dispatcher.on_message(peer, message, time.monotonic()))

    def on_connection_lost(self, peer: bytes) -> None:
        """A node's connection has closed."""
        self._do(self._dispatcher.on_connection_lost(peer, time.monotonic()))

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._do(self._dispatcher.tick(time.monotonic()))

    def _do(self, effects: list[Effect]) -> None:
        self._due.extend(effects)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._due:
                effect = self._due.popleft()
                try:
                    if type(effect) is Output:  # once per token
                        effect.sequence.request.listener.on_delta(effect.sequence, effect.delta)
                    else:
                        self._do_one(effect)
                except Exception:  # of one request: the effects of others go on
                    logger.exception("%s failed", type(effect).__name__)
        finally:
            self._is_busy = False

    def _do_one(self, effect: Effect) -> None:
        match effect:
            case Send(node, message):
                assert self._hub is not None, "the hub has not been started"
                if not self._hub.send(node.routing_id, message, node.protocol):
                    self._due.extend(self._dispatcher.on_send_failed(node, message, time.monotonic()))
            case SendUnknown(peer, message, protocol):
                assert self._hub is not None, "the hub has not been started"
                self._hub.send(peer, message, protocol)
            case Done(request):
                request.listener.on_done(request)
            case Error(request, error):
                request.listener.on_error(request, error)
            case Over(trace):
                if self.on_over is not None:
                    self.on_over(trace)
            case Ledger(node, report):
                future = self._queries.get(report.query, {}).get(node.node_id)
                if future is not None and not future.done():
                    future.set_result(report)
            case Output(sequence, delta):
                sequence.request.listener.on_delta(sequence, delta)

    def _named(self, node_id: str) -> Node:
        return next(node for node in self.registry.nodes.values() if node.node_id == node_id)
