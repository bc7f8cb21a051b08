"""Places of host memory that two nodes share. Both tell of a pool as /proc/PID/fd/FD, with its size.

If the decode node's inbox is in the prefill node's reach, the prefill node sends descriptors of the pools there, which
work whatever namespaces the two nodes are in; the places are then the decode node's own. Peers of protocols before 8
open the prefill node's /proc/PID/fd/FD instead, for which both need the same process namespace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from typing import NamedTuple

from ..errors import TransferError
from ..wire.data_link import LinkWelcome, RankWelcome
from ..wire.node_info import HostMemory
from .descriptor_inbox import DescriptorInbox, new_token, send_descriptors


class MemoryPlace(NamedTuple):
    """A pool in host memory: descriptor `fd` of process `pid`, `size` bytes."""

    pid: int
    fd: int
    size: int


def send_memory(inbox: str, pools: Sequence[HostMemory]) -> bytes:
    """Put descriptors of pools of this node, for reading, into an inbox in reach. Return their token. Raises
    TransferError if that fails."""
    token = new_token()
    with contextlib.ExitStack() as opened:
        descriptors: list[int] = []
        try:
            for pool in pools:
                descriptors.append(os.open(f"/proc/{pool.pid}/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, descriptors[-1])
        except OSError as error:
            raise TransferError(f"cannot open this node's own pools: {error.strerror}") from error
        send_descriptors(inbox, token, descriptors)
    return token


@contextlib.contextmanager
def memory_places(inbox: DescriptorInbox | None, welcome: LinkWelcome) -> Generator[list[MemoryPlace]]:
    """Yield the places of the pools that a welcome names: its `fds`, then the generations of rank 0, if another rank
    has said it. They are valid in the block. Raises TransferError if their descriptors have not come to our inbox."""
    places = [MemoryPlace(welcome.pid, fd, size) for fd, size in zip(welcome.fds, welcome.sizes, strict=False)]
    if isinstance(welcome, RankWelcome):
        first = welcome.generations
        places.append(MemoryPlace(first.pid, first.fd, first.size))
    if not welcome.token:
        yield places
        return
    if inbox is None:
        raise TransferError(f"prefill node {welcome.node_id} has sent descriptors, and this node has no inbox")
    descriptors = inbox.take(welcome.token)
    try:
        if len(descriptors) != len(places):
            raise TransferError(f"prefill node {welcome.node_id} names {len(places)} pools and sent {len(descriptors)}")
        own = os.getpid()
        yield [MemoryPlace(own, fd, place.size) for fd, place in zip(descriptors, places, strict=True)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
