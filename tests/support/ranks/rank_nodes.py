"""Nodes with several ranks in handoff tests: shards of pools, and the ranks of a node in this process or in others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from forked import fork_context
from handoff_nodes import FINGERPRINTS, PREFILL_EPOCH, make_memory, make_row, peer_of, unit

from baton.engine.ranks.handoff_line import HandoffLine, RankHandoff
from baton.engine.ranks.work_frames import HandoffOrder, decode, encode
from baton.metadata.errors import RankLost
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.nixl_agents import has_nixl
from baton.metadata.handoff.page_server import PageServer
from baton.metadata.handoff.ranks.puller import RankPuller
from baton.metadata.handoff.ranks.shards import ONE_SHARD
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.schema.schema import kv_layouts, make_schema, on_gpu
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

NUM_PAGES = 16
SEED = 3


def heads_schema(target: int, draft: int | None = None, *, checksums: bool = True) -> HandoffSchema:
    """Return a schema of pools with so many heads."""
    pool = PoolLayout(num_layers=3, num_kv_heads=target, head_dim=8, dtype="float32")
    if draft is None:
        return make_schema(pool, None, 4, checksums=checksums)
    other = PoolLayout(num_layers=1, num_kv_heads=draft, head_dim=16, dtype="bfloat16")
    return make_schema(pool, other, 4, "standalone", draft_topk=1, checksums=checksums)


def whole_pages(schema: HandoffSchema) -> list[np.ndarray]:
    """Return the bytes of the whole pages of a node's pools, as if it had one rank."""
    return [pool.pages for pool in make_memory(schema, NUM_PAGES, SEED)]


def part_of(schema: HandoffSchema, pages: Sequence[np.ndarray], shard: Shard) -> list[np.ndarray]:
    """Return the bytes of a rank, of the bytes of whole pages."""
    return [
        np.concatenate([whole[..., each.start : each.stop] for each in layout.bytes_of(shard)], axis=-1)
        for layout, whole in zip(kv_layouts(schema), pages, strict=True)
    ]


SERVED = ("cuda", "local", "zmq", *(["nixl"] if has_nixl() else []))  # by prefill nodes that are processes


def rank_end(schema: HandoffSchema, shard: Shard, role: str, *, has_gpu: bool = False, **more: Any) -> Endpoint:
    """Return a rank of a node: of a prefill node with the bytes of `whole_pages`, of a decode node with zeros."""
    memory = [PageMemory(layout.part_of(shard), NUM_PAGES) for layout in kv_layouts(schema)]
    pools = [pool.pages for pool in memory]
    if has_gpu:
        from fake_device import FakeDevice  # torch, which the processes of ranks do not load here

        more["device"] = FakeDevice(memory, has_checksums=schema.checksum != "none")
        pools = more["device"].pools
    if role == "prefill":
        for pool, pages in zip(pools, part_of(schema, whole_pages(schema), shard), strict=True):
            pool[:] = pages
    names = {"prefill": ("p0", PREFILL_EPOCH), "decode": ("d0", "d1" * 8)}[role]
    fields: dict[str, Any] = {"node_id": names[0], "epoch": names[1], "transports": ("cuda", "local", "zmq")} | more
    return Endpoint(
        schema=on_gpu(schema) if has_gpu else schema, fingerprints=FINGERPRINTS, memory=memory, shard=shard, **fields
    )


def pages_in(end: Endpoint) -> Sequence[np.ndarray]:
    """Return the pools that the rank computes with."""
    return [pool.pages for pool in end.memory] if end.device is None else end.device.pools


