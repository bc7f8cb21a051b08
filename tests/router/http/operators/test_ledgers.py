"""Questions to nodes about their ledgers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.router.http.operators import ledgers

from ...conftest import System


class FakeDispatcher:
    """Two nodes, and the questions that were sent to them."""

    def __init__(self) -> None:
        self.on_ledger: Any = None
        self.asked: list[tuple[int, bool]] = []
        self.nodes = [SimpleNamespace(node_id=name, routing_id=name.encode()) for name in ("p0", "d0")]
        self.registry = SimpleNamespace(nodes={node.routing_id: node for node in self.nodes})

    def ask_ledgers(self, query: int, *, flush: bool) -> None:
        self.asked.append((query, flush))


def report(query: int) -> Any:
    return SimpleNamespace(query=query)


async def test_each_asker_gets_the_answers_to_its_own_question() -> None:
    dispatcher: Any = FakeDispatcher()
    asked = ledgers.Ledgers(dispatcher)
    first = asyncio.create_task(asked.ask(flush=False))
    second = asyncio.create_task(asked.ask(flush=False))
    await asyncio.sleep(0)
    assert dispatcher.asked == [(1, False), (2, False)]
    answers = {(node.node_id, query): report(query) for query in (2, 1) for node in dispatcher.nodes}
    for (name, _), answer in answers.items():
        dispatcher.on_ledger(SimpleNamespace(node_id=name), answer)
    for query, task in ((1, first), (2, second)):
        assert await task == {name: answers[name, query] for name in ("p0", "d0")}
    dispatcher.on_ledger(SimpleNamespace(node_id="p0"), report(1))  # too late: the question is over


async def test_the_ledger_of_a_silent_node_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "ANSWER_S", 0.01)
    dispatcher: Any = FakeDispatcher()
    assert await ledgers.Ledgers(dispatcher).ask(flush=True) == {"p0": None, "d0": None}
    assert dispatcher.asked == [(1, True)]


def test_each_request_asks_every_node_once(system: System) -> None:
    for method, path, kind in (("GET", "/debug/ledger", m.Inspect), ("POST", "/admin/flush", m.Flush)):
        status, body, _ = system.router.request(method, path)
        assert status == 200 and set(body["nodes"]) == {"p0", "d0"} and all(body["nodes"].values())
        assert [len(node.got(kind)) for node in system.cluster.nodes] == [1, 1]
