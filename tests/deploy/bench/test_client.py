"""One request, measured."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.simulation.figures import Record

from .conftest import TimetableServer


async def asked(server: TimetableServer, prompt: object = "hello", *, is_chat: bool = False, **fields: object) -> Reply:
    target = Target(server.url, "toy", is_chat, "secret", fields)
    async with open_session(target, timeout_s=5.0) as session:
        return await ask(session, target, prompt, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_answer_is_read_whole(server: TimetableServer, is_chat: bool) -> None:
    prompt = [{"role": "user", "content": "hello"}] if is_chat else "hello"
    reply = await asked(server, prompt, is_chat=is_chat, temperature=None, top_k=3, return_token_ids=True)
    assert (reply.error, reply.text, reply.ids) == (None, "t0 t1 t2 t3 ", [0, 1, 2, 3])
    assert (reply.num_tokens, reply.prompt_len, reply.num_cached, reply.rid) == (4, 8, 1, "id-1")
    assert len(reply.times) == len(reply.id_times) == 4, "the event with the role of a chat has no token"
    assert reply.sent_s <= min(reply.times) and max(reply.times) <= reply.end_s
    (body,) = server.bodies
    assert body["stream"] and body["top_k"] == 3 and "temperature" not in body, "None leaves a field out"


async def test_a_connection_notes_when_it_is_read(server: TimetableServer) -> None:
    """Else times would be those of the tasks that wait, and aiohttp's own connections would go unnoticed."""
    server.waits_s = [0.0, 0.3]
    target = Target(server.url, "toy")
    body = target.body("hello", 2)
    async with open_session(target) as session, session.post(server.url + target.path, data=body) as response:
        assert response.connection is not None
        connection: Any = response.connection.protocol
        assert 0 < connection.read_s <= time.perf_counter()


def test_the_times_of_an_answer() -> None:
    reply = Reply(sent_s=10.0, times=array("d", [10.5, 10.6, 11.0]), num_counted=4)
    assert reply.record == pytest.approx(Record(0.5, 0.5 / 3, 0.1, 0.4))
    assert Reply(sent_s=10.0, times=array("d", [10.5])).record == Record(0.5, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (429, "HTTP 429", "the queue is full"),
        ("whole", "no stream", "the answer is application/json, not text/event-stream"),
        ("error", "error in the stream", "a node died"),
        ("break", "broken connection", ""),
        ("silent", "no token", "the answer ended with None"),
    ],
)
async def test_a_failure_is_named_and_raises_nothing(
    server: TimetableServer, fault: int | str, kind: str, words: str
) -> None:
    server.faults = [fault]
    reply = await asked(server)
    assert reply.error == kind and words in reply.message and reply.end_s > 0


async def test_a_closed_port_is_a_failure() -> None:
    reply = await asked(TimetableServer("http://127.0.0.1:9"))
    assert reply.error == "no connection" and "127.0.0.1:9" in reply.message


def test_the_key_is_not_in_the_words_of_a_target() -> None:
    assert "secret" not in repr(Target("http://x", "m", api_key="secret"))
