"""Parts of the two nodes in handoff tests: a schema, pools of random bytes, and a prefill node in its own process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import zmq
from patience import Patience

from baton.metadata.handoff.client import ANSWER_S, HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.loans import LendingCache
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import LentPages
from baton.metadata.handoff.schema.schema import are_tails, kv_layouts, make_schema, on_gpu, row_bytes
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.transfer import TransferFailed
from baton.metadata.wire.data_link import CudaWelcome, LinkWelcome
from baton.metadata.wire.node_info import HandoffSchema, Peer, PoolLayout
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Unit

TARGET = PoolLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32")
DRAFT = PoolLayout(num_layers=1, num_kv_heads=4, head_dim=16, dtype="bfloat16")
SCHEMA = make_schema(TARGET, None, 4)
DRAFT_SCHEMA = make_schema(TARGET, DRAFT, 4, "standalone", draft_topk=1)
FINGERPRINTS = ("f" * 16, None)
PREFILL_EPOCH = "e0" * 8

W = TypeVar("W", bound=LinkWelcome | CudaWelcome)


class LateCache:
    """A lending cache that is made after the server, in whose memory it counts."""

    real: LendingCache

    @property
    def available(self) -> int:
        return self.real.available

    @property
    def is_settled(self) -> bool:
        return self.real.is_settled

    def lend(self, token_ids: Sequence[int], salt: str, limit_pages: int, num_tails: int) -> LentPages:
        return self.real.lend(token_ids, salt, limit_pages, num_tails)


def unit(rid: str = "r", choice: int = 0, attempt: int = 0) -> Unit:
    return Unit(rid, choice, attempt)


def make_memory(schema: HandoffSchema, num_pages: int, seed: int | None = None) -> list[PageMemory]:
    """Return one pool per layout of the schema, with random bytes if there is a seed, otherwise with zeros. Each has
    `num_pages`, also one of tail pages."""
    rng = np.random.default_rng(seed)
    memory: list[PageMemory] = []
    num_counted = num_pages * (2 if any(are_tails(schema)) else 1)
    for layout, is_tail in zip(kv_layouts(schema), are_tails(schema), strict=True):
        pool = PageMemory(layout, num_pages, num_pages if is_tail else 0, num_counted=num_counted)
        if seed is not None:
            pool.pages[:] = rng.integers(0, 256, pool.pages.shape, np.uint8)
        memory.append(pool)
    return memory


def make_server(
    schema: HandoffSchema = SCHEMA,
    num_pages: int = 32,
    seed: int = 1,
    epoch: str = PREFILL_EPOCH,
    has_gpu: bool = False,
    bind_host: str = "127.0.0.1",
    lease_s: float = 1.0,
    cache: LendingCache | None = None,
    **more: Any,
) -> tuple[HandoffServer, list[Any]]:
    """Return the node and its pools. `has_gpu`: the pools are on a FakeDevice. `cache`: its pages are lent."""
    defaults = {"node_id": "p0", "epoch": epoch, "transports": ("cuda", "local", "zmq")}
    end, pools = _make_endpoint(schema, num_pages, seed, has_gpu, defaults | more)
    return HandoffServer(end, bind_host, lease_s=lease_s, cache=cache), pools


def make_client(
    schema: HandoffSchema = SCHEMA,
    num_pages: int = 48,
    has_gpu: bool = False,
    answer_s: float = ANSWER_S,
    **more: Any,
) -> tuple[HandoffClient, list[Any]]:
    defaults = {"node_id": "d0", "epoch": "d1" * 8, "transports": ("local", "zmq")}
    end, pools = _make_endpoint(schema, num_pages, None, has_gpu, defaults | more)
    return HandoffClient(end, answer_s=answer_s), pools


def _make_endpoint(
    schema: HandoffSchema, num_pages: int, seed: int | None, has_gpu: bool, more: dict[str, Any]
) -> tuple[Endpoint, list[Any]]:
    more = {"fingerprints": FINGERPRINTS} | more
    if not has_gpu:
        memory = make_memory(schema, num_pages, seed)
        return Endpoint(schema=schema, memory=memory, **more), memory
    from fake_device import FakeDevice

    memory = make_memory(schema, num_pages)
    device = FakeDevice(memory, has_checksums=schema.checksum != "none", seed=seed)
    return Endpoint(schema=on_gpu(schema), memory=memory, device=device, **more), device.views


def peer_of(server: HandoffServer) -> Peer:
    return Peer(node_id=server.end.node_id, epoch=server.end.epoch, data_address=server.address, protocol=PROTOCOL_MAX)


def make_welcome(kind: Callable[..., W], memory: Sequence[PageMemory], transport: str, **more: Any) -> W:
    """Return a prefill node's welcome of this kind, which offers these pools of this process."""
    fds, sizes = (tuple(getattr(pool, name) for pool in memory) for name in ("fd", "size"))
    fields = {"node_id": "p", "epoch": "e", "transport": transport, "lease_s": 1.0, "num_pages": 16}
    return kind(**{**fields, "pid": os.getpid(), "fds": fds, "sizes": sizes, **more})


