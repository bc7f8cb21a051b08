"""Pools in sealed shared memory: the owner has views without copies, and every other process can only read."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.metadata.errors import ConfigError, TransferError
from baton.metadata.handoff.memory import F_SEAL_FUTURE_WRITE, PageMemory, PeerMemory, map_readonly, memory_size
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

LAYOUT = KvLayout.of(PoolLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"), 4)


@pytest.fixture
def pool():
    memory = PageMemory(LAYOUT, 5)
    yield memory
    memory.close()


def test_the_engines_tensor_is_a_view_of_it(pool):
    kv = torch.from_numpy(pool.pages).view(torch.float32).view(LAYOUT.stacked_shape(5))
    kv[1, 3, 0, 1] = 2.5
    block = pool.pages[1, 3].view(np.float32).reshape(2, 2, 4, 8)[0, 1]
    assert np.all(block == 2.5) and int((pool.pages != 0).any(axis=2).sum()) == 1


def test_a_peer_sees_later_writes_of_the_owner(pool):
    assert pool.is_shared and pool.fd is not None
    peer = PeerMemory(os.getpid(), pool.fd, pool.size, LAYOUT, 5)
    pool.pages[1, 4] = 7
    pool.generations[4] = 99
    assert np.all(peer.pages[1, 4] == 7) and peer.generations[4] == 99
    assert not peer.pages.flags.writeable and not peer.generations.flags.writeable
    peer.close()
    with pytest.raises(AttributeError):
        _ = peer.pages


def test_another_process_reads_but_can_neither_write_nor_resize(pool):
    program = f"""
import mmap, os
path = "/proc/{os.getpid()}/fd/{pool.fd}"
from baton.metadata.handoff.memory import map_readonly
assert map_readonly({os.getpid()}, {pool.fd}, {pool.size})[:3] == b"abc"
fd = os.open(path, os.O_RDWR)
for attempt in (lambda: mmap.mmap(fd, {pool.size}), lambda: os.pwrite(fd, b"x", 0),
                lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, {pool.size} * 2)):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit("not refused")
"""
    pool.pages[0, 0, :3] = list(b"abc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    pool.pages[0, 0, 0] = 1  # the owner still writes


def memfd(size: int, seals: int | None) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_nobody_else_may_map_it_for_writing():
    memory = PageMemory(LAYOUT, 5)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, memory.size)
    memory.close()


def test_only_a_sealed_pool_is_mapped(tmp_path):
    all_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
    plain = tmp_path / "file"
    plain.write_bytes(b"\0" * 4096)
    cases = [
        (memfd(4096, None), 4096, "not sealed"),
        (memfd(4096, all_seals & ~fcntl.F_SEAL_SHRINK), 4096, "not sealed"),
        (memfd(4096, all_seals), 8192, "4096 bytes, the peer said 8192"),
        (os.open(plain, os.O_RDONLY), 4096, "no memfd|not sealed"),
        (os.pipe()[0], 4096, "no pool of this user"),
        (10_000, 4096, "cannot open"),
    ]
    for fd, size, words in cases:
        with pytest.raises(TransferError, match=words):
            map_readonly(os.getpid(), fd, size)
        if fd < 10_000:
            os.close(fd)


def test_a_descriptor_that_is_no_file_of_this_user_is_not_opened(monkeypatch):
    """A peer may name any descriptor, also a terminal, a tape, or a pipe that another process reads."""
    reader, writer = os.pipe()
    real_open, opened = os.open, []

    def watch(path, flags, *more, **named):
        opened.append((str(path), flags))
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", watch)
    with pytest.raises(TransferError, match="no pool of this user"):
        map_readonly(os.getpid(), reader, 4096)
    assert [flags & os.O_PATH for _, flags in opened] == [os.O_PATH]
    os.close(reader)
    os.close(writer)


def num_descriptors(fd: int) -> int:
    """Return the descriptors of this process that name the same file; objects of other tests may close theirs."""
    file, found = os.fstat(fd), 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.path.samestat(os.fstat(int(each.name)), file)
    return found


def test_a_mapping_leaves_no_descriptor_behind(pool):
    before = num_descriptors(pool.fd)
    for size in (pool.size, pool.size - 1):
        try:
            map_readonly(os.getpid(), pool.fd, size).close()
        except TransferError:
            assert size != pool.size
    assert num_descriptors(pool.fd) == before


def test_a_size_that_does_not_fit_the_layout_is_refused_before_mapping(pool):
    assert pool.fd is not None
    with pytest.raises(TransferError, match="6 pages"):
        PeerMemory(os.getpid(), pool.fd, pool.size, LAYOUT, 6)


def test_without_memfd_the_pool_is_anonymous_and_says_so(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = PageMemory(LAYOUT, 5)
    assert not memory.is_shared and "Function not implemented" in caplog.text
    memory.pages[0, 1] = 3
    assert memory.pages.shape == (2, 5, 512) and memory.size == memory_size(LAYOUT, 5)
    memory.close()


def test_without_the_seals_the_pool_is_anonymous(monkeypatch, caplog):
    monkeypatch.setattr("baton.metadata.handoff.memory._OWNER_SEALS", 1 << 20)  # a seal this kernel does not know
    memory = PageMemory(LAYOUT, 5)
    assert not memory.is_shared and "no shared memory" in caplog.text
    memory.close()


def test_closing_with_a_tensor_alive_keeps_the_tensor_good(pool):
    memory = PageMemory(LAYOUT, 5)
    kv = torch.from_numpy(memory.pages)
    memory.close()
    kv.fill_(5)
    assert int(kv.sum()) == 5 * kv.numel()


def test_more_pages_than_the_machine_has_memory_for_is_a_plain_error():
    with pytest.raises(ConfigError, match="--num-pages"):
        PageMemory(LAYOUT, 10**12)
