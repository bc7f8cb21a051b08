"""The targets of hostile frames: every decoder, and every object behind a socket.

A target takes one input after the other and asserts after each that nothing has leaked. An exception is a crash.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, get_args

import msgspec
import zmq
from fuzz_frames import hostile_bytes, hostile_frame, hostile_frames, noise
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of
from samples import make_sample
from wire import Wire

from baton.engine.state.pages import Owner, PagePool
from baton.metadata.errors import ProtocolError, TransferError
from baton.metadata.handoff.descriptor_inbox import send_descriptors
from baton.metadata.handoff.memory import pack_pages
from baton.metadata.handoff.pages import page_checksums, row_checksum
from baton.metadata.handoff.schema.buffers import MetadataBuffers
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, row_bytes
from baton.metadata.handoff.served_links import MAX_LINKS
from baton.metadata.handoff.tickets import MAX_PARKED, TicketEnded
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire import data_link
from baton.metadata.wire import messages as m
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.node_info import DevicePools, Peer, PoolLayout
from baton.metadata.wire.request import Unit, pack_ids

DECODERS = {
    "to_router": (m.ToRouter, m.to_router_decoder),
    "to_node": (m.ToNode, m.to_node_decoder),
    "to_prefill": (data_link.ToPrefill, data_link.to_prefill_decoder),
    "to_decode": (data_link.ToDecode, data_link.to_decode_decoder),
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Target(ABC):
    """One receiver. `num_accepted` counts inputs that were accepted as messages."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.num_accepted = 0

    @abstractmethod
    def feed(self, rng: random.Random) -> None:
        """Feed one input."""

    def close(self) -> None:  # noqa: B027 - a decoder has nothing to give back
        """Assert that everything can be given back, and give it back."""


class DecoderTarget(Target):
    """A decoder: a frame is a message, which can be written and read again, or a ProtocolError."""

    def __init__(self, direction: str) -> None:
        super().__init__()
        self.name = f"decoder {direction}"  # type: ignore[misc]
        union, self.decoder = DECODERS[direction]
        self.kinds = get_args(union)

    def feed(self, rng: random.Random) -> None:
        frame = hostile_frame(rng, make_sample(rng.choice(self.kinds), rng))
        try:
            message = decode_frame(self.decoder, frame)
        except ProtocolError:
            return
        self.num_accepted += 1
        body = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.encode(self.decoder.decode(body)) == body


class RowTarget(Target):
    """A reader of metadata rows: a row names tokens of the vocabulary, or is refused."""

    name = "metadata row"

    def __init__(self) -> None:
        super().__init__()
        target = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
        self.schema = make_schema(target, target, 4, "standalone", draft_topk=3)

    def feed(self, rng: random.Random) -> None:
        buffers = MetadataBuffers(self.schema)
        buffers.set("first_token", [rng.choice([0, 99, 100, -1, 2**31 - 1])])
        row = bytearray(buffers.pack())
        for _ in range(rng.choice([0, 1, 4])):
            row[rng.randint(0, len(row) - 1)] = rng.choice([0, 1, 0x63, 0x7F, 0x80, 0xFF])
        if rng.random() < 0.05:
            row = bytearray(noise(rng))
        try:
            buffers.unpack(bytes(row))
            sampled = buffers.get_sampled(100)
        except ProtocolError:
            return
        self.num_accepted += 1
        ids = [sampled.first_token, *(sampled.logprobs.top_ids if sampled.logprobs else ())]
        ids += buffers.get("topk_index").tolist()
        assert all(0 <= token < 100 for token in ids), ids


