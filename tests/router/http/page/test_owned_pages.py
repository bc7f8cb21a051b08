"""Pages of nodes by owner: who waits for the nodes' answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.router.http.page import owned_pages
from baton.router.http.page.owned_pages import NodePages


class Nodes:
    """Nodes that answer while `may_answer` is set. They stand in for the dispatcher."""

    def __init__(self, *names: str) -> None:
        self.registry = SimpleNamespace(nodes={})
        self.may_answer = asyncio.Event()
        self.add(*names)

    def add(self, *names: str) -> None:
        self.registry.nodes |= {name: SimpleNamespace(node_id=name) for name in names}

    async def ledgers(self, *, flush: bool) -> dict[str, Any]:
        asked = list(self.registry.nodes)
        await self.may_answer.wait()
        return dict.fromkeys(asked)


def test_only_a_node_that_has_never_been_asked_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_pages, "PERIOD_S", 0.0)
    monkeypatch.setattr(owned_pages, "WAIT_S", 600.0)

    async def run() -> None:
        nodes = Nodes("p0", "d0")
        pages: Any = NodePages(nodes)  # type: ignore[arg-type]
        first = asyncio.create_task(pages.wait())
        await asyncio.sleep(0.01)
        assert not first.done(), "no node has answered yet"
        nodes.may_answer.set()
        await first
        nodes.may_answer.clear()
        await asyncio.wait_for(pages.wait(), 20)  # with a question under way
        nodes.add("d1")
        joined = asyncio.create_task(pages.wait())
        await asyncio.sleep(0.01)
        assert not joined.done(), "a node has joined"
        nodes.may_answer.set()
        await joined

    asyncio.run(run())
