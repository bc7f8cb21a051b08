"""Compare pages between two processes by TCP: in the clear, under CURVE, encrypted by AES-GCM, and authenticated only;
with NIXL installed, also read by NIXL, over TCP if UCX_TLS=tcp is set.

    python tests/benchmarks/ranks/bench_privacy.py [--rounds 9] [--mib 64] [--json FILE] [--figures DIR]

A figure is the rate from `claim` to `Arrived`, as in bench_handoff.py: all pages are in the decode node's pool, and
checked if checksums are on. All cases of one round are measured one after the other. A figure is the median of the
rounds, a ratio the median of the ratios to the clear case within rounds. `CPU` is the processor time of all threads of
both processes: unlike a rate, it hardly depends on what else runs on the machine. In the first round, which is not
counted, every byte is compared.
"""

from __future__ import annotations

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
from bench_handoff import FINGERPRINTS, MODELS, PAGE_SIZE, make_memory, pull
from harness import flags, ratio, report

from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.nixl_agents import has_nixl
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, row_bytes
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Unit

LAYOUT = MODELS["8B-like"]


class Case(NamedTuple):
    what: str
    transport: str
    has_keys: bool
    has_checksums: bool


WAYS = [
    ("zmq without keys", "zmq", False),
    ("zmq under CURVE", "zmq", True),
    ("aes", "aes", True),
    ("plain", "plain", True),
    *([("nixl", "nixl", False)] if has_nixl() else []),
]
CASES = [Case(*way, has_checksums) for has_checksums in (True, False) for way in WAYS]


def make_endpoint(case: Case, role: str, memory: PageMemory, keys: KeyPair) -> Endpoint:
    name = f"{role}{CASES.index(case)}"
    return Endpoint(
        node_id=name,
        epoch=name,
        schema=make_schema(LAYOUT, None, PAGE_SIZE, checksums=case.has_checksums),
        fingerprints=FINGERPRINTS,
        memory=[memory],
        transports=(case.transport,),
        keys=keys if case.has_keys else None,
    )


def serve(pipe: Connection, num_pages: int, keys: KeyPair) -> None:
    """Run the prefill process: one server per case, over the same memory."""
    memory = make_memory(make_schema(LAYOUT, None, PAGE_SIZE), num_pages)
    servers = [HandoffServer(make_endpoint(case, "p", memory, keys), "127.0.0.1") for case in CASES]
    pipe.send([(server.end.node_id, server.end.epoch, server.address) for server in servers])
    while (order := pipe.recv()) is not None:
        number, unit, generation = order
        server = servers[number]
        server.open(unit, num_pages)
        server.offer(unit, range(num_pages), range(1, num_pages + 1), [generation] * num_pages)
        server.finish(unit, bytes(row_bytes(server.end.schema)))
        pipe.send(time.process_time())
        poller = zmq.Poller()
        for socket in server.sockets():
            poller.register(socket, zmq.POLLIN)
        while not any(isinstance(event, TicketEnded) for event in server.poll()):
            wait_s = server.wait_s()
            poller.poll(1000 if wait_s is None else int(wait_s * 1000))
        pipe.send(time.process_time())
    for server in servers:
        server.close()
    memory.close()


class Taken(NamedTuple):
    seconds: float
    cpu_s: float  # of both processes


def measure(mib: int, rounds: int) -> tuple[int, dict[Case, list[Taken]]]:
    """Return the bytes of a handoff, and what each round took by case."""
    schema = make_schema(LAYOUT, None, PAGE_SIZE)
    num_pages = (mib << 20) // page_bytes(schema)
    keys = KeyPair.generate()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, num_pages, keys), daemon=True)
    process.start()
    peers = [
        Peer(node_id=name, epoch=epoch, data_address=address, protocol=PROTOCOL_MAX)
        for name, epoch, address in pipe.recv()
    ]
    memory, expected = (make_memory(schema, num_pages) for _ in range(2))
    clients = [HandoffClient(make_endpoint(case, "d", memory, keys)) for case in CASES]
    found: dict[Case, list[Taken]] = {case: [] for case in CASES}
    for round_number in range(rounds + 1):
        for number, case in enumerate(CASES):
            unit = Unit(f"r{number}", 0, round_number)
            pipe.send((number, unit, len(CASES) * round_number + number))
            if round_number == 0:
                memory.pages[:] = 0
            cpu_s = -pipe.recv() - time.process_time()
            taken_s = pull(clients[number], peers[number], unit, num_pages)
            cpu_s += time.process_time() + pipe.recv()
            assert round_number or np.array_equal(memory.pages[:, 1:], expected.pages[:, 1:]), f"{case}: bytes differ"
            if round_number:
                found[case].append(Taken(taken_s, cpu_s))
    pipe.send(None)
    for client in clients:
        client.close()
    memory.close()
    expected.close()
    process.join(10)
    return num_pages * page_bytes(schema), found


def rows_of(num_bytes: int, found: dict[Case, list[Taken]]) -> Iterator[dict[str, Any]]:
    """Yield one row per way."""
    for what, transport, has_keys in WAYS:
        row: dict[str, Any] = {f"pages of {page_bytes(make_schema(LAYOUT, None, PAGE_SIZE)) >> 20} MiB": what}
        for has_checksums in (True, False):
            taken = found[Case(what, transport, has_keys, has_checksums)]
            clear = found[Case(*WAYS[0], has_checksums)]
            named = f"checksums {'on' if has_checksums else 'off'}"
            row[named] = round(num_bytes / statistics.median(each.seconds for each in taken) / 1e9, 2)
            of_clear = ratio([each.seconds for each in clear], [each.seconds for each in taken])
            row[f"{named}: ratio"] = round(of_clear, 2)
            row[f"{named}: CPU, s per GB"] = round(statistics.median(each.cpu_s for each in taken) * 1e9 / num_bytes, 2)
        yield row


def main() -> None:
    parser = flags(__doc__, rounds=9)
    parser.add_argument("--mib", type=int, default=64, help="size of one handoff")
    args = parser.parse_args()
    report(args, "page-privacy", rows_of(*measure(args.mib, args.rounds)), unit="GB/s")


if __name__ == "__main__":
    main()
