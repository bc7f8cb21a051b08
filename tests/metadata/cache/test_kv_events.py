"""KV events are read by a consumer of vLLM's format, which knows nothing of Baton.

The structs here are that format as vLLM publishes it for consumers (docs.vllm.ai, examples/features/kv_events), with
its field names, order and types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from patience import wait_until
from tiered_node import PAGE as TIER_PAGE
from tiered_node import Node

from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.cache import kv_events
from baton.metadata.cache.kv_events import INTERVAL_S, MEDIA, KvEvents
from baton.metadata.errors import ConfigError

from .test_changes import PAGE, store


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Consumer:
    """Follows the events of a node as a router of another system does: texts of the blocks that it has, by hash."""

    def __init__(self, events: KvEvents) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.sub.connect(events.address)
        self.sub.subscribe(b"kv-events")
        self.replay.connect(events.replay_address)
        self.blocks: dict[bytes | int, tuple[int, ...]] = {}
        self.media: dict[bytes | int, set[str | None]] = {}
        self.salts: dict[bytes | int, str] = {}
        self.numbers: list[int] = []
        self.has_missed = False
        self.now = 100.0

    def take(self, payload: bytes, number: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            match event:
                case BlockStored():
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                    for index, name in enumerate(event.block_hashes):
                        before = (*before, *event.token_ids[size * index : size * (index + 1)])
                        self.blocks[name] = before
                        self.media.setdefault(name, set()).add(event.medium)
                    if event.extra_keys is not None:
                        self.salts[event.block_hashes[0]] = event.extra_keys[0][0]  # type: ignore[index]
                case BlockRemoved():
                    for name in event.block_hashes:
                        self.media[name].remove(event.medium)
                        if not self.media[name]:
                            del self.blocks[name], self.media[name]
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.media.clear()

    def receive(self) -> None:
        while self.sub.poll(50):
            _, number, payload = self.sub.recv_multipart()
            if int.from_bytes(number, "big") == len(self.numbers):
                self.take(payload, number)
            else:
                self.has_missed = True

    @property
    def texts(self) -> set[tuple[int, ...]]:
        return set(self.blocks.values())


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(60, PAGE), 1)


@pytest.fixture
def events(cache: PrefixCache) -> Iterator[KvEvents]:
    made = KvEvents("tcp://127.0.0.1:*", cache)
    yield made
    made.close()


@pytest.fixture
def consumer(events: KvEvents) -> Iterator[Consumer]:
    made = Consumer(events)
    yield made
    made.context.destroy(linger=0)


def leading(*texts: list[int]) -> set[tuple[int, ...]]:
    """Return all leading whole pages of texts whose next token is known."""
    return {tuple(text[:end]) for text in texts for end in range(PAGE, len(text), PAGE)}


def test_a_consumer_of_the_format_follows_the_cache(cache: PrefixCache, events: KvEvents, consumer: Consumer) -> None:
    first, second = list(range(33)), [*range(16), *range(50, 67)]

    def tells() -> None:
        consumer.now += INTERVAL_S
        events.tell(consumer.now)
        consumer.receive()

    def is_connected() -> bool:
        cache.flush()
        store(cache, first)
        tells()
        return consumer.has_missed or bool(consumer.numbers)

    wait_until(is_connected, "the consumer is connected")
    if consumer.has_missed:  # batches before
        ask_again(events, consumer, 0)
    store(cache, second, "tenant")
    store(cache, second)
    tells()
    assert consumer.texts == leading(first, second) and list(consumer.salts.values()) == ["tenant"]
    cache.evict(5)
    tells()
    assert len(consumer.blocks) == cache.num_pages
    cache.flush()
    tells()
    assert not consumer.blocks


def ask_again(events: KvEvents, consumer: Consumer, first: int) -> None:
    """Let a consumer ask for the batches from number `first` on, and take them in place of what it has."""
    consumer.blocks.clear()
    consumer.media.clear()
    consumer.numbers.clear()
    consumer.replay.send_multipart([b"", first.to_bytes(8, "big")])
    while not consumer.replay.poll(20):
        consumer.now += INTERVAL_S
        events.tell(consumer.now)
    while True:
        _, number, payload = consumer.replay.recv_multipart()
        if not payload:
            assert int.from_bytes(number, "big", signed=True) == -1
            return
        consumer.take(payload, number)


def test_batches_are_served_again_from_a_number_on(cache: PrefixCache, events: KvEvents, consumer: Consumer) -> None:
    for turn in range(5):
        store(cache, [turn] * 9)
        events.tell(float(turn))
    ask_again(events, consumer, 3)
    assert consumer.numbers == [3, 4] and consumer.texts == leading([3] * 9, [4] * 9)


def test_old_batches_are_forgotten(
    cache: PrefixCache, events: KvEvents, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_REPLAYED_BATCHES", 2)
    for turn in range(5):
        store(cache, [turn] * 9)
        events.tell(float(turn))
    ask_again(events, consumer, 0)
    assert consumer.numbers == [3, 4]


def test_events_say_in_which_medium_a_block_lies(tmp_path: Path) -> None:
    """Blocks go from the pool to host memory and to files, and come back."""
    node = Node(9, 12, directory=tmp_path / "files")
    events = KvEvents("tcp://127.0.0.1:*", node.cache)
    consumer = Consumer(events)
    texts = [[text * 50 + index for index in range(5 * TIER_PAGE + 1)] for text in range(4)]
    seen = set[str | None]()
    try:
        for text in (*texts, texts[0], texts[3], texts[1]):
            node.run(text)
            wait_until(lambda: node.cache.tend() or node.disk.thread.is_idle, "files are written")
            node.cache.tend()
            seen |= tell_media(node, events, consumer)
        assert seen == set(MEDIA.values())
        node.cache.flush()
        assert tell_media(node, events, consumer) == set()
    finally:
        consumer.context.destroy(linger=0)
        events.close()
        node.cache.close()


def tell_media(node: Node, events: KvEvents, consumer: Consumer) -> set[str | None]:
    """Tell all changes, let the consumer read all events, compare its blocks with the cache, and return all media."""
    for _ in range(3):
        consumer.now += INTERVAL_S
        events.tell(consumer.now)
    consumer.blocks.clear()
    consumer.media.clear()
    for number, payload in events._kept:
        consumer.take(payload, number)
    left, found = node.cache.first_pages(), list[set[str | None]]()
    while left:
        page = left.pop()
        left += page.children.values()
        found.append({MEDIA[place] for place in page.places})
    assert sorted(map(sorted, found)) == sorted(map(sorted, consumer.media.values()))
    return set().union(*found)


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"1"], [b"", b"x" * 8, b"more"], [b"x", b"y" * 8]])
def test_a_malformed_request_is_dropped(
    request_frames: list[bytes], cache: PrefixCache, events: KvEvents, consumer: Consumer, caplog: Any
) -> None:
    consumer.replay.send_multipart(request_frames)
    times = itertools.count()
    wait_until(lambda: events.tell(float(next(times))) or "dropped a request" in caplog.text, "it came")
    consumer.now = 1e6
    ask_again(events, consumer, 0)


def test_a_taken_address_is_refused_in_words(events: KvEvents, cache: PrefixCache) -> None:
    with pytest.raises(ConfigError, match="give another --kv-events"):
        KvEvents(events.address, cache)


def test_other_machines_reach_the_events_only_with_a_warning(cache: PrefixCache, caplog: Any) -> None:
    KvEvents("tcp://127.0.0.1:*", cache).close()
    assert "tokens of all prompts" not in caplog.text
    KvEvents("tcp://0.0.0.0:*", cache).close()
    assert "tokens of all prompts" in caplog.text
