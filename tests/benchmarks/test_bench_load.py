"""The open-loop client: what is made of the times of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from bench_load import Client, Talk, record, row_of
from planted_text import PlantedText

from baton.deploy.simulation.figures import Record, Slo, summary
from baton.deploy.simulation.traffic import Arrival

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ran(answer: Answer, model: Path, arrivals: Sequence[Arrival], talk: Talk = Talk()) -> Client:  # noqa: B008
    """Return a client that has sent its requests to a server, which serves each by `answer`, and looked at them."""

    async def run() -> Client:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            client = Client(server.sockets[0].getsockname()[1], "m", model, 0, talk)
            await asyncio.wait_for(client.run(arrivals), 10)
            return client

    client = asyncio.run(run())
    client.look()
    return client


def test_times_of_an_answer() -> None:
    events = [(10.2, []), (10.5, [1]), (10.6, [2, 3]), (11.0, [4]), (11.1, [])]
    found = record(10.0, events)
    assert found.ttft_s == pytest.approx(0.5) and found.gap_s == pytest.approx(0.4)
    assert found.second_s == pytest.approx(0.1)
    assert found.tpot_s == pytest.approx(0.5 / 3)
    assert record(10.0, [(10.5, [1])]) == Record(0.5, 0.0, 0.0, 0.0)


def test_a_row_has_a_column_for_each_figure() -> None:
    row = summary([Record(0.1, 0.004, 0.02, 0.03)], 2.0, [Slo(200, 12), Slo(50, 8)])
    found = row_of(row | {"rate": 2.0, "failed": 0, "wrong": 0})
    assert (found["first token p50"], found["largest gap p99"]) == (pytest.approx(100), pytest.approx(30))
    assert (found["good at 200 / 12, requests/s"], found["good at 50 / 8, requests/s"]) == (0.5, 0.0)
    assert row_of(summary([], 2.0, []) | {"rate": 2.0}) == {"rate": 2.0, "requests": 0}, "no answer, no times"


@pytest.mark.parametrize("status", ["503 Service Unavailable", "400 Bad Request"])
def test_a_refusal_is_a_failed_request_at_once(status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The connection stays open, as the router's does, so only the status says that no tokens will come."""
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 64}')

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 9\r\n\r\nno node..".encode())
        await reader.read()
        writer.close()

    client = ran(refuse, tmp_path, [Arrival(0.0, 4, 2)])
    assert (client.num_failed, client.answered) == (1, [])
    assert f"the router refused: HTTP/1.1 {status}" in capsys.readouterr().err


def test_each_turn_holds_the_whole_history(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 640}')
    prompts: list[list[int]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.split("Content-Length: ")[1].split("\r")[0])
        prompts.append(json.loads(await reader.readexactly(size))["prompt"])
        event = {"id": f"cmpl-{len(prompts)}", "choices": [{"token_ids": [7, len(prompts)]}]}
        writer.write(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        await reader.read()
        writer.close()

    client = ran(answer, tmp_path, [Arrival(0.0, 4, 2)], Talk(3, 5, 0.0))
    assert [each.turn for each in client.answered] == [1, 2, 3] and client.num_failed == 0
    assert [each.rid for each in client.answered] == ["cmpl-1", "cmpl-2", "cmpl-3"]
    assert [len(prompt) for prompt in prompts] == [4, 4 + 2 + 5, 4 + 2 * (2 + 5)]
    assert prompts[1][:6] == [*prompts[0], 7, 1] and prompts[2][:13] == [*prompts[1], 7, 2]


def test_answers_are_looked_at_after_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client would blame the router for the time that it takes itself."""
    (tmp_path / "config.json").write_text('{"vocab_size": 4096, "max_position_embeddings": 64, "_planted": true}')
    events: list[str] = []
    monkeypatch.setattr(PlantedText, "continuation", lambda *_: events.append("checked") or [7])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        event = {"id": "cmpl-1", "choices": [{"token_ids": [7]}]}
        writer.write(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        events.append("answered")
        await reader.read()
        writer.close()

    client = ran(answer, tmp_path, [Arrival(0.0, 4, 1), Arrival(0.05, 4, 1)])
    assert events == ["answered", "answered", "checked", "checked"]
    assert (client.num_failed, client.num_wrong, client.num_checked, len(client.answered)) == (0, 0, 2, 2)
