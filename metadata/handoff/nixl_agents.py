"""Reads pages of another node by NIXL. The node that has the pages runs a `PoolAgent`, which lets others read its page
pools. The node that wants them runs a `RingAgent`, which reads them into a staging ring.

NIXL cannot cancel a read: bytes may land after the read's handle was released (ai-dynamo/nixl#2067). Therefore a read
never goes to a page of a pool. It goes to a slot of the ring, and the transport copies the page from there. If a read
is given up, its slot stays in *quarantine*, unused, until NIXL says that the read is over.

NIXL listens without authentication: whoever reaches its port and knows the pool's key can read the pool. So it listens
at the interface of the data link alone, and only operators who have said --plain-pages use it.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import TransferError

logger = logging.getLogger(__name__)

RING_BYTES = 64 << 20
MIN_SLOTS = 4
THREAD_WAKES_US = 1000  # NIXL's thread looks again after so long at the latest; at 0 it never sleeps
TCP_SEGMENT_BYTES = 256 << 10  # UCX answers a read over TCP in messages of this size, and by default of 8 KiB
_PACKAGES = ("nixl_cu13", "nixl_cu12")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def has_nixl() -> bool:
    """Return whether a package of NIXL is installed."""
    return any(find_spec(name) is not None for name in _PACKAGES)


def interface_of(host: str) -> str | None:
    """Return the name of the interface that has the IPv4 address `host`; None if there is none."""
    try:
        wanted = socket.inet_aton(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if found[20:24] == wanted:
                return name
    return None


MemoryKind = Literal["DRAM", "VRAM"]  # of the host, or of a GPU


class Region(NamedTuple):
    """Memory of this process that a peer may read."""

    address: int
    size: int  # bytes
    gpu: int = 0


class PoolAgent:
    """Lets peers read these pools, which must stay mapped until `close`. Raises TransferError if NIXL cannot."""

    def __init__(
        self, name: str, pools: Sequence[Region], kind: MemoryKind, generations: np.ndarray, host: str
    ) -> None:
        """`kind`: of the pools' memory. `generations`: of the pages, int64 [num_counted], in memory of the host.
        `host`: the address at which NIXL listens."""
        self.name, self.generations = name, int(generations.ctypes.data)
        self._agent = _make_agent(name, host)
        regions: dict[MemoryKind, list[Region]] = {"DRAM": [], "VRAM": []}
        regions[kind] += pools
        if not any(each.address <= self.generations < each.address + each.size for each in regions["DRAM"]):
            regions["DRAM"].append(Region(self.generations, generations.nbytes))
        try:
            self._registered = [
                self._agent.register_memory([(*each, "") for each in some], of) for of, some in regions.items() if some
            ]
            self.metadata = bytes(self._agent.get_agent_metadata())
        except Exception as error:  # NIXL's errors have no common class
            raise TransferError(f"NIXL cannot register the pools: {error}") from error

    def close(self) -> None:
        """End all reads of the pools, which may be unmapped then."""
        for each in self._registered:
            self._agent.deregister_memory(each)
        del self._agent


class _Abandoned(NamedTuple):
    handle: Any
    slot: int
    peer: str


class RingAgent:
    """Reads pages of peers into slots of a ring, each of `slot_bytes` bytes. One thread uses it."""

    def __init__(self, name: str, slot_bytes: int, host: str) -> None:
        self.slot_bytes, self.num_slots = slot_bytes, max(MIN_SLOTS, RING_BYTES // slot_bytes)
        self._ring = np.zeros((self.num_slots, slot_bytes), np.uint8)
        self._free = list(range(self.num_slots))
        self._quarantine: list[_Abandoned] = []
        self._leaving: set[str] = set()
        self._agent = _make_agent(name, host)
        try:
            self._agent.register_memory([(self._ring.ctypes.data, self._ring.nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise TransferError(f"NIXL cannot register the staging ring: {error}") from error

    @property
    def num_free(self) -> int:
        """Number of slots that no read has."""
        return len(self._free)

    def num_quarantined(self, peer: str | None = None) -> int:
        """Return the number of slots in quarantine because of a peer (None: of any)."""
        return sum(peer in (None, each.peer) for each in self._quarantine)

    def meet(self, name: str, metadata: bytes) -> None:
        """Take in a peer's metadata. Raises TransferError if they are not those of the agent `name`."""
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL cannot reach {name}: {error}") from error
        if bytes(found) != name.encode():
            raise TransferError(f"the metadata of NIXL are those of {bytes(found)[:80]!r}, not of {name}")
        self._leaving.discard(name)

    def leave(self, name: str) -> None:
        """Forget a peer, as soon as none of its reads is in quarantine."""
        self._leaving.add(name)
        self.sweep()

    def take(self) -> int | None:
        """Return a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Free a slot whose read is over."""
        self._free.append(slot)

    def bytes_of(self, slot: int) -> np.ndarray:
        """Return the bytes of a slot, uint8 [slot_bytes]."""
        return self._ring[slot]

    def read(
        self, peer: str, slot: int, sources: np.ndarray, at: np.ndarray, kind: MemoryKind = "DRAM", gpu: int = 0
    ) -> Any:
        """Begin to read `sources` (address, bytes; uint64 [n, 2]) of the peer to offsets `at` [n] of the slot. They lie
        in its memory of this kind. Return a handle. Raises TransferError; the slot is not the caller's then."""
        remote, local = (np.zeros((len(at), 3), np.uint64) for _ in range(2))
        remote[:, :2] = sources
        remote[:, 2] = gpu
        local[:, 0], local[:, 1] = np.uint64(self._ring[slot].ctypes.data) + at, sources[:, 1]
        agent, handle = self._agent, None
        try:
            descs = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, kind)
            handle = agent.initialize_xfer("READ", *descs, peer)
            agent.transfer(handle)
        except Exception as error:
            if handle is None:
                self._free.append(slot)
            else:
                self.abandon(peer, handle, slot)  # some of its bytes may be on the way
            raise TransferError(f"NIXL cannot read from {peer}: {error}") from error
        return handle

    def is_over(self, handle: Any) -> bool:
        """Return whether a read is done. Raises TransferError if it failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransferError(f"NIXL's read failed: {error}") from error
        if state == "ERR":
            raise TransferError("NIXL's read failed")
        return state == "DONE"

    def end(self, handle: Any) -> None:
        """Release the handle of a read that is over."""
        self._agent.release_xfer_handle(handle)

    def abandon(self, peer: str, handle: Any, slot: int) -> None:
        """Put the slot of a read that is not wanted any more into quarantine."""
        self._quarantine.append(_Abandoned(handle, slot, peer))
        self.sweep()

    def sweep(self) -> None:
        """Free the slots in quarantine whose reads are over, and forget peers that have left."""
        still: list[_Abandoned] = []
        for each in self._quarantine:
            try:
                is_over = self.is_over(each.handle)
            except TransferError:
                is_over = True  # a read that failed has closed its endpoint
            if is_over:
                self.end(each.handle)
                self._free.append(each.slot)
            else:
                still.append(each)
        self._quarantine = still
        for peer in [name for name in self._leaving if not self.num_quarantined(name)]:
            self._leaving.remove(peer)
            self._agent.remove_remote_agent(peer)


def _make_agent(name: str, host: str) -> Any:
    """Return an agent with a thread of NIXL's, by which reads go on while this process computes. The thread sleeps
    while nothing comes, for which the Python class of NIXL 1.5 has no option. Raises TransferError."""
    interface = interface_of(host)
    if interface is None:
        raise TransferError(f"NIXL has no interface with the address {host} to listen at")
    os.environ.setdefault("UCX_NET_DEVICES", interface)
    for option in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        os.environ.setdefault(option, str(TCP_SEGMENT_BYTES))
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = _api()
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, THREAD_WAKES_US
        agent.agent = api.nixlBind.nixlAgent(name, config)
        agent.create_backend("UCX")
    except Exception as error:
        raise TransferError(f"NIXL does not start: {error}") from error
    return agent


@cache
def _api() -> Any:
    for name in _PACKAGES:
        if find_spec(name) is not None:
            return importlib.import_module(f"{name}._api")
    raise TransferError("NIXL is not installed: pip install nixl-cu13, or nixl-cu12")
