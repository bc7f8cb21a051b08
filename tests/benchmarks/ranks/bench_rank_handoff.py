"""Measure the handoff between nodes with unlike numbers of ranks, each rank a process, on one host.

    python tests/benchmarks/ranks/bench_rank_handoff.py [--ranks 1:1 1:2 2:1 2:2] [--transports local zmq] [--mib 64]
    python tests/benchmarks/ranks/bench_rank_handoff.py --device cuda --devices 0 1 --transports cuda

A figure is the time from `claim` to `Arrived` on rank 0 of the decode node: every rank has its heads of all pages, and
has checked them. All cases of one round are measured one after the other. In the first round, which is not counted,
every rank compares every byte. Rank i of either node is on the GPU devices[i % len(devices)].
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_handoff import FINGERPRINTS, MODELS
from harness import alternate, flags, report
from rank_nodes import ProcessLine, run_rank

from baton.engine.ranks.handoff_line import RankHandoff
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.page_server import PageServer
from baton.metadata.handoff.ranks.puller import RankPuller
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.schema.schema import kv_layouts, make_schema, on_gpu, page_bytes, row_bytes
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Unit


class Case(NamedTuple):
    """One pair of nodes."""

    model: str
    num_prefill: int
    num_decode: int
    transport: str
    num_pages: int
    page_size: int
    devices: tuple[str, ...]  # of the ranks; empty: host memory

    def __str__(self) -> str:
        return f"{self.num_prefill} -> {self.num_decode}, {self.transport}"


class Rank:
    """A rank of a node: its pool, and the bytes that each of its pages has in the prefill node."""

    def __init__(self, case: Case, shard: Shard, role: str) -> None:
        schema = make_schema(MODELS[case.model], None, case.page_size)
        [whole] = kv_layouts(schema)
        bytes_of_page = np.random.default_rng(0).integers(0, 256, whole.page_layer_bytes, np.uint8)
        self.page = np.concatenate([bytes_of_page[part.start : part.stop] for part in whole.bytes_of(shard)])
        memory = PageMemory(whole.part_of(shard), case.num_pages + 1)
        self.pages: Any = memory.pages
        more: dict[str, Any] = {}
        if case.devices:
            from baton.engine.state.cuda_memory import shareable_zeros
            from baton.engine.state.cuda_pool import CudaPool

            device = torch.device(case.devices[shard.rank % len(case.devices)])
            torch.cuda.set_device(device)
            self.pages = shareable_zeros(memory.pages.shape, torch.uint8, device)
            self.page = torch.from_numpy(self.page).to(device)
            more["device"] = CudaPool([self.pages], [memory], has_checksums=True)
        if role == "prefill":
            self.pages[:] = self.page
        if case.devices:
            torch.cuda.synchronize()
        self.end = Endpoint(
            node_id=role,
            epoch=f"{role[0]}{case.num_prefill}{case.num_decode}{case.transport}",
            schema=on_gpu(schema) if case.devices else schema,
            fingerprints=FINGERPRINTS,
            memory=[memory],
            transports=(case.transport,),
            shard=shard,
            **more,
        )

    def is_right(self) -> bool:
        """Return whether all pages but the padding have their bytes. Then set them to zeros."""
        found = bool((self.pages[:, 1:] == self.page).all())
        self.pages[:] = 0
        return found


def run_page_server(work: Connection, reports: Connection, rank: int, case: Case) -> None:
    """Run rank 1 or above of the prefill node."""
    member = PageServer(Rank(case, Shard(rank, case.num_prefill), "prefill").end, "127.0.0.1", work.recv())
    work.send(member.address)
    run_rank(work, RankHandoff(work, reports, member))


def run_puller(work: Connection, reports: Connection, rank: int, case: Case) -> None:
    """Run rank 1 or above of the decode node. The empty frame asks whether its pages are right."""
    own = Rank(case, Shard(rank, case.num_decode), "decode")
    run_rank(work, RankHandoff(work, reports, RankPuller(own.end)), own.is_right)


def serve(pipe: Connection, case: Case) -> None:
    """Run rank 0 of the prefill node, which starts the others. A handoff begins when all ranks have digested it."""
    ranks = ProcessLine(case.num_prefill, run_page_server, case)
    end = Rank(case, Shard(0, case.num_prefill), "prefill").end
    for work in ranks.work:
        work.send(end.memory[0].where)
    addresses = [work.recv() for work in ranks.work]
    line = ranks.line.serving if ranks.work else None
    server = HandoffServer(end, "127.0.0.1", line=line, rank_addresses=addresses, lease_s=30.0)
    pipe.send(Peer(node_id=end.node_id, epoch=end.epoch, data_address=server.address, protocol=PROTOCOL_MAX))
    pages = list(range(1, case.num_pages + 1))
    while (number := pipe.recv()) is not None:
        unit = Unit("r", 0, number)
        server.open(unit, len(pages))
        server.offer(unit, range(len(pages)), pages, [number + 1] * len(pages), bytes(row_bytes(end.schema)))
        while len(server._book.get(unit).checksums) < len(pages):  # type: ignore[union-attr]
            _wait(server.sockets(), 1.0)
            server.poll()
        pipe.send("offered")
        while not any(isinstance(event, TicketEnded) for event in server.poll()):
            _wait(server.sockets(), 1.0 if server.wait_s() is None else min(1.0, server.wait_s() or 0.0))
    server.close()
    ranks.close()


def _wait(sockets: Sequence[Any], wait_s: float) -> None:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(int(1000 * wait_s))


class Pair:
    """Both nodes of a case. Rank 0 of the decode node is this process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, case))
        self.process.start()
        self.ranks = ProcessLine(case.num_decode, run_puller, case)
        self.own = Rank(case, Shard(0, case.num_decode), "decode")
        self.client = HandoffClient(self.own.end, line=self.ranks.line.pulling if self.ranks.work else None)
        self.peer = self.pipe.recv()

    def pull(self, number: int) -> float:
        """Return the seconds from claim to arrival."""
        self.pipe.send(number)
        assert self.pipe.recv() == "offered"
        start = time.perf_counter()
        self.client.claim(Unit("r", 0, number), self.peer, 0, range(1, self.case.num_pages + 1))
        while True:
            for event in self.client.poll():
                assert isinstance(event, Arrived), event
                return time.perf_counter() - start
            wait_s = self.client.wait_s()
            _wait(self.client.sockets(), 1.0 if wait_s is None else min(1.0, wait_s))

    def check(self) -> None:
        """Raise AssertionError if a rank has a wrong byte."""
        for work in self.ranks.work:
            work.send_bytes(b"")
        assert all([self.own.is_right(), *(work.recv() for work in self.ranks.work)]), f"{self.case}: bytes differ"

    def close(self) -> None:
        self.client.close()
        self.pipe.send(None)
        self.ranks.close()
        self.process.join(20)


