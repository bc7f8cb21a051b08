"""Cached pages of a node for other routers, in the format of vLLM's KV events.

    PUB     kv-events | number, 8 bytes big-endian | batch          of each batch, as it comes
    ROUTER  number, 8 bytes -> number | batch, ... , -1 | b""       batches again, from a number on, at the next port

A batch is MessagePack: [seconds since 1970, events, rank], with events as in the structs below (vLLM 0.9 and later,
`vllm/distributed/kv_events.py`). A hash of a block is the short name of a page (names.py) under a key of this node.
Other routers name blocks by the tokens, which are in the event. So whoever reads the events reads all prompts.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from array import array
from collections import deque
from typing import Any

import msgspec
import zmq

from ..bus.addresses import address_of_rank, parse_address
from ..bus.sockets import bound_address, configure_socket, receive_frames, send_frames
from ..errors import ConfigError
from .changes import CacheChanges, ChangeBatch, StoredPage, WatchedCache
from .names import KEY_BYTES, Place, short_names

logger = logging.getLogger(__name__)

TOPIC = b"kv-events"
INTERVAL_S = 0.1  # between two batches
BATCH_PAGES = 1024  # looked at for one batch
MAX_REPLAYED_BATCHES = 10_000  # that are kept
MAX_REPLAYED_BYTES = 64 << 20  # of these together
_END = (-1).to_bytes(8, "big", signed=True)
_MAX_REQUEST_BYTES = 64
_MEDIUM = "GPU"  # vLLM's name of the memory in which the engine computes, here also on a CPU
MEDIA: dict[Place, str] = {"pool": _MEDIUM, "host": "CPU", "file": "DISK"}  # vLLM has no name of files


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Pages that follow each other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = _MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None  # by block: the salt of a first page


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Pages that the cache has lost."""

    block_hashes: list[int]
    medium: str | None = _MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The cache has no other pages than those stored from now on."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events since the batch before, in order."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int


class KvEvents:
    """Publishes the changes of one cache at `address`, and serves batches again at the next port. Ranks of a group take
    the ports behind.

    Used by the node's main thread. Raises ConfigError if an address is malformed or taken."""

    def __init__(self, address: str, cache: WatchedCache, rank: int = 0) -> None:
        self._page_size = cache.page_size
        self._num_key_bytes = 4 * (cache.page_size + cache.lookahead)
        self._rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, address_of_rank(address, 2 * rank))
            self._replay = self._bind(zmq.ROUTER, address_of_rank(address, 2 * rank + 1))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._changes = CacheChanges(cache, secrets.token_bytes(KEY_BYTES), has_places=True)
        self._kept: deque[tuple[bytes, bytes]] = deque()  # number and batch
        self._num_kept_bytes = 0
        self._number = 0
        self._due_at = 0.0
        self.address, self.replay_address = bound_address(self._pub), bound_address(self._replay)
        logger.info("KV events at %s, again at %s", self.address, self.replay_address)
        if not parse_address(address).is_loopback:
            logger.warning(
                "KV events hold the tokens of all prompts, and anyone who reaches %s reads them", self.address
            )

    def tell(self, now: float) -> None:
        """Publish what has changed and serve requests, if that is due. `now`: monotonic seconds. To be called between
        steps."""
        if now < self._due_at:
            return
        self._due_at = now + INTERVAL_S
        if self._changes.are_due and (events := self._events(self._changes.read(BATCH_PAGES))):
            self._publish(msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank)))
        with contextlib.suppress(zmq.Again):
            self._serve_again(receive_frames(self._replay, 3))

    def close(self) -> None:
        """Close the sockets."""
        self._changes.close()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        configure_socket(socket, address, max_frame=_MAX_REQUEST_BYTES)
        socket.sndhwm = MAX_REPLAYED_BATCHES + 1
        try:
            socket.bind(str(parse_address(address)))
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}; give another --kv-events") from error
        return socket

    def _publish(self, batch: bytes) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        send_frames(self._pub, TOPIC, number, batch)
        self._kept.append((number, batch))
        self._num_kept_bytes += len(batch)
        while len(self._kept) > MAX_REPLAYED_BATCHES or self._num_kept_bytes > MAX_REPLAYED_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _serve_again(self, frames: list[Any]) -> None:
        """Answer a peer that asks for batches from a number on. It has a DEALER socket: REQ takes one answer alone."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("dropped a request for KV events that is no number of 8 bytes")
            return
        peer = frames[0]
        with contextlib.suppress(zmq.ZMQError):  # it has gone, or does not read
            for number, batch in self._kept:
                if number >= frames[2]:
                    send_frames(self._replay, peer, b"", number, batch)
            send_frames(self._replay, peer, b"", _END, b"")

    def _events(self, batch: ChangeBatch) -> list[Event]:
        events: list[Event] = [AllBlocksCleared()] if batch.begins else []
        for place, medium in MEDIA.items():
            left = b"".join(name for each, name in batch.left if each == place)
            if left:
                events.append(BlockRemoved(short_names(left).tolist(), medium))
            run: list[StoredPage] = []
            come = [page for each, page in batch.arrived if each == place]
            for page in come if place == "pool" else reversed(come):  # a text leaves the pool from its end
                if run and page.parent != run[-1].name:
                    events.append(self._stored(run, medium))
                    run = []
                run.append(page)
            if run:
                events.append(self._stored(run, medium))
        return events

    def _stored(self, run: list[StoredPage], medium: str) -> BlockStored:
        """Return the event of pages that follow each other."""
        first = run[0]
        salt = first.key[: -self._num_key_bytes].decode() if first.parent is None else ""
        token_ids = array("i")
        for page in run:
            token_ids.frombytes(page.key[-self._num_key_bytes :][: 4 * self._page_size])
        return BlockStored(
            short_names(b"".join(page.name for page in run)).tolist(),
            None if first.parent is None else short_names(first.parent)[0],
            token_ids.tolist(),
            self._page_size,
            medium=medium,
            extra_keys=[(salt,), *[None] * (len(run) - 1)] if salt else None,
        )
