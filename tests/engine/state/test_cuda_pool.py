"""The pool of a node on CUDA, with tensors of the host in the place of device memory (support/devices/host_cuda.py).

Kernels are the references here. The pool's own work is tested: which pages it copies and digests, what it waits for,
and what it keeps or gives back. tests/gpu/test_cuda_handoff.py runs it on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from handoff_nodes import DRAFT_SCHEMA, make_memory
from host_cuda import HostCuda, HostEvent, with_host_cuda
from memory_limit import MemoryLimit

from baton.engine.state import cuda_pool
from baton.engine.state.cuda_pool import CudaPool, word_spans
from baton.kernels.state import pages as page_kernels
from baton.kernels.state import triton_pages
from baton.kernels.state.pages import PoolAddress, gather_pages_ref, page_checksums_ref
from baton.metadata.errors import OutOfMemory, TransferError
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import first_difference
from baton.metadata.handoff.ranks.shards import blocks_here, digest_columns, page_parts
from baton.metadata.handoff.schema.kv_layout import KvLayout, Shard, pool_of
from baton.metadata.handoff.schema.schema import kv_layouts, on_gpu
from baton.metadata.wire.node_info import KvPlane

NUM_PAGES = 40
LAYOUTS = kv_layouts(on_gpu(DRAFT_SCHEMA))


class Pools:
    """A node's CudaPool over random bytes, with its tensors and mirrors."""

    def __init__(
        self, cuda: HostCuda, seed: int, layouts: Sequence[KvLayout], *, has_checksums: bool, first: int
    ) -> None:
        self.cuda = cuda
        self.first = first  # its number of the first pool
        self.memory = [PageMemory(layout, NUM_PAGES) for layout in layouts]
        generator = torch.Generator().manual_seed(seed)
        shapes = [each.pages.shape for each in self.memory]
        self.kvs = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
        self.before = [kv.clone() for kv in self.kvs]
        self.pool = CudaPool(self.kvs, self.memory, has_checksums=has_checksums)
        self.stream = str(self.pool._stream)
        assert self.pool._stream.priority < 0, "pages that are waited for go before rounds"

    def is_unchanged(self) -> bool:
        return all(torch.equal(kv, old) for kv, old in zip(self.kvs, self.before, strict=True))

    def expected_digest(self, page: int) -> bytes:
        """Return the checksums of a page in all pools, layer by layer, block by block."""
        parts: list[torch.Tensor] = []
        for kv, memory in zip(self.kvs, self.memory, strict=True):
            words = kv.view(torch.int32)
            for layer in range(len(words)):
                for run in memory.layout.runs:
                    own = words[layer : layer + 1, :, run.offset // 4 : run.end // 4]
                    parts.append(page_checksums_ref(own, torch.tensor([page]), run.block_bytes // 4).flatten())
        return torch.cat(parts).numpy().astype("<u8").tobytes()


class Mapped(NamedTuple):
    """A mapping of a peer's pool."""

    number: int  # which also was its descriptor: pools count in the order in which they are made
    address: int
    log: list[tuple[str, str, str]]

    def close(self) -> None:
        self.log.append(("host", "unmaps", str(self.number)))


MakePools = Callable[..., Pools]


@pytest.fixture
def make_pools(monkeypatch: pytest.MonkeyPatch) -> MakePools:
    """`make_pools(seed)`: the pools of a node. Gathers read any tensor of a pool by its address."""
    cuda = with_host_cuda(monkeypatch)
    made: list[torch.Tensor] = []

    def gather_pages(peer: PoolAddress, pool: torch.Tensor, sources: Any, targets: Any, *how: Any) -> None:
        there = next((kv.view(torch.int32) for kv in made if kv.data_ptr() == peer.address), pool)
        assert (there.data_ptr(), there.shape[1]) == (peer.address, peer.num_pages)
        there = there.view(*there.shape[:2], -1)
        assert there.shape[2] == (peer.page_words or there.shape[2])
        gather_pages_ref(there, pool.view(*pool.shape[:2], -1), sources, targets, how[1] if how[1:] else None)

    def map_shared(descriptor: int, size: int, device: torch.device) -> Mapped:
        if descriptor < 0:
            raise OSError("no such descriptor")
        cuda.log.append(("host", "maps", str(descriptor)))
        return Mapped(descriptor, made[descriptor].data_ptr(), cuda.log)

    monkeypatch.setattr(triton_pages, "gather_pages", gather_pages)
    monkeypatch.setattr(cuda_pool, "map_shared", map_shared)

    def make(seed: int = 0, layouts: Sequence[KvLayout] = LAYOUTS, *, has_checksums: bool = True) -> Pools:
        pools = Pools(cuda, seed, layouts, has_checksums=has_checksums, first=len(made))
        made.extend(pools.kvs)
        return pools

    return make


def pair(make_pools: MakePools) -> tuple[Pools, Pools, Any]:
    """Return our pools, a peer's, and our mapping of the peer's."""
    ours, theirs = make_pools(0), make_pools(1)
    mapping = ours.pool.map([2, 3], [kv.nbytes for kv in theirs.kvs], NUM_PAGES)
    ours.cuda.log.clear()
    return ours, theirs, mapping


# --- checksums ---


@pytest.mark.parametrize("num_pools", [1, 2])
@pytest.mark.parametrize("pages", [[4], [39, 0, 7], [*range(NUM_PAGES)]], ids=len)
def test_checksums_are_those_of_the_reference(pages: list[int], num_pools: int, make_pools: MakePools) -> None:
    pools = make_pools(layouts=LAYOUTS[:num_pools])
    assert pools.pool.digest(pages) == [pools.expected_digest(page) for page in pages]


def test_blocks_of_unlike_sizes_are_digested_in_their_order(make_pools: MakePools) -> None:
    planes = (
        KvPlane("a", num_heads=2, head_dim=8, dtype="float32"),
        KvPlane("b", num_heads=3, head_dim=4, dtype="float32"),
    )
    pools = make_pools(layouts=[KvLayout(2, 4, planes), *LAYOUTS])
    assert len(pools.memory[0].layout.runs) == 2
    assert pools.pool.digest([3, 9]) == [pools.expected_digest(3), pools.expected_digest(9)]
    before = pools.pool.digest([3])[0]
    pools.kvs[0].view(torch.int32)[1, 3, 2 * 32 + 16] ^= 1  # layer 1, the second block of plane b
    assert first_difference(before, pools.pool.digest([3])[0]) == 5 + 2 + 1


def test_without_checksums_nothing_is_digested(make_pools: MakePools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pool, "page_checksums", lambda *_: pytest.fail("digested"))
    pools = make_pools(has_checksums=False)
    pools.cuda.log.clear()
    assert pools.pool.digest([3, 4]) == [b"", b""] and not pools.cuda.log
    assert pools.pool.load([5]) == [b""] and pools.cuda.log == [("host", "waits for", pools.stream)]


def test_blocks_are_whole_words(make_pools: MakePools) -> None:
    odd = KvPlane("a", num_heads=2, head_dim=1, dtype="float8_e4m3fn", alignment=1)
    with pytest.raises(AssertionError, match="words of 4 bytes"):
        make_pools(layouts=[KvLayout(1, 6, (odd,))])


def test_a_pool_is_contiguous(make_pools: MakePools) -> None:
    memory = make_memory(DRAFT_SCHEMA, NUM_PAGES)
    kvs = [torch.zeros(len(each.pages), 2 * NUM_PAGES, each.pages.shape[2], dtype=torch.uint8) for each in memory]
    with pytest.raises(AssertionError):
        CudaPool([kv[:, :NUM_PAGES] for kv in kvs], memory, has_checksums=True)


def test_warming_up_digests_few_pages_and_many_and_gathers_padding_into_itself(
    make_pools: MakePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for few pages and one for many are compiled. The zeros of padding may still be on their way."""
    digested: list[list[int]] = []

    def page_checksums(words: torch.Tensor, pages: torch.Tensor, *rest: Any) -> None:
        digested.append(pages.tolist())
        page_kernels.page_checksums(words, pages, *rest)

    monkeypatch.setattr(cuda_pool, "page_checksums", page_checksums)
    pools = make_pools()
    assert digested == [[0]] * 2 + [[0] * 1024] * 2 + [[0]] * 2  # for each of two pools
    assert pools.is_unchanged()
    [(_, _, event)] = [entry for entry in pools.cuda.log if entry[0] == "main"]
    assert (pools.stream, "waits for", event) in pools.cuda.log and pools.cuda.log[-1][:2] == ("host", "waits for")


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 8, 16])
def test_warming_up_compiles_the_kernel_of_every_number_of_pages(
    num_heads: int, make_pools: MakePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a pool has few blocks, of which only very many pages are many blocks."""
    launched: set[tuple[Any, ...]] = set()

    def launch(kernel: Any, _grid: Any, _pools: Any, _others: Any, constants: dict[str, Any], *_: Any) -> None:
        launched.add((kernel, *constants.items()))

    monkeypatch.setattr(triton_pages, "launch", launch)
    monkeypatch.setattr(cuda_pool, "page_checksums", triton_pages.page_checksums)
    plane = KvPlane("k", num_heads=num_heads, head_dim=8, dtype="float32")
    pools = make_pools(layouts=[KvLayout(1, 4, (plane,)), *LAYOUTS])
    compiled = set(launched)
    for num_pages in (*range(1, 60), 100, 511, 512, 513, 682, 683, 1000, 2000, 9000):
        pools.pool.digest([0] * num_pages)
    assert launched == compiled


# --- the way through the host ---


@pytest.mark.parametrize("store_bytes", [1, 1 << 30])
def test_pages_go_to_the_mirror_and_come_back(
    store_bytes: int, make_pools: MakePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece has as many pages as may lie twice on the device, and at least one."""
    monkeypatch.setattr(cuda_pool, "_STORE_BYTES", store_bytes)
    pools, pages = make_pools(), [7, 2, 30]
    digests = pools.pool.digest(pages)
    pools.pool.store(pages)
    others = [page for page in range(NUM_PAGES) if page not in pages]
    for kv, memory in zip(pools.kvs, pools.memory, strict=True):
        assert np.array_equal(memory.pages[:, pages], kv[:, pages].numpy()) and not memory.pages[:, others].any()
        kv[:, pages] = 0
    assert pools.pool.load(pages) == digests
    assert pools.is_unchanged()


def test_a_digest_waits_for_work_that_computes_the_pages(make_pools: MakePools) -> None:
    """A rank that is told to offer pages may still compute them. Other pages are digested at once."""
    pools = make_pools()
    pools.cuda.log.clear()
    pools.pool.expect([3, 5])
    [fence] = [event for who, what, event in pools.cuda.log if (who, what) == ("main", "records")]
    pools.cuda.log.clear()
    pools.pool.digest([4])
    assert (pools.stream, "waits for", fence) not in pools.cuda.log
    pools.pool.digest([3, 5])
    assert pools.cuda.log.count((pools.stream, "waits for", fence)) == 1


# --- gathers ---


def test_a_gather_brings_the_peers_pages_and_their_checksums(make_pools: MakePools) -> None:
    ours, theirs, mapping = pair(make_pools)
    gather = ours.pool.gather(mapping, [3, 4, 3], [7, 9, 1])
    assert not gather.is_done
    gather.wait()
    assert gather.is_done and gather.checksums() == theirs.pool.digest([3, 4, 3]) == ours.pool.digest([7, 9, 1])
    for old, there in zip(ours.before, theirs.kvs, strict=True):
        old[:, [7, 9, 1]] = there[:, [3, 4, 3]]
    assert ours.is_unchanged() and theirs.is_unchanged()


@pytest.mark.parametrize(("num_sources", "size"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_a_rank_gathers_its_heads_from_each_rank_that_has_some(
    num_sources: int, size: int, make_pools: MakePools
) -> None:
    """The target has 2 heads, so several ranks of 4 have the same; the draft has 4."""
    for rank in range(size):
        ours = make_pools(layouts=[layout.part_of(Shard(rank, size)) for layout in LAYOUTS])
        for source, part in page_parts(LAYOUTS, num_sources, Shard(rank, size)).items():
            theirs = make_pools(10 + source, [layout.part_of(Shard(source, num_sources)) for layout in LAYOUTS])
            first = theirs.first
            mapping = ours.pool.map([first, first + 1], [kv.nbytes for kv in theirs.kvs], NUM_PAGES, part)
            gather = ours.pool.gather(mapping, [3, 4], [7, 9])
            gather.wait()
            assert gather.checksums() == ours.pool.digest([7, 9])
            for old, there, pool in zip(ours.before, theirs.kvs, part.pools, strict=True):
                for start, target, num_bytes in pool.spans:
                    copied = there[:, [0, 3, 4], start : start + num_bytes]  # page 0 when the pools were mapped
                    old[:, [0, 7, 9], target : target + num_bytes] = copied
            places = blocks_here(part, [each.layout for each in ours.memory])
            here, there = (np.frombuffer(pools.pool.digest([page])[0]) for pools, page in ((ours, 9), (theirs, 4)))
            held = digest_columns(LAYOUTS, Shard(source, num_sources)).tolist()
            wanted = digest_columns(LAYOUTS, Shard(rank, size))[places]
            assert here[places].tobytes() == there[[held.index(column) for column in wanted]].tobytes()
            assert theirs.is_unchanged()
        assert ours.is_unchanged(), "all its heads came, to their places, and nothing else was written"


def test_parts_of_words_cannot_be_gathered() -> None:
    layout = KvLayout.of(pool_of(1, "bfloat16", [KvPlane("k", num_heads=2, head_dim=1, dtype="bfloat16")]), 1)
    with pytest.raises(AssertionError, match="a block on a GPU is copied by words"):
        word_spans(page_parts([layout], 1, Shard(1, 2))[0])


def test_gathers_under_way_do_not_share_their_numbers(make_pools: MakePools) -> None:
    """The device reads page numbers and writes checksums in pinned memory, until the checksums have been read."""
    ours, theirs, mapping = pair(make_pools)
    first = ours.pool.gather(mapping, [3], [7])
    second = ours.pool.gather(mapping, [4], [8])
    for gather in (second, first):
        gather.wait()
    assert second.checksums() == theirs.pool.digest([4])
    third = ours.pool.gather(mapping, [5], [9])  # where the second was
    assert second.is_done and not third.is_done
    third.wait()
    assert first.checksums() == theirs.pool.digest([3]) and second.checksums() == theirs.pool.digest([4])
    assert third.checksums() == theirs.pool.digest([5])


def test_pinned_memory_is_used_again_after_small_launches_only(make_pools: MakePools) -> None:
    ours, _, mapping = pair(make_pools)
    for num_pages, is_kept in ((3, True), (16, True), (17, False)):
        counts: list[int] = []
        for _ in range(3):
            before = ours.cuda.num_pinned
            gather = ours.pool.gather(mapping, range(num_pages), range(num_pages))
            gather.wait()
            gather.checksums()
            gather.checksums()  # a second look gives nothing back twice
            counts.append(ours.cuda.num_pinned - before)
        assert counts[0] > 0 and [count == 0 for count in counts[1:]] == [is_kept] * 2, (num_pages, counts)
        assert len(ours.pool._slips.get(num_pages, [])) == int(is_kept)


def waits_of(pools: Pools, act: Callable[[], object]) -> list[str]:
    """Return the events that the stream of the handoff waits for while `act` runs."""
    pools.cuda.log.clear()
    act()
    return [which for who, what, which in pools.cuda.log if (who, what) == (pools.stream, "waits for")]


@pytest.mark.parametrize("way", ["gather", "load"])
def test_pages_are_written_after_the_work_that_was_submitted_before_they_were_expected(
    way: str, make_pools: MakePools
) -> None:
    ours, _, mapping = pair(make_pools)

    def write(*pages: int) -> None:
        if way == "gather":
            ours.pool.gather(mapping, pages, pages)
        else:
            ours.pool.load(pages)

    ours.pool.expect([5, 6])
    ours.pool.expect([7])
    recorded = [which for who, what, which in ours.cuda.log if (who, what) == ("main", "records")]
    assert len(recorded) == 2
    assert waits_of(ours, lambda: write(9)) == []
    assert waits_of(ours, lambda: write(5, 6, 7)) == recorded  # once per event
    assert waits_of(ours, lambda: write(5, 6, 7)) == []


def test_nothing_waits_for_work_that_is_done(make_pools: MakePools, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, mapping = pair(make_pools)
    ours.pool.expect([5])
    monkeypatch.setattr(HostEvent, "query", lambda _: True)
    assert waits_of(ours, lambda: ours.pool.gather(mapping, [1], [5])) == []


# --- mappings ---


def test_a_mapping_is_closed_after_the_gathers_from_it(make_pools: MakePools) -> None:
    ours, _, mapping = pair(make_pools)
    mapping.close()
    mapping.close()
    wait = ("host", "waits for", ours.stream)
    assert ours.cuda.log == [wait, ("host", "unmaps", "2"), ("host", "unmaps", "3"), wait]


@pytest.mark.parametrize(
    ("descriptors", "missing", "words"),
    [
        ((2, 3), (1, 0), "peer's pool has .* bytes, 40 pages of this layout have"),
        ((2, 3), (0, 1), "peer's pool has .* bytes, 40 pages of this layout have"),
        ((2, -1), (0, 0), "cannot map the peer's pools: no such descriptor"),
        ((2,), (0, 0), "cannot map the peer's pools"),
    ],
)
def test_a_pool_that_cannot_be_mapped_leaves_nothing_mapped(
    descriptors: tuple[int, ...], missing: tuple[int, int], words: str, make_pools: MakePools
) -> None:
    ours, theirs = make_pools(0), make_pools(1)
    sizes = [kv.nbytes - less for kv, less in zip(theirs.kvs, missing, strict=True)]
    with pytest.raises(TransferError, match=words):
        ours.pool.map(descriptors, sizes, NUM_PAGES)
    mapped, unmapped = ([which for _, what, which in ours.cuda.log if what == each] for each in ("maps", "unmaps"))
    assert mapped == unmapped and len(mapped) == (0 if missing[0] else 1)


def test_without_triton_no_peers_pool_can_be_read(make_pools: MakePools, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_pools()
    monkeypatch.setattr(cuda_pool, "has_kernels", lambda: False)
    with pytest.raises(TransferError, match="triton is not installed"):
        ours.pool.map([0, 1], [1 << 30] * 2, NUM_PAGES)


def test_pools_that_cannot_be_shared_are_not_offered(make_pools: MakePools, caplog: pytest.LogCaptureFixture) -> None:
    """The node serves all the same, by way of the host."""
    assert make_pools().pool.shared == ()
    assert "the pools cannot be shared" in caplog.text and "pages travel by way of the host" in caplog.text


# --- out of memory ---


@pytest.mark.parametrize("num_pages", [3, 20])
@pytest.mark.parametrize("name", ["gather", "digest", "store", "load"])
def test_work_without_memory_is_a_plain_error_after_which_no_page_is_written(
    name: str, num_pages: int, make_pools: MakePools
) -> None:
    """The error holds no tensor of the work. With memory, the same work succeeds."""
    ours, theirs, mapping = pair(make_pools)
    pages = [*range(1, num_pages + 1)]
    for memory in ours.memory:
        memory.pages[:, pages] = 7
    work = {
        "gather": lambda: ours.pool.gather(mapping, pages, pages),
        "digest": lambda: ours.pool.digest(pages),
        "store": lambda: ours.pool.store(pages),
        "load": lambda: ours.pool.load(pages),
    }[name]
    with MemoryLimit(64) as memory, pytest.raises(OutOfMemory, match=f" {num_pages} pages.* of a handoff") as caught:
        work()
    assert memory.num_failures == 1 and memory.num_bytes == 0
    assert caught.value.__context__ is None and ours.cuda.log[-1] == ("host", "waits for", ours.stream)
    assert name == "load" or ours.is_unchanged()
    work()
    if name == "store":
        assert all(np.array_equal(m.pages[:, pages], kv[:, pages]) for m, kv in zip(ours.memory, ours.kvs, strict=True))
    elif name == "load":
        assert all((kv[:, pages] == 7).all() for kv in ours.kvs)
    elif name == "gather":
        assert all(torch.equal(a[:, pages], b[:, pages]) for a, b in zip(ours.kvs, theirs.kvs, strict=True))
