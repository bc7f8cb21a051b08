"""The open-loop client: when requests arrive, and what is made of their times."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from bench_load import Arrival, Client, Record, Slo, poisson, read_trace, record, summary, table


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    arrivals = poisson(50.0, 200.0, 1024, 256, seed=3)
    assert len(arrivals) == pytest.approx(10_000, rel=0.03)
    assert all(each[1:] == (1024, 256) for each in arrivals)
    gaps = [two.at_s - one.at_s for one, two in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)  # as of an exponential distribution
    assert poisson(50.0, 200.0, 1024, 256, seed=3) == arrivals != poisson(50.0, 200.0, 1024, 256, seed=4)


def test_a_trace_starts_at_zero_and_may_be_replayed_faster() -> None:
    entries = [{"timestamp": 3000, "input_length": 7, "output_length": 2}, {"timestamp": 1000, "input_length": 5}]
    entries[1]["output_length"] = 1
    lines = [json.dumps(entry | {"hash_ids": [1]}) for entry in entries]
    assert read_trace(lines) == [Arrival(0.0, 5, 1), Arrival(2.0, 7, 2)]
    assert read_trace(lines, speed=4.0) == [Arrival(0.0, 5, 1), Arrival(0.5, 7, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is '{'"),
        ("[1, 2]", "must be a JSON object"),
        ('{"timestamp": 1, "input_length": 3}', "output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', "asks for 0 \\+ 3 tokens"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_trace(['{"timestamp": 0, "input_length": 1, "output_length": 1}', line])


def test_times_of_an_answer() -> None:
    events = [(10.2, []), (10.5, [1]), (10.6, [2, 3]), (11.0, [4]), (11.1, [])]
    found = record(10.0, events)
    assert found.ttft_s == pytest.approx(0.5) and found.gap_s == pytest.approx(0.4)
    assert found.second_s == pytest.approx(0.1)
    assert found.tpot_s == pytest.approx(0.5 / 3)
    assert record(10.0, [(10.5, [1])]) == Record(0.5, 0.0, 0.0, 0.0)


def test_goodput_counts_requests_within_both_bounds() -> None:
    records = [
        Record(0.1, 0.010, 0.01, 0.02),
        Record(0.3, 0.010, 0.01, 0.02),
        Record(0.1, 0.020, 0.01, 0.05),
        Record(0.2, 0.012, 0.01, 0.01),
    ]
    row = summary(records, 2.0, [Slo(200, 12), Slo(1000, 15)])
    assert row["goodput_200_12"] == 1.0 and row["good_share_200_12"] == 0.5
    assert row["goodput_1000_15"] == 1.5 and row["requests"] == 4
    assert row["ttft_ms_p50"] == pytest.approx(150) and row["gap_ms_p99"] == pytest.approx(50, rel=0.03)
    lines = table([row | {"rate": 2.0, "failed": 0, "wrong": 0}]).splitlines()
    assert "goodput at 200 / 12 ms" in lines[0] and len({line.count("|") for line in lines}) == 1
    assert "150.0" in lines[2] and "| 1.00 | 1.50 |" in lines[2]


@pytest.mark.parametrize("status", ["503 Service Unavailable", "400 Bad Request"])
def test_a_refusal_is_a_failed_request_at_once(status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The connection stays open, as the router's does, so only the status says that no tokens will come."""
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 64}')

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 9\r\n\r\nno node..".encode())
        await reader.read()
        writer.close()

    async def run() -> Client:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            client = Client(server.sockets[0].getsockname()[1], "m", tmp_path, 0)
            await asyncio.wait_for(client.run([Arrival(0.0, 4, 2)]), 10)
            return client

    client = asyncio.run(run())
    assert (client.num_failed, client.records) == (1, [])
    assert f"the router refused: HTTP/1.1 {status}" in capsys.readouterr().err
