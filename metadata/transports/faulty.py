"""Faults on purpose: spoils this process's messages, pages, clock and life as a plan file says. For tests/chaos only.

Nothing imports this module but the command line, and that only where the environment names a plan file: whoever sets
the environment of a process could as well kill it, and no peer can. The plan (`Plan`, as JSON) is read again whenever
the file changes; each fault is a line in the file beside it, written before the fault takes effect.

What is decorated: `send` and `recv_multipart` of every DEALER socket (a node's link to the router, its heartbeat, the
decode node's data links: so both directions of every connection), `step` and `receive` of every transport, and
`time.monotonic`; a strike may also wait for what a ROUTER socket (a prefill node's data links) takes. Call `switch_on`
before any module that takes the clock as a default is imported.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
import zmq
from msgspec import Struct

from ..seal import unseal

HOLD_S = 0.25  # the longest that a frame is held back
_REREAD_S = 0.02
_real_monotonic = time.monotonic

Way = Literal["in", "out"]


class Strike(Struct, frozen=True, forbid_unknown_fields=True):
    """The process sends itself `signal` when `event` happens once more after `skip` times: `in:TAG` or `out:TAG` for a
    message that it takes or gives, `pull` for a page that has landed. Once for each `number`."""

    number: int
    event: str
    signal: int = signal.SIGKILL
    skip: int = 0


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """What to spoil. Shares are probabilities a frame or page."""

    seed: int = 0
    frames: dict[Literal["drop", "duplicate", "reorder", "delay", "truncate", "flip", "full"], float] = {}
    tags: tuple[str, ...] = ()  # messages that `frames` is for; none: all
    most: int = 1 << 30  # frames and pages spoilt under this plan, each way of a socket having its own count
    pages: dict[Literal["flip", "stale", "slow"], float] = {}
    clock_s: float = 0.0  # the monotonic clock is ahead by so much; never less than it was before
    connect: dict[str, str] = {}  # where connections to an address go instead
    strike: Strike | None = None


class Faults:
    """The plan in force, and the record of what was done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record = os.open(path.with_suffix(".faults"), os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        self._read_at = self._changed_at = 0.0
        self._plan = Plan()
        self._num_left = 0
        self._num_struck = 0  # the number of the last strike that is over
        self._skip = 0
        self._clock_s = 0.0
        self.random = random.Random()

    @property
    def plan(self) -> Plan:
        """What holds now."""
        now = _real_monotonic()
        if now - self._read_at > _REREAD_S:
            self._read_at = now
            changed_at = self._path.stat().st_mtime
            if changed_at != self._changed_at:
                self._changed_at = changed_at
                self._take(msgspec.json.decode(self._path.read_bytes(), type=Plan))
        return self._plan

    def monotonic(self) -> float:
        """The clock as this process sees it."""
        return _real_monotonic() + max(self._clock_s, self.plan.clock_s)

    def choose(self, shares: dict[Any, float]) -> str | None:
        """The kind of fault that befalls one frame or page, if one does."""
        if not shares or self._num_left <= 0:
            return None
        drawn = self.random.random()
        for kind, share in shares.items():
            drawn -= share
            if drawn < 0:
                self._num_left -= 1
                return kind
        return None

    def note(self, kind: str, where: str, attempt: int = 0) -> None:
        """Records a fault."""
        line = {"at": time.time(), "kind": kind, "where": where, "attempt": attempt}
        os.write(self._record, json.dumps(line).encode() + b"\n")

    def reach(self, event: str, attempt: int = 0) -> None:
        """The process is at this point; it may be its last."""
        strike = self.plan.strike
        if strike is None or strike.number == self._num_struck or strike.event != event:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        self._num_struck = strike.number
        self.note(signal.Signals(strike.signal).name, event, attempt)
        os.kill(os.getpid(), strike.signal)

    def _take(self, plan: Plan) -> None:
        self._clock_s = max(self._clock_s, self._plan.clock_s, plan.clock_s)
        if plan.clock_s > self._plan.clock_s:
            self.note("clock", f"{plan.clock_s:g} s ahead")
        if plan.strike is not None and plan.strike != self._plan.strike:
            self._skip = plan.strike.skip
        self._plan, self._num_left = plan, plan.most
        self.random.seed(plan.seed)


class _Held(NamedTuple):
    parts: list[Any]
    until: float


class FaultySocket(zmq.Socket[bytes]):
    """A DEALER that loses, doubles, swaps, delays, cuts and flips messages."""

    faults: Faults
    _coming: deque[list[Any]] | None = None  # received, to be handed out
    _held: dict[Way, list[_Held]] | None = None

    def connect(self, addr: str) -> Any:
        return super().connect(self.faults.plan.connect.get(addr, addr))

    def send(self, data: Any, flags: int = 0, *args: Any, **more: Any) -> Any:
        if self.type != zmq.DEALER:
            return cast(Any, super().send)(data, flags, *args, **more)
        for parts in [*self._spoilt("out", [bytes(data)]), *self._due("out")]:
            super().send(parts[0], flags)
        return None

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.type != zmq.DEALER:
            return self._watched(cast(Any, super().recv_multipart)(flags, copy, track))
        if self._coming is None:
            self._coming = deque()
        for parts in self._due("out"):
            super().send(parts[0], zmq.NOBLOCK)
        self._coming.extend(self._due("in"))
        while not self._coming:
            parts = super().recv_multipart(flags)
            self._coming.extend(self._spoilt("in", parts))
        parts = self._coming.popleft()
        return parts if copy else [zmq.Frame(part) for part in parts]

    def _watched(self, parts: list[Any]) -> list[Any]:
        if self.type == zmq.ROUTER and len(parts) == 2:
            tag, attempt = _tag(bytes(parts[1]))
            self.faults.reach(f"in:{tag}", attempt)
        return parts

    def _spoilt(self, way: Way, parts: list[bytes]) -> list[list[bytes]]:
        """The messages that take this one's place."""
        tag, attempt = _tag(parts[0])
        self.faults.reach(f"{way}:{tag}", attempt)
        plan = self.faults.plan
        kind = self.faults.choose(plan.frames) if not plan.tags or tag in plan.tags else None
        if kind is None or (kind == "full" and way == "in"):
            return [parts]
        self.faults.note(kind, f"{way}:{tag}", attempt)
        match kind:
            case "full":
                raise zmq.Again
            case "drop":
                return []
            case "duplicate":
                return [parts, parts]
            case "reorder" | "delay":
                hold_s = HOLD_S if kind == "delay" else HOLD_S / 10
                if self._held is None:
                    self._held = {"in": [], "out": []}
                self._held[way].append(_Held(parts, _real_monotonic() + hold_s * self.faults.random.random()))
                return []
            case _:
                return [_damaged(parts, kind, self.faults.random)]

    def _due(self, way: Way) -> list[list[bytes]]:
        """What was held back long enough."""
        if self._held is None or not self._held[way]:
            return []
        now, held = _real_monotonic(), self._held[way]
        self._held[way] = [each for each in held if each.until > now]
        return [each.parts for each in held if each.until <= now]


def switch_on(path: str) -> None:
    """Makes this process faulty from now on."""
    faults = FaultySocket.faults = Faults(Path(path))
    time.monotonic = faults.monotonic
    cast(Any, zmq.Context)._socket_class = FaultySocket
    from .cuda_ipc import CudaIpcTransport
    from .local import LocalTransport
    from .zmq import ZmqTransport

    for transport in (CudaIpcTransport, LocalTransport, ZmqTransport):
        for name in ("step", "receive"):
            setattr(transport, name, _spoiling(getattr(transport, name), faults))


def _spoiling(move_pages: Callable[..., Iterator[Any]], faults: Faults) -> Callable[..., Iterator[Any]]:
    """Decorates a method that yields pages as they land."""

    def spoil(transport: Any, *args: Any) -> Iterator[Any]:
        for landed in move_pages(transport, *args):
            move = landed.move
            faults.reach("pull", move.unit.attempt)
            kind = faults.choose(faults.plan.pages)
            if kind is not None:
                faults.note(f"page {kind}", "pull", move.unit.attempt)
            if kind == "flip":
                landed = _flipped(transport, landed, faults.random)
            elif kind == "slow":
                time.sleep(0.05 * faults.random.random())
            yield landed._replace(generation=landed.generation + 1) if kind == "stale" else landed

    return spoil


def _flipped(transport: Any, landed: Any, rng: random.Random) -> Any:
    """Our copy of the page with one bit changed, on a GPU by way of the host."""
    page, device = landed.move.target, getattr(transport, "device", None)
    if device is not None:
        device.store([page])
    pages = rng.choice(transport.memory).pages
    layer, byte = rng.randrange(pages.shape[0]), rng.randrange(pages.shape[2])
    pages[layer, page, byte] ^= 1 << rng.randrange(8)
    return landed if device is None else landed._replace(checksums=device.load([page])[0])


def _damaged(parts: list[bytes], kind: str, rng: random.Random) -> list[bytes]:
    """One of the frames cut short, or with one bit flipped."""
    place = rng.randrange(len(parts))
    frame = bytearray(parts[place])
    if kind == "truncate":
        del frame[rng.randrange(len(frame)) :]
    elif frame:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [*parts[:place], bytes(frame), *parts[place + 1 :]]


def _tag(frame: bytes) -> tuple[str, int]:
    """What message it is, and of which attempt; ("?", 0) for what is none."""
    try:
        fields: Any = msgspec.msgpack.decode(unseal(frame) or b"")
        unit = fields.get("unit") or next(iter(fields.get("units", ())), (None, 0, 0))
        return fields["type"], fields.get("attempt", unit[2])
    except (msgspec.MsgspecError, AttributeError, LookupError, TypeError):
        return "?", 0
