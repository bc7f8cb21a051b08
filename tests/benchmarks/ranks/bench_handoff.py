"""Compare the handoff between two processes on one host with a plain memcpy of the same bytes.

    python tests/benchmarks/ranks/bench_handoff.py [--rounds 9] [--mib 64] [--json FILE]
    python tests/benchmarks/ranks/bench_handoff.py --device cuda [--devices 0 1] [--page-size 16]
        [--transports local zmq]

A figure is the time from `claim` to `Arrived`: all pages are in decode's pool, checked if digests are on, and the row
has arrived. The ticket was complete before the claim. The time that prefill takes to compute digests is its own row.
All cases of one round are measured one after the other, so that a disturbance hits all of them. A figure is the median
of the rounds, a ratio the median of the ratios within rounds. In the first round, which is not counted, every byte is
compared.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from harness import flags, heading, ratio, report, tables

from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.schema.schema import kv_layouts, make_schema, page_bytes, row_bytes
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.node_info import HandoffSchema, Peer, PoolLayout
from baton.metadata.wire.request import Unit

MODELS = {
    "demo": PoolLayout(num_layers=8, num_kv_heads=4, head_dim=32, dtype="float32"),
    "8B-like": PoolLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
}
PAGE_SIZE = 16
FINGERPRINTS = ("bench", None)


class Cell(NamedTuple):
    transport: str
    has_digest: bool

    def __str__(self) -> str:
        return f"{self.transport}, digest {'on' if self.has_digest else 'off'}"


CELLS = [Cell(transport, has_digest) for transport in ("local", "zmq") for has_digest in (True, False)]


def make_memory(schema: HandoffSchema, num_pages: int) -> PageMemory:
    [layout] = kv_layouts(schema)
    memory = PageMemory(layout, num_pages + 1)
    memory.pages[:] = np.random.default_rng(0).integers(0, 256, memory.pages.shape[2], np.uint8)
    return memory


def make_endpoint(node_id: str, epoch: str, schema: HandoffSchema, memory: PageMemory, *transports: str) -> Endpoint:
    return Endpoint(
        node_id=node_id,
        epoch=epoch,
        schema=schema,
        fingerprints=FINGERPRINTS,
        memory=[memory],
        transports=transports,
    )


def serve(pipe: Connection, model: str, num_pages: int) -> None:
    """Run the prefill process: one server with digests and one without, over the same memory."""
    schemas = {has_digest: make_schema(MODELS[model], None, PAGE_SIZE, checksums=has_digest) for has_digest in (1, 0)}
    memory = make_memory(schemas[1], num_pages)
    servers = {
        bool(has_digest): HandoffServer(
            make_endpoint(f"p{has_digest}", f"e{has_digest}", schema, memory, "local", "zmq"), "127.0.0.1"
        )
        for has_digest, schema in schemas.items()
    }
    ends = {key: (server.end, server.address) for key, server in servers.items()}
    pipe.send({key: Peer(node_id=end.node_id, epoch=end.epoch, data_address=at) for key, (end, at) in ends.items()})
    pages = list(range(1, num_pages + 1))
    while (order := pipe.recv()) is not None:
        has_digest, unit, generation = order
        server = servers[has_digest]
        server.open(unit, num_pages)
        start = time.perf_counter()
        server.offer(unit, range(num_pages), pages, [generation] * num_pages)
        server.finish(unit, bytes(row_bytes(schemas[1])))
        pipe.send(time.perf_counter() - start)
        poller = zmq.Poller()
        poller.register(server.socket, zmq.POLLIN)
        while not any(isinstance(event, TicketEnded) for event in server.poll()):
            poller.poll(1000)
    for server in servers.values():
        server.close()
    memory.close()


def pull(client: HandoffClient, peer: Peer, unit: Unit, num_pages: int) -> float:
    """Return the seconds from claim to arrival."""
    start = time.perf_counter()
    client.claim(unit, peer, 0, range(1, num_pages + 1))
    while True:
        poller = zmq.Poller()
        for socket in client.sockets():
            poller.register(socket, zmq.POLLIN)
        for event in client.poll():
            assert isinstance(event, Arrived), event
            return time.perf_counter() - start
        wait_s = client.wait_s()
        poller.poll(None if wait_s is None else int(wait_s * 1000))


def memcpy(target: np.ndarray, source: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def measure(model: str, mib: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of every round, by case. The first round warms up, compares bytes, and is not counted."""
    schema = make_schema(MODELS[model], None, PAGE_SIZE)
    num_pages = (mib << 20) // page_bytes(schema)
    num_bytes = num_pages * page_bytes(schema)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model, num_pages), daemon=True)
    process.start()
    peers: dict[bool, Peer] = pipe.recv()
    memory, expected = (make_memory(schema, num_pages) for _ in range(2))
    clients = {
        cell: HandoffClient(
            make_endpoint("d", f"d{cell}", make_schema(MODELS[model], None, PAGE_SIZE, checksums=cell.has_digest),
                          memory, cell.transport)
        )
        for cell in CELLS
    }  # fmt: skip
    source, target = (np.full(num_bytes, value, np.uint8) for value in (1, 2))
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        taken = {"memcpy": memcpy(target, source)}
        for cell in CELLS:
            unit = Unit(f"{cell}", 0, number)
            pipe.send(
                (cell.has_digest, unit, len(CELLS) * number + CELLS.index(cell))
            )  # a fresh generation: digested anew
            offer_s = pipe.recv()
            if cell == CELLS[0]:
                taken["prefill digests"] = offer_s
            if number == 0:
                memory.pages[:] = 0
            taken[str(cell)] = pull(clients[cell], peers[cell.has_digest], unit, num_pages)
            assert number or np.array_equal(memory.pages[:, 1:], expected.pages[:, 1:]), f"{cell}: bytes differ"
        if number:
            for name, value in taken.items():
                seconds.setdefault(name, []).append(value)
    pipe.send(None)
    for client in clients.values():
        client.close()
    memory.close()
    expected.close()
    process.join(10)
    about = {"model": model, "page_bytes": page_bytes(schema), "num_pages": num_pages, "bytes": num_bytes}
    return about | {"checked_bytes": len(CELLS) * num_bytes, "seconds": seconds}


