"""Faults on purpose: spoils this process's messages, pages, clock and life as a plan file says. For tests/chaos only.

Nothing imports this module but the command line, and that only where the environment names a plan file: whoever sets
the environment of a process could as well kill it, and no peer can. The plan (`Plan`, as JSON) is read again whenever
the file changes; each fault is a line in the file beside it, written before the fault takes effect.

`replacements` lists what takes the place of what: the bus's wire, through which every message of the product passes
(bus.py); `step` and `receive` of every transport; `time.monotonic`, also where a function of ours has it as a default.

Messages are spoilt where a DEALER sends or receives them. One end of every connection is a DEALER (a node's link to the
router, its heartbeat, the decode node's data links), so this covers both directions of all of them, and each once.
Strikes count what a ROUTER sends or receives as well. A message that is held back wakes the loop that polls its socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import zmq
from msgspec import Struct

from baton.metadata.bus import sockets as bus
from baton.metadata.wire.frames import unseal

HOLD_S = 0.25  # the longest that a message is held back
_REREAD_S = 0.02
_real_monotonic = time.monotonic
_real_poll = zmq.Poller.poll

Way = Literal["in", "out"]
Kind = Literal["drop", "duplicate", "reorder", "delay", "truncate", "flip", "full"]


class Strike(Struct, frozen=True, forbid_unknown_fields=True):
    """The process sends itself `signal` when `event` happens once more after `skip` times: `in:TAG` or `out:TAG` for a
    message that it takes or gives, `pull` for a page that has landed. Once for each `number`."""

    number: int
    event: str
    signal: int = signal.SIGKILL
    skip: int = 0


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan of faults. Shares are probabilities per message or page."""

    seed: int = 0
    frames: dict[Kind, float] = {}
    weights: dict[Way, float] = {}  # by which the shares of `frames` are multiplied on one way; none: 1
    tags: tuple[str, ...] = ()  # messages that `frames` is for; none: all
    most: int = 1 << 30  # of each: messages that come, messages that go, pages
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
        self._num_spoilt: Counter[str] = Counter()  # under this plan
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

    def choose(self, shares: Mapping[Any, float], of: Way | Literal["page"]) -> str | None:
        """The kind of fault that befalls one message or page, if one does."""
        if not shares or self._num_spoilt[of] >= self._plan.most:
            return None
        drawn = self.random.random()
        for kind, share in shares.items():
            drawn -= share
            if drawn < 0:
                self._num_spoilt[of] += 1
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
        self._plan = plan
        self._num_spoilt.clear()
        self.random.seed(plan.seed)


class _Held(NamedTuple):
    frames: Sequence[Any]
    until: float  # monotonic seconds


@dataclass(slots=True)
class _End:
    """Messages of one socket that the injector holds."""

    coming: deque[list[Any]] = field(default_factory=deque[list[Any]])  # received, to be handed out
    held: dict[Way, list[_Held]] = field(default_factory=lambda: {"in": [], "out": []})

    def due(self, way: Way) -> list[Any]:
        """Takes out what was held back long enough."""
        now, held = _real_monotonic(), self.held[way]
        self.held[way] = [each for each in held if each.until > now]
        return [each.frames for each in held if each.until <= now]

    @property
    def wakes_at(self) -> float:
        """When somebody must look at the socket again, whether it has input or not."""
        if self.coming:
            return 0.0
        return min((each.until for held in self.held.values() for each in held), default=float("inf"))


class FaultyWire(bus.Wire):
    """A wire that loses, doubles, swaps, delays, cuts and flips messages, and refuses to take some."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._ends: WeakKeyDictionary[zmq.Socket[bytes], _End] = WeakKeyDictionary()

    def connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        super().connect(socket, self._faults.plan.connect.get(address, address))

    def send(self, socket: zmq.Socket[bytes], frames: Sequence[Any], *, track: bool) -> zmq.MessageTracker | None:
        if socket.type != zmq.DEALER:
            self._watch("out", frames[1:])
            return super().send(socket, frames, track=track)
        end = self._end(socket)
        for each in self._spoilt(end, "out", frames):
            super().send(socket, each, track=False)
        self._send_due(socket, end)
        return None

    def receive(self, socket: zmq.Socket[bytes], most: int, *, copy: bool) -> list[Any]:
        if socket.type != zmq.DEALER:
            frames = super().receive(socket, most, copy=copy)
            self._watch("in", frames[1:])
            return frames
        end = self._end(socket)
        self._send_due(socket, end)
        end.coming.extend(end.due("in"))
        while not end.coming:
            frames = super().receive(socket, most, copy=copy)
            end.coming.extend(self._spoilt(end, "in", frames))
        return end.coming.popleft()

    def poll(self, poller: zmq.Poller, timeout: int | None = None) -> list[tuple[Any, int]]:
        """As `zmq.Poller.poll`, at most until a message that is held back at one of its sockets is due."""
        ends = [self._ends[each] for each, _ in poller.sockets if each in self._ends]
        wakes_at = min((end.wakes_at for end in ends), default=float("inf"))
        if wakes_at < float("inf"):
            most = max(0, int(1000 * (wakes_at - _real_monotonic())) + 1)
            timeout = most if timeout is None or timeout < 0 else min(most, int(timeout))
        return _real_poll(poller, timeout)

    def _end(self, socket: zmq.Socket[bytes]) -> _End:
        return self._ends.setdefault(socket, _End())

    def _send_due(self, socket: zmq.Socket[bytes], end: _End) -> None:
        for frames in end.due("out"):
            with contextlib.suppress(zmq.Again):  # there is no room for it now: it is lost
                super().send(socket, frames, track=False)

    def _watch(self, way: Way, frames: Sequence[Any]) -> tuple[str, int]:
        """What message it is, and of which attempt. It may be the process's last."""
        tag, attempt = _tag(_bytes(frames[0])) if frames else ("?", 0)
        self._faults.reach(f"{way}:{tag}", attempt)
        return tag, attempt

    def _spoilt(self, end: _End, way: Way, frames: Sequence[Any]) -> list[Any]:
        """The messages that take this one's place."""
        tag, attempt = self._watch(way, frames)
        plan = self._faults.plan
        weight = plan.weights.get(way, 1.0) if not plan.tags or tag in plan.tags else 0.0
        shares = {
            kind: weight * share for kind, share in plan.frames.items() if weight and (way, kind) != ("in", "full")
        }
        kind = self._faults.choose(shares, way)
        if kind is None:
            return [frames]
        self._faults.note(kind, f"{way}:{tag}", attempt)
        match kind:
            case "full":
                raise zmq.Again
            case "drop":
                return []
            case "duplicate":
                return [frames, frames]
            case "reorder" | "delay":
                hold_s = HOLD_S if kind == "delay" else HOLD_S / 10
                until = _real_monotonic() + hold_s * self._faults.random.random()
                end.held[way].append(_Held(frames, until))
                return []
            case _:
                return [_damaged(frames, kind, self._faults.random)]


