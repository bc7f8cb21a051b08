"""Memory that other processes map: they read it, and whoever writes it faults, not the owner."""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from baton.engine.state.cuda_memory import can_share, map_shared, share, shareable_zeros
from baton.kernels.state.pages import PoolAddress
from baton.metadata.errors import TransferError
from baton.metadata.handoff.descriptor_inbox import DescriptorInbox, new_token, send_descriptors

DEVICE = torch.device("cuda:0")
NUM_WORDS = 3 << 20  # no multiple of what CUDA allocates


@triton.jit
def _write_kernel(target, value):
    tl.store(target + tl.program_id(0), value)


@triton.jit
def _read_kernel(source, target):
    tl.store(target + tl.program_id(0), tl.load(source + tl.program_id(0)))


class _Bytes:
    """Foreign memory as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def act(pipe: Connection, how: str, device: str) -> None:
    """A peer: maps what it is sent, reads it, then writes it as `how` says, and reports what came of it."""
    inbox = DescriptorInbox()
    pipe.send(inbox.address)
    token, size = pipe.recv()
    [descriptor] = inbox.take(token)
    here = torch.device(device)
    mapping = map_shared(descriptor, size, here)
    os.close(descriptor)
    with torch.cuda.device(here):
        address = PoolAddress(mapping.address, 0)
        read = torch.zeros(64, dtype=torch.int32, device=here)
        _read_kernel[(64,)](address, read)
        pipe.send(read.tolist())
        try:
            if how == "kernel":
                _write_kernel[(64,)](address, 7)
            elif how == "copy":
                torch.as_tensor(_Bytes(mapping.address, size), device=here)[:256].copy_(torch.ones(256, device=here))
            elif how == "fill":
                torch.as_tensor(_Bytes(mapping.address, size), device=here).fill_(7)
            torch.cuda.synchronize(here)
            mapping.close()
            pipe.send("nothing happened")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def run_peer(how: str, tensor: torch.Tensor, device: str) -> tuple[list[int], str]:
    """What the peer reads, and what its write ends in."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=act, args=(theirs, how, device), daemon=True)
    process.start()
    theirs.close()
    try:
        shared, token = share(tensor), new_token()
        send_descriptors(pipe.recv(), token, [shared.descriptor])
        os.close(shared.descriptor)
        pipe.send((token, shared.size))
        return pipe.recv(), pipe.recv()
    finally:
        process.join(60)
        process.kill()
        process.join()


def peers() -> list[Any]:
    two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
    return ["cuda:0", pytest.param("cuda:1", marks=two)]


@pytest.mark.parametrize("device", peers())
@pytest.mark.parametrize("how", ["kernel", "copy", "fill", "nothing"])
def test_a_write_faults_in_the_writer_and_the_owner_goes_on(how: str, device: str) -> None:
    assert can_share(DEVICE)
    tensor = shareable_zeros((NUM_WORDS,), torch.int32, DEVICE)
    tensor.copy_(torch.arange(NUM_WORDS))
    torch.cuda.synchronize()
    read, ended = run_peer(how, tensor, device)
    assert read == list(range(64))
    if how == "nothing":
        assert ended == "nothing happened"
    else:
        assert "CUDA" in ended or "CUresult" in ended, ended
        assert "illegal" in ended or "invalid" in ended or "access" in ended, ended
    assert torch.equal(tensor.cpu(), torch.arange(NUM_WORDS, dtype=torch.int32))
    tensor += 1  # the owner's own context is as it was
    assert int(tensor[-1]) == NUM_WORDS


def test_memory_comes_back_with_the_last_tensor_that_looks_at_it() -> None:
    gc.collect()  # what other tests left open
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(DEVICE)[0]
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tensor = shareable_zeros((64 << 20,), torch.float32, DEVICE)
    shared = share(tensor)
    mapping = map_shared(shared.descriptor, shared.size, DEVICE)
    os.close(shared.descriptor)
    view = tensor.view(64, -1)[3]
    del tensor
    gc.collect()
    view.fill_(2.0)
    assert float(view.sum()) == 2.0 * view.numel()
    assert before - torch.cuda.mem_get_info(DEVICE)[0] >= 256 << 20
    del view
    gc.collect()
    assert before - torch.cuda.mem_get_info(DEVICE)[0] >= 256 << 20, "a peer maps it still"
    mapping.close()
    mapping.close()
    assert before - torch.cuda.mem_get_info(DEVICE)[0] < 64 << 20
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208


def test_a_full_device_is_out_of_memory() -> None:
    free = torch.cuda.mem_get_info(DEVICE)[0]
    with pytest.raises(torch.OutOfMemoryError):
        shareable_zeros((2 * free,), torch.uint8, DEVICE)


def test_torch_gives_back_what_it_does_not_use_before_the_device_counts_as_full() -> None:
    free = torch.cuda.mem_get_info(DEVICE)[0]
    torch.empty(int(free * 0.8), dtype=torch.uint8, device=DEVICE)
    tensor = shareable_zeros((int(free * 0.6),), torch.uint8, DEVICE)
    assert int(tensor[-1]) == 0


def test_what_torch_allocated_is_not_shared() -> None:
    with pytest.raises(TransferError, match="torch allocated"):
        share(torch.zeros(16, device=DEVICE))
    with pytest.raises(TransferError, match="torch allocated"):
        share(shareable_zeros((1 << 20,), torch.uint8, DEVICE)[256:])


def test_only_device_memory_is_mapped() -> None:
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        for descriptor in (read, null):
            with pytest.raises(TransferError):
                map_shared(descriptor, 2 << 20, DEVICE)
        shared = share(tensor := shareable_zeros((1 << 20,), torch.uint8, DEVICE))
        with pytest.raises(TransferError):
            map_shared(shared.descriptor, shared.size * 8, DEVICE)  # more than there is
        os.close(shared.descriptor)
        assert int(tensor.sum()) == 0
    finally:
        for descriptor in (read, write, null):
            os.close(descriptor)