def make_row(schema: HandoffSchema, seed: int = 7) -> bytes:
    return np.random.default_rng(seed).bytes(row_bytes(schema))


def spin(nodes: Iterable[Any], until: Callable[[list[Any]], Any], timeout_s: float = 20.0) -> list[Any]:
    """Poll the nodes in turn until `until(events so far)` is true. Return the events in order."""
    nodes, events = list(nodes), []
    patience = Patience(timeout_s)
    while True:
        for node in nodes:
            events += node.poll()
        if until(events):
            return events
        assert not patience.is_over(), f"nothing more within {timeout_s} s than {events}"
        time.sleep(0.0005)


def named(events: Iterable[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def check_refused(
    prefill: tuple[HandoffServer, list[Any]], decode: tuple[HandoffClient, list[Any]], words: str
) -> None:
    """Check that a claim is refused with `words` within a second. The nodes and their pools are closed."""
    (server, source), (client, target) = prefill, decode
    try:
        server.open(unit(), 1)
        client.claim(unit(), peer_of(server), 0, [3])
        events = spin([server, client], lambda events: named(events, TransferFailed), timeout_s=1.0)
        failed = named(events, TransferFailed)[0]
        assert failed.is_refused and words in failed.reason, failed
    finally:
        for each in (*source, *target, server, client):
            each.close()


def pages_of(memory: list[PageMemory], numbers: Iterable[int]) -> list[np.ndarray]:
    """Return copies of the pages, [num_layers, len(numbers), page_layer_bytes] per pool."""
    return [pool.pages[:, list(numbers)].copy() for pool in memory]


def same_pages(here: list[PageMemory], ours: Iterable[int], there: list[PageMemory], theirs: Iterable[int]) -> bool:
    pairs = zip(pages_of(here, ours), pages_of(there, theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def run_prefill(
    pipe: Connection,
    schema: HandoffSchema,
    seed: int,
    pages: list[int],
    pause_s: float,
    is_endless: bool,
    epoch: str,
    transports: tuple[str, ...] = ("local", "zmq"),
) -> None:
    """Run a prefill process: one ticket, whose pages are offered one by one, every `pause_s`, like chunks.

    `is_endless`: the last page is never offered. The process sends its address and then its events. Any message from
    the pipe ends it.
    """
    threading.current_thread().name = "prefill"
    server, _ = make_server(schema, 4096 // 4, seed, epoch, node_id=f"p{os.getpid()}", transports=transports)
    ticket = unit()
    server.open(ticket, len(pages))
    pipe.send((server.end.node_id, server.address))
    at, next_offer = 0, time.monotonic()
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    while not pipe.poll():
        poller.poll(5)
        for event in server.poll():
            pipe.send(tuple(event))
        if at < len(pages) - is_endless and time.monotonic() >= next_offer:
            server.offer(ticket, [at], [pages[at]], [at + 1])
            at, next_offer = at + 1, time.monotonic() + pause_s
            if at == len(pages):
                server.finish(ticket, make_row(schema))
    server.close()