def switch_on(path: str) -> None:
    """Makes this process faulty from now on."""
    for owner, name, value in replacements(Faults(Path(path))):
        setattr(owner, name, value)


def replacements(faults: Faults) -> Iterator[tuple[Any, str, Any]]:
    """Yield what makes a process faulty: owner, name, and replacement."""
    from baton.metadata.handoff.transports.cuda import CudaTransport
    from baton.metadata.handoff.transports.local import LocalTransport
    from baton.metadata.handoff.transports.zmq import ZmqTransport

    wire = FaultyWire(faults)
    yield bus, "wire", wire
    yield zmq.Poller, "poll", _polling(wire)
    for transport in (CudaTransport, LocalTransport, ZmqTransport):
        for name in ("step", "receive"):
            yield transport, name, _spoiling(getattr(transport, name), faults)
    yield time, "monotonic", faults.monotonic
    for function in _our_functions():
        defaults = function.__defaults__ or ()
        if _real_monotonic in defaults:
            clocks = (faults.monotonic if each is _real_monotonic else each for each in defaults)
            yield function, "__defaults__", tuple(clocks)
        named: dict[str, Any] = function.__kwdefaults__ or {}
        if clocks_of := {name: faults.monotonic for name, each in named.items() if each is _real_monotonic}:
            yield function, "__kwdefaults__", named | clocks_of


def _polling(wire: FaultyWire) -> Callable[..., list[tuple[Any, int]]]:
    def poll(poller: zmq.Poller, timeout: int | None = None) -> list[tuple[Any, int]]:
        return wire.poll(poller, timeout)

    return poll


def _our_functions() -> Iterator[FunctionType]:
    """Functions and methods of the modules of ours that are imported already."""
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if name.partition(".")[0] == "baton":
            classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
            for owner in (module, *classes):
                yield from (each for each in vars(owner).values() if isinstance(each, FunctionType))


def _spoiling(move_pages: Callable[..., Iterator[Any]], faults: Faults) -> Callable[..., Iterator[Any]]:
    """Decorates a method that yields pages as they land."""

    def spoil(transport: Any, *args: Any) -> Iterator[Any]:
        for landed in move_pages(transport, *args):
            move = landed.move
            faults.reach("pull", move.unit.attempt)
            kind = faults.choose(faults.plan.pages, "page")
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


def _damaged(frames: Sequence[Any], kind: str, rng: random.Random) -> list[Any]:
    """One of the frames cut short, or with one bit flipped. The others are those that came, with what libzmq says of
    their sender."""
    place = rng.randrange(len(frames))
    frame = bytearray(_bytes(frames[place]))
    if kind == "truncate":
        del frame[rng.randrange(max(1, len(frame))) :]
    elif frame:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    damaged = bytes(frame)
    return [
        *frames[:place],
        zmq.Frame(damaged) if isinstance(frames[place], zmq.Frame) else damaged,
        *frames[place + 1 :],
    ]


def _bytes(frame: Any) -> bytes:
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)


def _tag(frame: bytes) -> tuple[str, int]:
    """What message it is, and of which attempt; ("?", 0) for what is none."""
    try:
        fields: Any = msgspec.msgpack.decode(unseal(frame) or b"")
        unit = fields.get("unit") or next(iter(fields.get("units", ())), (None, 0, 0))
        return fields["type"], fields.get("attempt", unit[2])
    except (msgspec.MsgspecError, AttributeError, LookupError, TypeError):
        return "?", 0