class LocalLine:
    """A line to ranks of this process. They do their orders when `poll` is called, in order."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.size = len(members) + 1
        self.members = members
        self.sent: list[tuple[int, HandoffOrder]] = []
        self._queues: list[list[bytes]] = [[] for _ in members]
        self._reports: list[tuple[int, bytes]] = []

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def send(self, rank: int, order: HandoffOrder) -> None:
        self.sent.append((rank, order))
        self._queues[rank - 1].append(encode(order))

    def receive(self) -> list[tuple[int, Any]]:
        reports, self._reports = self._reports, []
        return [(rank, decode(report)) for rank, report in reports]

    def descriptors(self) -> list[int]:
        return []

    def poll(self) -> list[Any]:
        for rank, (member, queue) in enumerate(zip(self.members, self._queues, strict=True), 1):
            while queue:
                member.do(decode(queue.pop(0)))
            self._reports += [(rank, encode(report)) for report in member.poll()]
        return []


class RankPair:
    """A prefill and a decode node with so many ranks, all in this process. `nodes` are polled in turn."""

    def __init__(
        self,
        schema: HandoffSchema,
        num_prefill: int,
        num_decode: int,
        *,
        has_gpu: bool = False,
        prefill: Sequence[str] = ("cuda", "local", "zmq"),
        decode: Sequence[str] = ("cuda", "local", "zmq"),
        lease_s: float = 30.0,
        answer_s: float = 5.0,
    ) -> None:
        self.schema, self.has_gpu = schema, has_gpu
        how: dict[str, Any] = {"has_gpu": has_gpu, "transports": tuple(prefill)}
        self.sources = [rank_end(schema, Shard(rank, num_prefill), "prefill", **how) for rank in range(num_prefill)]
        how["transports"] = tuple(decode)
        self.targets = [rank_end(schema, Shard(rank, num_decode), "decode", **how) for rank in range(num_decode)]
        counted = self.sources[0].memory[0].where
        self.page_servers = [PageServer(end, "127.0.0.1", counted) for end in self.sources[1:]]
        self.pullers = [RankPuller(end, answer_s=answer_s) for end in self.targets[1:]]
        self.serve_line = LocalLine(self.page_servers) if self.page_servers else None
        self.pull_line = LocalLine(self.pullers) if self.pullers else None
        addresses = [each.address for each in self.page_servers]
        self.server = HandoffServer(
            self.sources[0], "127.0.0.1", lease_s=lease_s, line=self.serve_line, rank_addresses=addresses
        )
        self.client = HandoffClient(self.targets[0], answer_s=answer_s, line=self.pull_line)
        lines = [line for line in (self.serve_line, self.pull_line) if line is not None]
        self.nodes: list[Any] = [self.server, self.client, *lines]

    def offer(self, pages: Sequence[int], row: bytes | None = None, **of: Any) -> None:
        """Open a ticket and offer its pages one by one, then the row."""
        self.server.open(unit(**of), len(pages))
        for index, page in enumerate(pages):
            self.server.offer(unit(**of), [index], [page], [7])
        self.server.finish(unit(**of), make_row(self.schema) if row is None else row)

    def claim(self, pages: Sequence[int], num_cached: int = 0, **of: Any) -> None:
        self.client.claim(unit(**of), peer_of(self.server), num_cached, pages)

    def has_arrived(self, targets: Sequence[int], sources: Sequence[int]) -> bool:
        """Return whether each decode rank has its heads of the pages, and its other pages are zeros."""
        return all(arrived(end, self.schema, targets, sources) for end in self.targets)

    def close(self) -> None:
        for each in (self.client, self.server, *self.pullers, *self.page_servers):
            each.close()
        for end in (*self.sources, *self.targets):
            for pool in end.memory:
                pool.close()


def arrived(end: Endpoint, schema: HandoffSchema, targets: Sequence[int], sources: Sequence[int]) -> bool:
    """Return whether a decode rank has its heads of the pages, and its other pages are zeros."""
    wanted = part_of(schema, whole_pages(schema), end.shard)
    for ours, theirs in zip(pages_in(end), wanted, strict=True):
        expected = np.zeros_like(ours)
        expected[:, list(targets)] = theirs[:, list(sources)]
        if not np.array_equal(ours, expected):
            return False
    return True


# --- ranks in processes of their own ---


class ProcessLine:
    """Rank 0's line to ranks that are processes, and the processes. `run(work, reports, rank, *args)` is a rank."""

    def __init__(self, size: int, run: Callable[..., None], *args: Any) -> None:
        context = fork_context()
        self.work: list[Connection] = []
        self.processes: list[Any] = []
        reports: list[Connection] = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            hears, says = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(theirs, says, rank, *args), daemon=True)
            process.start()
            theirs.close()
            says.close()
            self.work.append(ours)
            self.processes.append(process)
            reports.append(hears)
        self.line = HandoffLine(self._send, reports)

    def _send(self, rank: int, order: HandoffOrder) -> None:
        try:
            self.work[rank - 1].send_bytes(encode(order))
        except OSError:  # as RankProcesses.send
            raise RankLost(f"rank {rank} is gone") from None

    def close(self) -> None:
        for pipe in self.work:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.exitcode is None:
                process.kill()


