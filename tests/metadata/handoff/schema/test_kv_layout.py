"""Layouts of pages, those that no model has yet included: a latent, scales beside values, odd heads, unlike planes.

The pages travel through a real server and client, and every layer between asks the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from handoff_nodes import make_client, make_memory, make_row, make_server, named, peer_of, same_pages, spin, unit

from baton.engine.state.pages import Owner, PagePool
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import first_difference, page_checksums
from baton.metadata.handoff.schema.kv_layout import KvLayout, PlaneView, Shard, plane_words, planes_of, pool_of
from baton.metadata.handoff.schema.schema import (
    blocks_per_page,
    describe,
    differences,
    digest,
    kv_layouts,
    make_schema,
    page_bytes,
)
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.data_link import to_prefill_decoder
from baton.metadata.wire.frames import encode, unseal
from baton.metadata.wire.node_info import FurtherPool, HandoffSchema, KvPlane, PoolLayout
from baton.metadata.wire.protocol import PROTOCOL_MIN

PLAIN = PoolLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32")
ODD = PoolLayout(num_layers=3, num_kv_heads=5, head_dim=10, dtype="bfloat16")
LATENT = pool_of(2, "bfloat16", [KvPlane("latent", num_heads=1, head_dim=512 + 64, dtype="bfloat16")])
FP8 = pool_of(
    2,
    "bfloat16",
    [
        KvPlane(name, num_heads=2, head_dim=10, dtype="float8_e4m3fn", extra_bytes=4, alignment=16)
        for name in ("k", "v")
    ],
)
UNLIKE = pool_of(
    2,
    "bfloat16",
    [
        KvPlane("k", num_heads=4, head_dim=24, dtype="bfloat16"),
        KvPlane("v", num_heads=4, head_dim=16, dtype="bfloat16"),
        KvPlane("index", num_heads=1, head_dim=6, dtype="float8_e4m3fn", extra_bytes=2, alignment=8),
    ],
)
SEVERAL = msgspec.structs.replace(
    PLAIN,
    further=(
        FurtherPool("index", 1, (KvPlane("index", num_heads=1, head_dim=6, dtype="float32"),)),
        FurtherPool("wide", 3, tuple(KvPlane(name, num_heads=2, head_dim=10, dtype="bfloat16") for name in ("k", "v"))),
    ),
)
POOLS = {"plain": PLAIN, "odd heads": ODD, "latent": LATENT, "fp8": FP8, "unlike": UNLIKE, "several": SEVERAL}
PAGE_SIZES = [1, 3, 10, 48]

every_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def schema_of(pool: PoolLayout, page_size: int) -> HandoffSchema:
    """Return a schema of a target with this pool and a draft with odd heads."""
    return make_schema(pool, ODD, page_size, "standalone", draft_topk=1)


def array(pages: np.ndarray, view: PlaneView) -> np.ndarray:
    """Return the bytes that a view names: uint8 [num_layers, num_pages, num_heads, page_size, bytes per token]."""
    *shape, width = view.shape
    *strides, item = view.strides
    whole = pages.reshape(-1)[view.offset :]
    return np.lib.stride_tricks.as_strided(whole, (*shape, width * item), (*strides, 1))


def arrays(memory: PageMemory) -> Iterator[tuple[KvPlane, np.ndarray]]:
    """Yield the values and the extra bytes of every plane."""
    for plane in memory.layout.planes:
        yield plane, array(memory.pages, memory.layout.values(plane, memory.num_pages))
        if plane.extra_bytes:
            yield plane, array(memory.pages, memory.layout.extras(plane, memory.num_pages))


class Pair:
    """A prefill and a decode node over one transport, each with the books of its pages."""

    def __init__(self, nodes: list[Any], schema: HandoffSchema, transport: str, *, has_gpu: bool = False) -> None:
        self.schema = schema
        self.server, self.source = make_server(schema, 8, has_gpu=has_gpu)
        self.client, self.target = make_client(schema, 8, has_gpu=has_gpu, transports=(transport,))
        nodes += [*self.source, *self.target, self.server, self.client]
        self.books = [PagePool(8, schema.page_size, pools[0].generations) for pools in (self.source, self.target)]
        self.theirs, self.ours = [book.allocate(3, Owner.REQUEST) for book in self.books]
        self.ours.reverse()

    def offer(self) -> None:
        """Offer all pages and the row under a ticket."""
        book = self.books[0]
        book.transfer(self.theirs, Owner.TICKET)
        self.server.open(unit(), 3)
        ages = [book.generation(page) for page in self.theirs]
        self.server.offer(unit(), range(3), self.theirs, ages, make_row(self.schema))

    def pull(self, *kinds: type) -> list[Any]:
        """Claim the ticket, and return all events until each kind came."""
        self.client.claim(unit(), peer_of(self.server), 0, self.ours)
        return spin([self.server, self.client], lambda events: all(named(events, kind) for kind in kinds))


@pytest.mark.parametrize("way", ["local", "zmq"])
@every_page_size
@every_pool
def test_pulled_pages_equal_the_source(nodes: list[Any], pool: PoolLayout, page_size: int, way: str) -> None:
    pair = Pair(nodes, schema_of(pool, page_size), way)
    pair.offer()
    [arrived] = named(pair.pull(Arrived, TicketEnded), Arrived)
    assert arrived.times.transport == way and arrived.num_bytes == 3 * page_bytes(pair.schema)
    assert same_pages(pair.target, pair.ours, pair.source, pair.theirs)
    for here, there in zip(pair.target, pair.source, strict=True):
        for (_, ours), (_, theirs) in zip(arrays(here), arrays(there), strict=True):
            assert np.array_equal(ours[:, pair.ours], theirs[:, pair.theirs]) and ours[:, pair.ours].any()
        assert not here.pages[:, [page for page in range(8) if page not in pair.ours]].any()
    pair.books[0].release(pair.theirs, Owner.TICKET)
    pair.books[1].release(pair.ours)
    assert [book.ledger().free for book in pair.books] == [7, 7]


@pytest.mark.parametrize("way", ["local", "zmq", "cuda"])
@pytest.mark.parametrize("pool", [LATENT, FP8, UNLIKE], ids=["latent", "fp8", "unlike"])
def test_pages_of_a_gpu_are_digested_by_the_layout(nodes: list[Any], pool: PoolLayout, way: str) -> None:
    pair = Pair(nodes, schema_of(pool, 10), way, has_gpu=True)
    pair.offer()
    [arrived] = named(pair.pull(Arrived, TicketEnded), Arrived)
    assert arrived.times.transport == way
    assert same_pages(pair.target, pair.ours, pair.source, pair.theirs)
    [checksums] = pair.source[0].device.digest([3])
    assert len(checksums) == 8 * blocks_per_page(pair.schema)
    pair.source[0].pages[-1, 3, -1] ^= 1  # of the target's last layer, so the draft's blocks follow
    changed = first_difference(pair.source[0].device.digest([3])[0], checksums)
    layout = kv_layouts(pair.schema)[0]
    assert changed == layout.num_layers * layout.blocks_per_layer - 1


@every_page_size
@every_pool
def test_a_flipped_byte_is_caught_by_the_checksum_of_its_block(pool: PoolLayout, page_size: int) -> None:
    schema = schema_of(pool, page_size)
    memory = make_memory(schema, 3, seed=3)
    before = page_checksums(memory, 1)
    assert len(before) == 8 * blocks_per_page(schema)
    first = 0  # block of the page, over all pools and layers
    for each in memory:
        layout = each.layout
        for plane, bytes_of_plane in arrays(each):
            start = first + sum(other.num_heads for other in layout.planes[: layout.planes.index(plane)])
            for layer, head in np.ndindex(layout.num_layers, plane.num_heads):
                for token, place in ((0, 0), (page_size - 1, -1)):
                    bytes_of_plane[layer, 1, head, token, place] ^= 0x10
                    block = start + layer * layout.blocks_per_layer + head
                    assert first_difference(page_checksums(memory, 1), before) == block
                    bytes_of_plane[layer, 1, head, token, place] ^= 0x10
        first += layout.num_layers * layout.blocks_per_layer
    assert page_checksums(memory, 1) == before


@every_page_size
@every_pool
def test_no_byte_of_a_page_is_without_a_checksum(pool: PoolLayout, page_size: int) -> None:
    """The bytes between values, extra bytes and blocks included."""
    memory, *_ = make_memory(make_schema(pool, None, page_size), 2, seed=4)
    before = page_checksums([memory], 1)
    size, runs = memory.layout.page_layer_bytes, memory.layout.runs
    starts = [run.offset + block * run.block_bytes for run in runs for block in range(run.num_blocks)]
    for at in sorted({*range(0, size, max(1, size // 97)), size - 1}):
        memory.pages[0, 1, at] ^= 1
        block = sum(start <= at for start in starts) - 1
        assert first_difference(page_checksums([memory], 1), before) == block
        memory.pages[0, 1, at] ^= 1


@pytest.mark.parametrize("way", ["local", "zmq"])
@pytest.mark.parametrize(
    ("pool", "place", "plane"),
    [
        (LATENT, 0, 0),
        (FP8, 0, 1),
        (ODD, 0, 1),
        *((UNLIKE, 0, plane) for plane in range(3)),
        (SEVERAL, 1, 0),
        (SEVERAL, 2, 1),
    ],
)
def test_a_page_whose_plane_was_damaged_never_arrives(
    nodes: list[Any], pool: PoolLayout, place: int, plane: int, way: str
) -> None:
    pair = Pair(nodes, schema_of(pool, 3), way)
    pair.offer()
    memory = pair.source[place]
    layout = memory.layout
    damaged = layout.planes[plane]
    views = [values for each, values in arrays(memory) if each == damaged]
    views[-1][-1, pair.theirs[2], damaged.num_heads - 1, 2, -1] ^= 1  # after its checksum was computed
    [failed] = named(pair.pull(TransferFailed, TicketEnded), TransferFailed)
    before = sum(each.layout.num_layers * each.layout.blocks_per_layer for each in pair.source[:place])
    block = before + (layout.num_layers - 1) * layout.blocks_per_layer
    block += sum(each.num_heads for each in layout.planes[: plane + 1]) - 1
    assert f"page 2 from node p0: checksum of block {block} wrong" in failed.reason
    assert pair.client.num_checksum_failures == 3


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 10, 20])
@every_pool
def test_a_shards_bytes_are_those_of_its_heads(pool: PoolLayout, size: int) -> None:
    layout = KvLayout.of(pool, 3)
    if any(plane.num_heads % size and size % plane.num_heads for plane in layout.planes):
        with pytest.raises(ConfigError, match=f"over {size} ranks"):
            layout.bytes_of(Shard(0, size))
        return
    memory = PageMemory(layout, 2)
    memory.pages[:] = 255  # padding
    for plane, values in arrays(memory):
        for head in range(plane.num_heads):
            values[:, :, head] = 16 * layout.planes.index(plane) + head
    covered: list[int] = []
    for rank in range(size):
        shard = Shard(rank, size)
        ranges = layout.bytes_of(shard)
        inside = np.zeros(layout.page_layer_bytes, bool)
        for each in ranges:
            inside[each.start : each.stop] = True
        wanted = {16 * at + head for at, plane in enumerate(layout.planes) for head in shard.heads(plane.num_heads)}
        page = memory.pages[1, 1]
        assert set(page[inside].tolist()) - {255} == wanted
        assert wanted.isdisjoint(page[~inside].tolist())
        covered += np.flatnonzero(inside).tolist()
        assert [len(each) for each in ranges] == [
            max(1, plane.num_heads // size) * layout.block_bytes(plane) for plane in layout.planes
        ]
    assert set(covered) == set(range(layout.page_layer_bytes))
    if all(plane.num_heads >= size for plane in layout.planes):
        assert len(covered) == layout.page_layer_bytes  # no head is with two ranks
    memory.close()


@every_pool
def test_a_rank_can_check_what_it_has_of_a_page(pool: PoolLayout) -> None:
    layout = KvLayout.of(pool, 10)
    size = layout.planes[0].num_heads
    source, target = PageMemory(layout, 2), PageMemory(layout, 2)
    source.pages[:] = np.random.default_rng(5).integers(1, 256, source.pages.shape, np.uint8)
    offered = np.frombuffer(page_checksums([source], 1), "<u8").reshape(layout.num_layers, -1)
    for rank in range(size):
        target.pages[:] = 0
        for part in layout.bytes_of(Shard(rank, size)):
            target.pages[:, 1, part.start : part.stop] = source.pages[:, 1, part.start : part.stop]
        checked = np.frombuffer(page_checksums([target], 1), "<u8").reshape(offered.shape)
        right = np.flatnonzero((checked == offered).all(axis=0)).tolist()
        assert right == list(layout.blocks_of(Shard(rank, size)))
    source.close()
    target.close()


def test_too_few_heads_are_copied_to_several_ranks() -> None:
    assert [Shard(rank, 4).heads(2) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [Shard(rank, 2).heads(8) for rank in range(2)] == [range(4), range(4, 8)]
    with pytest.raises(ConfigError, match="5 KV heads cannot be split over 2 ranks"):
        Shard(1, 2).heads(5)


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_keys_and_values_lie_as_one_tensor() -> None:
    layout = KvLayout.of(PLAIN, 4)
    assert layout.stacked_shape(5) == (2, 5, 2, 4, 4, 8)
    assert layout.page_bytes == 2 * 2 * 4 * 4 * 8 * 4
    memory = PageMemory(layout, 5)
    stacked = memory.pages.view(np.float32).reshape(layout.stacked_shape(5))
    stacked[:] = np.arange(stacked.size).reshape(stacked.shape)
    for index, plane in enumerate(layout.planes):
        view = layout.values(plane, 5)
        assert view.shape == (2, 5, 4, 4, 8) and view.dtype == "float32"
        assert np.array_equal(array(memory.pages, view).copy().view(np.float32), stacked[:, :, index])


def test_a_block_of_values_with_scales_is_padded() -> None:
    layout = KvLayout.of(FP8, 3)
    [run] = layout.runs
    assert run.block_bytes == 32 + 16  # 3 x 10 values and 3 x 4 bytes of scales, each a multiple of 16
    assert run.num_blocks == layout.blocks_per_layer == 4
    key, value = layout.planes
    assert layout.extras(key, 6).offset == 32 and layout.values(value, 6).offset == 2 * 48
    assert layout.extras(key, 6) == PlaneView((2, 6, 2, 3, 4), (6 * 192, 192, 48, 4, 1), 32, "uint8")


def test_planes_of_other_sizes_are_runs_of_their_own() -> None:
    layout = KvLayout.of(UNLIKE, 1)
    assert [(run.first, run.num_blocks, run.block_bytes, run.offset) for run in layout.runs] == [
        (0, 4, 48, 0),
        (4, 4, 32, 192),
        (8, 1, 16, 320),
    ]
    assert layout.page_layer_bytes == layout.runs[-1].end == 336


def test_a_latent_is_one_block() -> None:
    layout = KvLayout.of(LATENT, 16)
    assert layout.blocks_per_layer == 1 and layout.page_layer_bytes == 16 * 576 * 2
    assert layout.stacked_shape(7) == (2, 7, 1, 1, 16, 576)


def test_values_with_scales_are_one_tensor_with_gaps() -> None:
    layout = KvLayout.of(FP8, 3)
    assert layout.stacked_shape(7) == (2, 7, 2, 2, 3, 10)
    key, value = (layout.values(plane, 7) for plane in layout.planes)
    assert value.offset - key.offset == 2 * layout.block_bytes(layout.planes[0]) and key.strides[2:4] == (48, 10)


def test_planes_that_are_no_tensor_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="not one tensor of equal heads") as raised:
        KvLayout.of(UNLIKE, 3).stacked_shape(7)
    assert plane_words(UNLIKE.planes[-1]) in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_heads": each} for each in (1, 3)),
        *({"head_dim": each} for each in (9, 11)),
        *({"dtype": each} for each in ("uint8", "float16", "bfloat16", "float32")),
        *({"extra_bytes": each} for each in (0, 3, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("index", [0, 1])
def test_one_plane_that_is_larger_smaller_or_of_another_dtype_makes_no_tensor(
    index: int, changes: dict[str, Any]
) -> None:
    planes = list(FP8.planes)
    assert KvLayout(2, 3, tuple(planes)).stacked_shape(7) == (2, 7, 2, 2, 3, 10)
    planes[index] = msgspec.structs.replace(planes[index], **changes)
    with pytest.raises(ConfigError, match="not one tensor of equal heads"):
        KvLayout(2, 3, tuple(planes)).stacked_shape(7)


@pytest.mark.parametrize(("num_heads", "size"), [(4, 3), (3, 2), (2, 3), (3, 4), (6, 4), (4, 6), (8, 12), (12, 8)])
def test_heads_that_are_no_divisor_and_no_multiple_of_the_ranks_are_refused(num_heads: int, size: int) -> None:
    layout = KvLayout(1, 2, (KvPlane("k", num_heads=num_heads, head_dim=8, dtype="float32"),))
    for rank in (0, size - 1):
        shard = Shard(rank, size)
        for ask in (layout.part_of, layout.blocks_of, layout.bytes_of):
            with pytest.raises(ConfigError, match=f"{num_heads} KV heads cannot be split over {size} ranks"):
                ask(shard)


def test_two_planes_of_one_name_are_refused() -> None:
    plane = KvPlane("k", num_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(ConfigError, match="give each plane a name of its own"):
        pool_of(1, "float32", [plane, plane])


def test_two_pools_of_one_name_are_refused() -> None:
    planes = (KvPlane("index", num_heads=1, head_dim=8, dtype="float32"),)
    with pytest.raises(ConfigError, match="index, index: give each its own"):
        pool_of(1, "float32", planes, [FurtherPool("index", 1, planes)] * 2)


# --- on the wire ----------------------------------------------------------------------------------------------------


def test_pools_of_keys_and_values_have_the_bytes_that_they_always_had() -> None:
    plain = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "dtype": "float32"}
    assert msgspec.msgpack.encode(PLAIN) == msgpack.packb(plain)
    assert digest(make_schema(PLAIN, ODD, 16, "standalone", draft_topk=1)) == "684942b7970473735a61106d4cc2debd"
    assert pool_of(2, "float32", planes_of(PLAIN)) == PLAIN  # never listed as planes


@every_pool
def test_a_pool_survives_the_wire(pool: PoolLayout) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pool), type=PoolLayout) == pool


def test_unlike_planes_are_a_difference_in_words() -> None:
    here, there = make_schema(LATENT), make_schema(FP8)
    assert differences(here, there) == [
        "target.plane 0: latent: 1 heads x 576 bfloat16 here,"
        " k: 2 heads x 10 float8_e4m3fn + 4 bytes aligned to 16 bytes there",
        "target.plane 1: absent here, v: 2 heads x 10 float8_e4m3fn + 4 bytes aligned to 16 bytes there",
    ]
    assert "target 2 layers x (latent: 1 heads x 576 bfloat16)," in describe(here)
    assert digest(here) != digest(there)


def test_planes_and_a_pool_that_lists_none_differ_by_their_planes() -> None:
    plain = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=10, dtype="bfloat16")
    here, there = make_schema(plain, FP8, algorithm="standalone"), make_schema(FP8, plain, algorithm="standalone")
    fp8, bf16 = "2 heads x 10 float8_e4m3fn + 4 bytes aligned to 16 bytes", "2 heads x 10 bfloat16"
    assert differences(here, there) == [
        f"target.plane 0: k: {bf16} here, k: {fp8} there",
        f"target.plane 1: v: {bf16} here, v: {fp8} there",
        f"draft.plane 0: k: {fp8} here, k: {bf16} there",
        f"draft.plane 1: v: {fp8} here, v: {bf16} there",
    ]


@pytest.mark.parametrize("protocol", range(PROTOCOL_MIN, 6))  # planes are since protocol 6
@pytest.mark.parametrize("pool", [LATENT, FP8, UNLIKE], ids=["latent", "fp8", "unlike"])
def test_a_peer_that_knows_no_planes_takes_the_pool_for_none_of_its_own(pool: PoolLayout, protocol: int) -> None:
    client, memory = make_client(make_schema(pool), 2)
    hello = to_prefill_decoder.decode(unseal(encode(client.end.hello(""), protocol)) or b"")
    assert hello.layout.target == PoolLayout(num_layers=2, num_kv_heads=0, head_dim=0, dtype="bfloat16")
    client.close()
    memory[0].close()


def test_a_link_without_planes_is_refused_in_words(nodes: list[Any]) -> None:
    """An older router does not tell the protocol of a peer, so the nodes address each other in the oldest."""
    pair = Pair(nodes, make_schema(LATENT, None, 4), "local")
    pair.offer()
    peer = msgspec.structs.replace(peer_of(pair.server), protocol=0)
    pair.client.claim(unit(), peer, 0, pair.ours)
    [failed] = named(spin([pair.server, pair.client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert failed.is_refused and "target.plane 0: latent: 1 heads x 576 bfloat16 here, absent there" in failed.reason


@pytest.mark.parametrize(
    "changes", [{"alignment": 3}, {"extra_bytes": -1}, {"extra_bytes": 4097}, {"dtype": "int8"}, {"num_heads": -1}]
)
def test_a_plane_is_bounded(changes: dict[str, Any]) -> None:
    good = msgspec.to_builtins(FP8.planes[0])
    assert msgspec.convert(good, KvPlane) == FP8.planes[0]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | changes, KvPlane)