class ServerTarget(Target):
    """A prefill node's end of the data links: two hostile decode nodes, and an honest one that must be served."""

    name = "handoff server"

    def __init__(self) -> None:
        super().__init__()
        wire: Any = Wire()
        self.wire, self.clock = wire, Clock()
        self.server, self.source = make_server(context=wire, clock=self.clock)
        self.pool = PagePool(32, 4, self.source[0].generations)
        self.client, self.target = make_client(context=wire, clock=self.clock, transports=("zmq",))
        self.pages: dict[Unit, list[int]] = {}
        self.hostile = [wire.dealer(self.server.address) for _ in range(2)]
        self.number = 0

    def feed(self, rng: random.Random) -> None:
        dealer = rng.choice(self.hostile)
        dealer.send_multipart(hostile_frames(rng, self._valid(rng, dealer.holder)))
        dealer.inbox.clear()
        self.clock.now += rng.choice([0.0, 0.001, 0.01, 0.1])
        before = self.server.dropped.count
        self._poll()
        self.num_accepted += self.server.dropped.count == before
        if rng.random() < 0.3:
            self._open(Unit("e", rng.randint(0, 3), 0), claimant=None)
        if rng.random() < 0.02:
            self._serve_honest(rng)
        self._check()

    def close(self) -> None:
        self._serve_honest(random.Random(0))
        for unit in list(self.server.tickets()):
            self.server.revoke(unit, False, "the end")
        for _ in range(20):
            self.clock.now += 0.1
            self._poll()
        assert not self.pages and not self.server.tickets()
        ledger = self.pool.ledger()
        assert ledger.ticket == ledger.request == 0, ledger
        for node in (self.client, self.server, *self.source, *self.target):
            node.close()

    def _valid(self, rng: random.Random, holder: bytes) -> Any:
        unit = Unit(rng.choice(["e", "e", f"h{self.number}"]), rng.randint(0, 3), 0)
        held = [each for each in self.pages if self._holder(each) == holder]
        if held and rng.random() < 0.7:
            unit = rng.choice(held)
        indices = pack_ids(rng.choice([[0], [1], [0, 1], [1, 0]]))
        hello = {name: getattr(self.client._links.hello, name) for name in data_link.LinkHello.__struct_fields__}
        epoch = rng.choice(["x" * 16, "y" * 16])
        makers = (
            lambda: data_link.LinkHello(**hello | {"node_id": "evil", "epoch": epoch, "transports": ("local", "zmq")}),
            lambda: data_link.Claim(unit=unit, num_cached_pages=rng.choice([0, 0, 1, 2])),
            lambda: data_link.Pull(unit=unit, indices=indices),
            lambda: data_link.Renew(units=(unit,) * rng.choice([0, 1, 50])),
            lambda: data_link.Ack(unit=unit),
            lambda: data_link.Drop(unit=unit, reason="x"),
            lambda: data_link.RevokeAck(unit=unit),
            lambda: make_sample(rng.choice(get_args(data_link.ToPrefill)), rng),
        )
        return rng.choices(makers, (2, 4, 6, 2, 1, 1, 1, 2))[0]()

    def _holder(self, unit: Unit) -> bytes | None:
        ticket = self.server._book.get(unit)
        return None if ticket is None else ticket.holder

    def _open(self, unit: Unit, claimant: str | None) -> None:
        if unit in self.pages or self.pool.num_free < 2:
            return
        self.pages[unit] = self.pool.allocate(2, Owner.TICKET)
        self.server.open(unit, 2, claimant)
        self.server.offer(unit, [0, 1], self.pages[unit], [self.pool.generation(page) for page in self.pages[unit]])
        self.server.finish(unit, make_row(SCHEMA))

    def _poll(self) -> list[Any]:
        events = self.server.poll()
        for ended in named(events, TicketEnded):
            self.pool.release(self.pages.pop(ended.unit))
        return events

    def _check(self) -> None:
        assert set(self.server.tickets()) == set(self.pages)
        assert all(self.pool.owner(page) == Owner.TICKET for pages in self.pages.values() for page in pages)
        self.pool.ledger()
        assert len(self.server._links.peers.by_link) <= MAX_LINKS + 1
        assert sum(map(len, self.server._book._parked.values())) <= MAX_PARKED
        assert all(dealer.router is not None for dealer in self.hostile)

    def _serve_honest(self, rng: random.Random) -> None:
        """Run a transfer from beginning to end, between messages of the hostile nodes."""
        self.number += 1
        unit = Unit(f"h{self.number}", 0, 0)
        while self.pool.num_free < 2:
            self.clock.now += 0.5
            self._poll()
        self._open(unit, claimant="d1" * 8)
        self.client.claim(unit, peer_of(self.server), 0, [3, 4])
        events: list[Any] = []
        for _ in range(12):
            dealer = rng.choice(self.hostile)
            kind = rng.choice([data_link.Ack, data_link.Drop, data_link.RevokeAck, data_link.Claim, data_link.Pull])
            fields = {
                data_link.Drop: {"reason": ""},
                data_link.Claim: {"num_cached_pages": 0},
                data_link.Pull: {"indices": pack_ids([0, 1])},
            }.get(kind, {})
            dealer.send(encode(kind(unit=unit, **fields)))
            dealer.inbox.clear()
            self._poll()
            events += self.client.poll()
        assert [type(event) for event in events] == [Arrived], events
        self._poll()
        assert unit not in self.pages