def run_page_server(work: Connection, reports: Connection, rank: int, schema: HandoffSchema, size: int) -> None:
    """Run rank 1 or above of a prefill node. The first message is where rank 0 counts generations; the answer is the
    rank's address. The empty frame changes one byte of the rank's page 3."""
    end = rank_end(schema, Shard(rank, size), "prefill", transports=SERVED)
    member = PageServer(end, "127.0.0.1", work.recv())
    work.send(member.address)
    run_rank(work, RankHandoff(work, reports, member), lambda: spoil(end))


def spoil(end: Endpoint, pool: int = -1) -> None:
    """Change one byte of page 3 of a rank of a prefill node."""
    end.memory[pool].pages[-1, 3, -1] ^= 1


def run_puller(
    work: Connection, reports: Connection, rank: int, schema: HandoffSchema, size: int, transport: str, place: Any
) -> None:
    """Run rank 1 or above of a decode node. The empty frame asks whether its pages have arrived, at `place`."""
    end = rank_end(schema, Shard(rank, size), "decode", transports=(transport,))
    handoff = RankHandoff(work, reports, RankPuller(end))
    run_rank(work, handoff, lambda: arrived(end, schema, *place))


def run_rank(work: Connection, handoff: RankHandoff, ask: Callable[[], Any] = lambda: None) -> None:
    """Do orders until rank 0 is gone. The empty frame is answered by what `ask` returns."""
    while True:
        handoff.wait()
        try:
            frame = work.recv_bytes()
        except EOFError:
            return
        if frame:
            handoff.do(decode(frame))
        else:
            work.send(ask())


def run_prefill_node(
    pipe: Connection, schema: HandoffSchema, size: int, sources: Sequence[int], spoilt: int | None, is_endless: bool
) -> None:
    """Run rank 0 of a prefill node, which starts its other ranks.

    `spoilt`: a rank, of which one byte changes after its digest. `is_endless`: the last page is never offered. The
    process sends its address and the process ids of its ranks, then its events, until the pipe has a message.
    """
    ranks = ProcessLine(size, run_page_server, schema, size)
    shard = Shard(0, size) if size > 1 else ONE_SHARD
    end = rank_end(schema, shard, "prefill", transports=SERVED)
    for work in ranks.work:
        work.send(end.memory[0].where)
    addresses = [work.recv() for work in ranks.work]
    line = ranks.line.serving if size > 1 else None
    server = HandoffServer(end, "127.0.0.1", lease_s=30.0, line=line, rank_addresses=addresses)
    server.open(unit(), len(sources))
    offered = sources[: len(sources) - is_endless]
    server.offer(unit(), range(len(offered)), offered, [1] * len(offered))
    if not is_endless:
        server.finish(unit(), make_row(schema))
    if spoilt == 0:
        spoil(end)
    elif spoilt is not None:
        ranks.work[spoilt - 1].send_bytes(b"")
        ranks.work[spoilt - 1].recv()
    pipe.send((peer_of(server), [process.pid for process in ranks.processes]))
    while not pipe.poll():
        poller = zmq.Poller()
        for socket in (*server.sockets(), pipe.fileno()):
            poller.register(socket, zmq.POLLIN)
        wait_s = server.wait_s()
        poller.poll(100 if wait_s is None else min(100, 1000 * wait_s))
        for event in server.poll():
            pipe.send(tuple(event))
    server.close()
    ranks.close()


def until(client: HandoffClient, kinds: tuple[type, ...], timeout_s: float = 30.0) -> Any:
    """Poll the client as a node's loop does, and return the first event of these kinds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for event in client.poll():
            if isinstance(event, kinds):
                return event
        poller = zmq.Poller()
        for socket in client.sockets():
            poller.register(socket, zmq.POLLIN)
        wait_s = client.wait_s()
        poller.poll(100 if wait_s is None else min(100, 1000 * wait_s))
    raise AssertionError(f"none of {kinds} within {timeout_s} s")