def measure(cases: Sequence[Case], rounds: int) -> dict[str, list[float]]:
    """Return the GB/s of every round, by case. The first round warms up, compares bytes, and is not counted."""
    pairs = {str(case): Pair(case) for case in cases}

    def pulled(pair: Pair) -> Callable[[int], float]:
        def speed(number: int) -> float:
            seconds = pair.pull(number)
            if number == 0:
                pair.check()
            return pair.case.num_pages * page_bytes(pair.own.end.schema) / seconds / 1e9

        return speed

    speeds = alternate({name: pulled(pair) for name, pair in pairs.items()}, rounds)
    for pair in pairs.values():
        pair.close()
    return speeds


def main() -> None:
    parser = flags(__doc__, rounds=9)
    parser.add_argument("--ranks", nargs="+", default=["1:1", "1:2", "2:1", "2:2"], metavar="PREFILL:DECODE")
    parser.add_argument("--transports", nargs="+", default=["local", "zmq"])
    parser.add_argument("--model", choices=MODELS, default="8B-like")
    parser.add_argument("--mib", type=int, default=64, help="size of one handoff")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="GPUs of the ranks, in turns")
    args = parser.parse_args()
    devices = tuple(f"cuda:{number}" for number in args.devices) if args.device == "cuda" else ()
    schema = make_schema(MODELS[args.model], None, args.page_size)
    num_pages = (args.mib << 20) // page_bytes(schema)
    sizes = [tuple(map(int, ranks.split(":"))) for ranks in args.ranks]
    cases = [
        Case(args.model, prefill, decode, transport, num_pages, args.page_size, devices)
        for transport in args.transports
        for prefill, decode in sizes
    ]
    speeds = measure(cases, args.rounds)
    print(f"{args.model}: {num_pages} pages, {num_pages * page_bytes(schema) >> 20} MiB, every byte compared")
    rows = [
        {"ranks, transport": name, "median": statistics.median(found), "least": min(found), "most": max(found)}
        for name, found in speeds.items()
    ]
    report(args, "rank-handoff", rows, unit="GB/s", about={"model": args.model, "gb_s": speeds})


if __name__ == "__main__":
    main()