class ClientTarget(Target):
    """A decode node's end of a data link to a hostile prefill node. It writes only pages that were claimed."""

    name = "handoff client"
    has_gpu = False
    transports = ("local", "zmq")

    def __init__(self) -> None:
        super().__init__()
        wire: Any = Wire()
        self.wire, self.clock = wire, Clock()
        self.evil = wire.socket(zmq.ROUTER)
        self.evil.bind("tcp://127.0.0.1:*")
        common: dict[str, Any] = {"context": wire, "clock": self.clock, "has_gpu": self.has_gpu}
        names = self.transports if "nixl" in self.transports else ("cuda", "local", "zmq")
        self.server, self.source = make_server(**common, transports=names)  # whose memory it offers
        self.client, self.target = make_client(**common, transports=self.transports)
        self.guard = [pool.pages.copy() for pool in self.target]
        self.claims: dict[Unit, str] = {}
        self.number = 0

    def feed(self, rng: random.Random) -> None:
        if not self.claims or rng.random() < 0.02:
            self._claim(rng)
        for holder in list(self.evil.peers):
            self.evil.send_multipart([holder, *hostile_frames(rng, self._valid(rng))])
            if rng.random() < 0.2:
                data = self._pages(rng)
                self.evil.send_multipart([holder, *data])
        self.evil.inbox.clear()
        self.clock.now += rng.choice([0.0, 0.01, 0.3])
        before = self.client.dropped.count
        self._poll()
        self.num_accepted += self.client.dropped.count == before
        self._check()

    def close(self) -> None:
        for unit in list(self.claims):
            self.client.drop(unit, "the end")
            del self.claims[unit]
        self._poll()
        assert self.client.tickets() == []
        self.client.close()
        assert not self.client._links.by_epoch and not self.client._transfers
        for node in (self.server, *self.source, *self.target):
            node.close()

    def _claim(self, rng: random.Random) -> None:
        self.number += 1
        epoch = f"e{self.number // 50}"  # the node restarts now and then
        unit = Unit("u", self.number % 4, self.number // 4)
        if unit in self.claims:
            return
        self.claims[unit] = epoch
        peer = Peer(node_id="evil", epoch=epoch, data_address=self.evil.address)
        self.client.claim(unit, peer, 1, [40, 41, 42])  # several transfers may write them: only 41 and 42 may change

    def _valid(self, rng: random.Random) -> Any:
        unit = rng.choice(list(self.claims) or [Unit("u", 0, 0)])
        epoch = self.claims.get(unit, "e0")
        indices = rng.choice([[1], [2], [1, 2], [2, 1], [0]])
        sources = [rng.randint(1, 31) for _ in indices]
        row = rng.choice([None, None, make_row(SCHEMA), bytes(row_bytes(SCHEMA))])
        makers = (
            lambda: self._welcome(rng, epoch),
            lambda: data_link.Offer(
                unit=unit, num_pages=3, indices=pack_ids(indices), pages=pack_ids(sources),
                generations=b"".join(int(self.source[0].generations[page]).to_bytes(8, "little") for page in sources),
                checksums=self._checksums(sources),
                row=row, row_checksum=0 if row is None else row_checksum(row),
            ),
            lambda: data_link.Pages(unit=unit, indices=pack_ids(indices), generations=bytes(8 * len(indices))),
            lambda: data_link.Revoke(unit=unit, finished=rng.random() < 0.5, reason="x"),
            lambda: data_link.UnknownClaim(unit=unit),
            lambda: data_link.LinkRefused(reason="no"),
            lambda: make_sample(rng.choice(get_args(data_link.ToDecode)), rng),
        )  # fmt: skip
        return rng.choices(makers, (6, 8, 4, 1, 1, 0.3, 2))[0]()

    def _welcome(self, rng: random.Random, epoch: str) -> data_link.LinkWelcome:
        fd, size = self.server.end.memory[0].fd or 0, self.server.end.memory[0].size
        return data_link.LinkWelcome(
            node_id="evil", epoch=epoch, transport=rng.choice(self.transports), lease_s=1.0, num_pages=32,
            pid=rng.choice([os.getpid(), os.getpid(), 1, 2**40]),
            fds=(rng.choice([fd, 0, 1, 2, 7]),),
            sizes=(rng.choice([size, size, 0, 2**62]),),
        )  # fmt: skip

    def _checksums(self, sources: list[int]) -> bytes:
        return b"".join(page_checksums(self.source, page) for page in sources)

    def _pages(self, rng: random.Random) -> list[bytes]:
        """Return pages as if they had been asked for, now and then of a wrong size."""
        unit = rng.choice(list(self.claims) or [Unit("u", 0, 0)])
        indices = rng.choice([[1], [2], [1, 2]])
        frame = pack_pages(self.source, [rng.randint(1, 31) for _ in indices]).tobytes()
        frame = rng.choice([frame, frame, frame[:-1], frame * 2, b""])
        header = data_link.Pages(unit=unit, indices=pack_ids(indices), generations=bytes(8 * len(indices)))
        return [encode(header), frame]

    def _poll(self) -> None:
        for event in self.client.poll():
            assert event.unit in self.claims, event
            del self.claims[event.unit]
            if isinstance(event, Arrived):
                assert len(event.row) == row_bytes(SCHEMA) and event.num_bytes == 2 * page_bytes(SCHEMA)

    def _check(self) -> None:
        assert set(self.client.tickets()) == set(self.claims)
        assert len(self.client._links.by_epoch) <= 1
        for pool, guard in zip(self.target, self.guard, strict=True):
            assert (pool.pages[:, :41] == guard[:, :41]).all() and (pool.pages[:, 43:] == guard[:, 43:]).all()


class GpuClientTarget(ClientTarget):
    """A ClientTarget on a GPU, which maps the peer's pool if the peer's messages allow it."""

    name = "handoff client on a GPU"
    has_gpu = True
    transports = ("cuda", "local", "zmq")

    def _welcome(self, rng: random.Random, epoch: str) -> data_link.LinkWelcome:
        welcome = super()._welcome(rng, epoch)
        [known] = self.source[0].device.shared
        token, first = rng.randbytes(16), self.server.end.memory[0]
        if rng.random() < 0.5:  # one that can be
            send_descriptors(self.client._links.hello.inbox, token, [known.descriptor])
            changes: dict[str, Any] = {"pid": os.getpid(), "fds": (first.fd or 0,), "sizes": (first.size,)}
            fields = msgspec.structs.asdict(welcome) | changes | {"transport": "cuda"}
            return data_link.CudaWelcome(
                **fields, pools=DevicePools(device="GPU-evil", sizes=(known.size,), token=token)
            )
        if rng.random() < 0.3:
            return welcome
        sent = rng.choice(
            [[], [known.descriptor], [known.descriptor] * 2, [known.descriptor] * 3, [first.fd or 0], [0]]
        )
        with suppress(TransferError):  # a full inbox
            send_descriptors(self.client._links.hello.inbox, token, sent)
        fields = msgspec.structs.asdict(welcome) | {"transport": rng.choice(["cuda", "cuda", "cuda", "local"])}
        size = rng.choice([known.size, known.size, 0, 1, 2**62])
        pools = DevicePools(
            device="GPU-evil",
            sizes=(size,) * rng.choice([1, 1, 1, 2]),
            token=rng.choice([token, token, rng.randbytes(16)]),
        )
        return data_link.CudaWelcome(**fields | {"pools": pools, "num_pages": rng.choice([32, 32, 32, 2**31])})

    def _checksums(self, sources: list[int]) -> bytes:
        return b"".join(self.source[0].device.digest(sources))


class NixlClientTarget(ClientTarget):
    """A ClientTarget whose peer says welcomes for NIXL. Reads go to a real agent, of this process."""

    name = "handoff client by NIXL"
    transports = ("nixl", "zmq")

    def _welcome(self, rng: random.Random, epoch: str) -> m.LinkWelcome:
        welcome, pages, memory = super()._welcome(rng, epoch), self.server._pages, self.server.end.memory
        if rng.random() < 0.1:
            return welcome
        assert pages.agent is not None, "NIXL did not start"
        addresses = pages.readable.addresses
        fields = msgspec.structs.asdict(welcome) | {"transport": "nixl", "sizes": tuple(pool.size for pool in memory)}
        fields |= {"agent": pages.agent.name, "metadata": pages.agent.metadata}
        fields |= {"pools": addresses, "generations": pages.agent.generations}
        changes: list[dict[str, Any]] = [
            {},
            {"agent": rng.choice(["another", ""])},
            {"metadata": rng.choice([hostile_bytes(rng, pages.agent.metadata), noise(rng), b""])},
            {"pools": tuple(rng.choice([0, 4096, each - 64, each + 64, 2**62]) for each in addresses)},
            {"pools": rng.choice([(), addresses * 2])},
            {"generations": rng.choice([0, addresses[0] - 8, 2**62])},
            {"sizes": rng.choice([(), (0,), (2**62,)])},
            {"num_pages": rng.choice([0, 31, 33, 2**31])},
            {"kind": "VRAM", "gpu": rng.choice([0, 7])},
        ]
        return m.NixlWelcome(**fields | rng.choices(changes, [8, *[1] * (len(changes) - 1)])[0])
