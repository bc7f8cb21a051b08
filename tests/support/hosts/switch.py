"""A switch between hosts that are network namespaces, in user space, with faults per direction.

    python switch.py DIRECTORY '[["router", ["10.77.0.1/24", "fd77::1/64"]], ...]'

Each host gets a network namespace with a TAP device, whose other end the switch has, and a mount namespace in which
DIRECTORY/hosts is /etc/hosts. A first line of output names them: `PID NET MOUNTS NET MOUNTS ...`, descriptors of this
process, in the order of the hosts. Nothing of them is left when the switch and the processes in them have ended.

Commands are lines of JSON at standard input, and each is answered by a line:

    {"source": 0, "target": 1, "conditions": {"delay_s": 0.02, "loss": 0.01}}   how frames from host 0 to host 1 travel
    {"counts": true}                                     answered by [[source, target, forwarded, dropped], ...]

The kernel here has no netem, and a TCP proxy could lose no packet: the ends would not see what a network does to TCP.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from namespaces import BIND, NEW_MOUNTS, NEW_NETWORK, PRIVATE, mount, unshare

DEVICE = "eth0"
QUEUE_S = 0.5  # frames that would wait for longer, at the rate of their direction, are dropped
LATE_S = (0.01, 0.03)  # by how much a reordered frame is late, at least and at most
_ETHERNET_BYTES = 14
_LARGEST_FRAME = 65_536
_FRAMES_AT_A_TIME = 64  # of one host, before the others have their turn
_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


@dataclass(frozen=True, slots=True)
class Conditions:
    """How frames travel in one direction between two hosts."""

    delay_s: float = 0.0
    loss: float = 0.0  # probability that a frame is lost
    reorder: float = 0.0  # probability that a frame comes late (LATE_S)
    rate: float = 0.0  # bytes per second; 0: no limit
    mtu: int = 0  # a larger IP packet is lost, and its sender is not told; 0: no limit
    is_cut: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a command has them."""
        return asdict(self)


@dataclass(slots=True)
class Direction:
    """The frames from one host to another one."""

    conditions: Conditions = Conditions()
    busy_until: float = 0.0  # when a frame that comes now would begin to be sent
    forwarded: int = 0
    dropped: int = 0

    def arrival(self, size: int, now: float, rng: random.Random) -> float | None:
        """Return when a frame of `size` bytes arrives that is sent now; None if it is lost."""
        is_, due = self.conditions, now
        if is_.is_cut or (is_.mtu and size - _ETHERNET_BYTES > is_.mtu) or (is_.loss and rng.random() < is_.loss):
            return None
        if is_.rate:
            begun = max(now, self.busy_until)
            if begun - now > QUEUE_S:
                return None
            due = self.busy_until = begun + size / is_.rate
        late_s = rng.uniform(*LATE_S) if is_.reorder and rng.random() < is_.reorder else 0.0
        return due + is_.delay_s + late_s


@dataclass(slots=True)
class Port:
    """The switch's end of a host: its TAP device, and the frames under way to it, by the time at which they arrive."""

    tap: int
    under_way: list[tuple[float, int, bytes]] = field(default_factory=list[tuple[float, int, bytes]])

    def deliver(self, now: float) -> None:
        """Give the host the frames that have arrived."""
        while self.under_way and self.under_way[0][0] <= now:
            self.write(heapq.heappop(self.under_way)[2])

    def write(self, frame: bytes) -> None:
        """Give the host a frame. It is lost if the host takes none."""
        with suppress(OSError):
            os.write(self.tap, frame)


class Switch:
    """Forwards frames between its ports until standard input ends."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._ports = [Port(tap) for tap in taps]
        self._directions = {
            ends: Direction() for ends in itertools.permutations(range(len(taps)), 2)
        }  # by source and target
        self._port_of: dict[bytes, int] = {}  # by hardware address
        self._rng = random.Random(7)
        self._numbers = itertools.count()
        self._by_tap = {tap: number for number, tap in enumerate(taps)}

    def run(self) -> None:
        poller = select.epoll()
        for descriptor in (0, *self._by_tap):
            poller.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in poller.poll(self._wait_s()):
                if descriptor:
                    self._read(self._by_tap[descriptor])
                elif not self._obey():
                    return
            now = time.monotonic()
            for port in self._ports:
                port.deliver(now)

    def _wait_s(self) -> float:
        firsts = [port.under_way[0][0] for port in self._ports if port.under_way]
        return max(0.0, min(firsts) - time.monotonic()) if firsts else -1.0

    def _read(self, source: int) -> None:
        """Forward frames that a host has sent."""
        for _ in range(_FRAMES_AT_A_TIME):
            try:
                frame = os.read(self._ports[source].tap, _LARGEST_FRAME)
            except BlockingIOError:
                return
            self._port_of[frame[6:12]] = source
            target = None if frame[0] & 1 else self._port_of.get(frame[:6])  # the first bit: to several hosts
            targets = range(len(self._ports)) if target is None else (target,)
            now = time.monotonic()
            for each in targets:
                if each != source:
                    self._forward(source, each, frame, now)

    def _forward(self, source: int, target: int, frame: bytes, now: float) -> None:
        direction, port = self._directions[source, target], self._ports[target]
        due = direction.arrival(len(frame), now, self._rng)
        if due is None:
            direction.dropped += 1
            return
        direction.forwarded += 1
        if due <= now and not port.under_way:
            port.write(frame)
        else:
            heapq.heappush(port.under_way, (due, next(self._numbers), frame))

    def _obey(self) -> bool:
        """Do the next command. Return False if standard input has ended."""
        line = _read_line()
        if not line:
            return False
        command = json.loads(line)
        answer: Any = "done"
        if "counts" in command:
            answer = [[*ends, each.forwarded, each.dropped] for ends, each in self._directions.items()]
        else:
            ends = command["source"], command["target"]
            self._directions[ends].conditions = Conditions(**command["conditions"])
        print(json.dumps(answer), flush=True)
        return True


def _read_line() -> bytes:
    """Return the next line of standard input, unbuffered, so that poll knows of the one behind it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def make_host(addresses: Sequence[str], names: Path) -> int:
    """Move this process into the namespaces of a new host. Return the switch's end of its TAP device. Raises OSError,
    and CalledProcessError if `ip` fails."""
    unshare(NEW_NETWORK | NEW_MOUNTS)
    mount("none", "/", flags=PRIVATE)
    mount(str(names), "/etc/hosts", flags=BIND)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI))
    lines = [f"address add {each} dev {DEVICE}{' nodad' * (':' in each)}" for each in addresses]
    lines += [f"link set {DEVICE} up", "link set lo up"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, capture_output=True)
    return tap


def main(directory: str, hosts: str) -> None:
    taps: list[int] = []
    namespaces: list[int] = []
    for _, addresses in json.loads(hosts):
        taps.append(make_host(addresses, Path(directory, "hosts")))
        namespaces += [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]
    print(os.getpid(), *namespaces, flush=True)
    Switch(taps).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