def rows_of(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model."""
    num_bytes, memcpys = result["bytes"], result["seconds"]["memcpy"]
    for name, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        row = {"pages": f"{result['model']}, {result['page_bytes'] >> 10} KiB", "transport": name}
        row |= {"GB/s": num_bytes / median / 1e9, "ms per MB": median * 1e9 / num_bytes}
        rates = {"least GB/s": num_bytes / max(seconds) / 1e9, "most GB/s": num_bytes / min(seconds) / 1e9}
        yield row | {"of memcpy": ratio(memcpys, seconds)} | rates


def main() -> None:
    parser = flags(__doc__, rounds=9)
    parser.add_argument("--mib", type=int, default=64, help="size of one handoff")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="GPUs of prefill and decode")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page, on GPUs")
    parser.add_argument("--transports", nargs="+", default=["cuda"], help="on GPUs")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 32768], help="tokens, on GPUs")
    args = parser.parse_args()
    if args.device == "cuda":
        import handoff_cuda

        devices = [f"cuda:{number}" for number in args.devices]
        found = heading(args.commit) | handoff_cuda.measure(
            devices, tuple(args.transports), args.rounds, args.page_size, tuple(args.lengths)
        )
        print(tables({"handoff": found}))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        return
    results = [measure(model, args.mib, args.rounds) for model in MODELS]
    about = {"checked_bytes": sum(result["checked_bytes"] for result in results)}
    report(args, "handoff", (row for each in results for row in rows_of(each)), unit="GB/s", about=about)


if __name__ == "__main__":
    main()
