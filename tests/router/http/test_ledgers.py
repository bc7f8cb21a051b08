"""Questions to nodes about their ledgers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.router.http import ledgers


class FakeDispatcher:
    """Two nodes, and what is sent to them."""

    def __init__(self) -> None:
        self.epoch = "00" * 8
        self.on_ledger: Any = None
        self.sent: list[tuple[str, Any]] = []
        self.forgotten: list[bytes] = []
        self.nodes = [SimpleNamespace(node_id=name, routing_id=name.encode()) for name in ("p0", "d0")]
        self.registry = SimpleNamespace(nodes={node.routing_id: node for node in self.nodes})
        self.admission = SimpleNamespace(affinity=SimpleNamespace(forget=self.forgotten.append))

    def send(self, node: Any, message: Any) -> None:
        self.sent.append((node.node_id, message))


def report(query: int) -> Any:
    return SimpleNamespace(query=query)


async def test_each_asker_gets_the_answers_to_its_own_question() -> None:
    dispatcher: Any = FakeDispatcher()
    asked = ledgers.Ledgers(dispatcher)
    first = asyncio.create_task(asked.ask(flush=False))
    second = asyncio.create_task(asked.ask(flush=False))
    await asyncio.sleep(0)
    assert [(name, message.query) for name, message in dispatcher.sent] == [("p0", 1), ("d0", 1), ("p0", 2), ("d0", 2)]
    answers = {(node.node_id, query): report(query) for query in (2, 1) for node in dispatcher.nodes}
    for (name, _), answer in answers.items():
        dispatcher.on_ledger(SimpleNamespace(node_id=name), answer)
    for query, task in ((1, first), (2, second)):
        assert await task == {name: answers[name, query] for name in ("p0", "d0")}
    dispatcher.on_ledger(SimpleNamespace(node_id="p0"), report(1))  # too late: nobody asks any more


async def test_a_silent_node_is_none_and_a_flush_forgets_what_nodes_have_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledgers, "ANSWER_S", 0.01)
    dispatcher: Any = FakeDispatcher()
    assert await ledgers.Ledgers(dispatcher).ask(flush=True) == {"p0": None, "d0": None}
    assert [type(message) for _, message in dispatcher.sent] == [m.Flush, m.Flush]
    assert dispatcher.forgotten == [b"p0", b"d0"]
