"""Page ledgers of all nodes: asks each node for its ledger, and collects the answers."""

from __future__ import annotations

import asyncio

from ....metadata.wire.membership import LedgerReport
from ...nodes.node import Node
from ...runner import RunningDispatcher

ANSWER_S = 5.0  # a node that has not answered within so many seconds counts as silent


class Ledgers:
    """Asks nodes for their ledgers, and gives each asker the answers to its own question."""

    def __init__(self, dispatcher: RunningDispatcher) -> None:
        self._dispatcher = dispatcher
        self._next_query = 1
        self._open: dict[int, dict[str, asyncio.Future[LedgerReport]]] = {}
        dispatcher.on_ledger = self._answered

    async def ask(self, *, flush: bool) -> dict[str, LedgerReport | None]:
        """Return the report of every node by node id, None for a node that does not answer in time.

        If `flush`, nodes empty their prefix caches of unreferenced pages first.
        """
        query = self._next_query
        self._next_query += 1
        nodes = list(self._dispatcher.registry.nodes.values())
        loop = asyncio.get_running_loop()
        futures = {node.node_id: loop.create_future() for node in nodes}
        self._open[query] = futures
        self._dispatcher.ask_ledgers(query, flush=flush)
        try:
            if futures:
                await asyncio.wait(futures.values(), timeout=ANSWER_S)
        finally:
            del self._open[query]
        return {name: future.result() if future.done() else None for name, future in futures.items()}

    def _answered(self, node: Node, report: LedgerReport) -> None:
        future = self._open.get(report.query, {}).get(node.node_id)
        if future is not None and not future.done():
            future.set_result(report)
