"""Pages of each node by owner, as the nodes' ledgers say. Nodes are asked only while an operator looks."""

from __future__ import annotations

import asyncio
import time

from ....metadata.wire.node_info import PoolLedger
from ...dispatching.runner import RunningDispatcher
from .types import OwnedPages

PERIOD_S = 2.0  # between two questions
WAIT_S = 1.0  # for nodes that have never answered


class NodePages:
    """The last answers. At most one question to the nodes is under way."""

    def __init__(self, dispatcher: RunningDispatcher) -> None:
        self._dispatcher = dispatcher
        self._asked_at: float | None = None
        self._question: asyncio.Task[None] | None = None
        self._pages: dict[str, OwnedPages | None] = {}  # by node id

    def look(self) -> dict[str, OwnedPages | None]:
        """Return what the nodes answered last, and ask them again if that is due."""
        now = time.monotonic()
        is_due = self._asked_at is None or now - self._asked_at >= PERIOD_S
        if is_due and (self._question is None or self._question.done()):
            self._asked_at = now
            self._question = asyncio.get_running_loop().create_task(self._ask())
        return self._pages

    async def wait(self) -> None:
        """Ask the nodes if that is due. Wait a moment for the answers if a node has not been asked before."""
        self.look()
        is_new = any(node.node_id not in self._pages for node in self._dispatcher.registry.nodes.values())
        if is_new and self._question is not None:
            await asyncio.wait((self._question,), timeout=WAIT_S)

    def close(self) -> None:
        """Forget the question under way."""
        if self._question is not None:
            self._question.cancel()

    async def _ask(self) -> None:
        reports = await self._dispatcher.ledgers(flush=False)
        self._pages = {name: None if report is None else _owned(report.pool) for name, report in reports.items()}


def _owned(pool: PoolLedger) -> OwnedPages:
    return OwnedPages(
        total=pool.free + pool.request + pool.ticket + pool.cache + pool.padding,
        free=pool.free,
        request=pool.request,
        ticket=pool.ticket,
        cache=pool.cache,
        padding=pool.padding,
    )
