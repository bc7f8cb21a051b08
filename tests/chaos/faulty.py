"""The fault injector: damages messages, pages and the clock of its own process, or kills it, as a plan file says.

clusters/forked.py calls `switch_on` in a child process whose environment names a plan file. The injector reads the
plan (`Plan`, as JSON) again whenever the file changes. It writes one line per fault to the file beside the plan, before
the fault takes effect. The ranks of a node are faulty as the node is: all of them follow the same plan, apart from the
strikes.

`replacements` lists what the injector replaces: the wire of metadata/bus/sockets.py, through which every message of the
product passes; `step` and `receive` of every transport; reading and writing of cached files, and the step of the
prefix cache; `time.monotonic`, also as a default argument of Baton's
functions; the router's decision who computes a prompt; and what the other ranks of a node run.

Messages are damaged where a DEALER socket sends or receives them. One end of every connection is a DEALER (a node's
link to the router, its heartbeat, a decode node's data links), so each message in either direction can be damaged once.
A strike also counts messages of ROUTER sockets. A delayed message wakes the loop that polls its socket.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import zmq
from drawn_places import drawn_place
from msgspec import Struct

from baton.metadata.bus import sockets as bus
from baton.metadata.wire.frames import unseal

HOLD_S = 0.25  # longest delay of a message
_REREAD_S = 0.02
_real_monotonic = time.monotonic
_real_poll = zmq.Poller.poll

Way = Literal["in", "out"]
FileFault = Literal["full", "flip", "gone", "slow"]
Kind = Literal["drop", "duplicate", "reorder", "delay", "truncate", "flip", "full"]


class Strike(Struct, frozen=True, forbid_unknown_fields=True):
    """A signal that the process sends to itself when `event` has happened `skip` + 1 times.

    Events: `in:TAG` or `out:TAG`, a message received or sent; `pull`, a page received. Each `number` strikes once.
    """

    number: int
    event: str
    signal: int = signal.SIGKILL
    skip: int = 0


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """The faults to inject. Shares are probabilities per message or page."""

    seed: int = 0
    frames: dict[Kind, float] = {}
    weights: dict[Way, float] = {}  # factors of the shares in `frames`, by direction; default 1
    tags: tuple[str, ...] = ()  # message types that `frames` applies to; empty: all
    most: int = 1 << 30  # limit for each of: messages received, messages sent, pages, files, evictions
    pages: dict[Literal["flip", "stale", "slow"], float] = {}
    clock_s: float = 0.0  # how far the monotonic clock runs ahead; it never goes back
    connect: dict[str, str] = {}  # address: the address to connect to instead
    strike: Strike | None = None  # of a process that is no rank, or rank 0
    rank_strike: Strike | None = None  # of ranks 1 and above
    files: dict[FileFault, float] = {}  # of the disk cache: per file that is read, or (full, slow) written
    evicts: float = 0.0  # share of steps after which a node evicts all cached pages that nobody uses
    token_s: float | None = None  # in which computing a token is thought to take, where that is compared with reading
    places: int | None = None  # seed of the draws who computes a prompt (drawn_places.py); None: the router decides


class Faults:
    """The current plan, and the record of injected faults.

    All threads of the process read the clock or send messages, so any of them may find that the plan file is new. One
    lock makes reading a file and taking its plan one step: every file is taken once, and never after a newer one.
    """

    def __init__(self, path: Path, *, is_rank: bool = False) -> None:
        """`is_rank`: this process is rank 1 or above of a node."""
        self.path, self._is_rank = path, is_rank
        self._record = os.open(path.with_suffix(".faults"), os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        self._lock = threading.RLock()  # a finalizer may read the clock while its thread takes a plan
        self._read_at = 0.0
        self._file: tuple[int, int] | None = None  # which file the plan was taken from
        self._plan = Plan()
        self._num_spoilt: Counter[str] = Counter()  # under this plan
        self._num_struck = 0  # number of the last strike done
        self._skip = 0
        self._clock_s = 0.0
        self.random = random.Random()

    @property
    def plan(self) -> Plan:
        """The current plan, read again if the file has changed."""
        if _real_monotonic() - self._read_at > _REREAD_S:
            self.read()
        return self._plan

    def read(self) -> None:
        """Take the plan of the file now, unless it was taken from this file before."""
        with self._lock:
            self._read_at = _real_monotonic()
            if _identity(self.path.stat()) == self._file:
                return
            with self.path.open("rb") as file:
                self._file = _identity(os.fstat(file.fileno()))  # the path may name another file by now
                self._take(msgspec.json.decode(file.read(), type=Plan))

    def monotonic(self) -> float:
        """Return the time as this process sees it."""
        return _real_monotonic() + max(self._clock_s, self.plan.clock_s)

    def choose(self, shares: Mapping[Any, float], of: Way | Literal["page", "file", "cache"]) -> str | None:
        """Draw the kind of fault for one message, page, file or step, or None."""
        with self._lock:
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
        """Record a fault."""
        line = {"at": time.time(), "kind": kind, "where": where, "attempt": attempt}
        os.write(self._record, json.dumps(line).encode() + b"\n")

    def reach(self, event: str, attempt: int = 0) -> None:
        """Report that `event` happened. The process may get its strike here."""
        with self._lock:
            strike = self._strike_of(self.plan)
            if strike is None or strike.number == self._num_struck or strike.event != event:
                return
            if self._skip > 0:
                self._skip -= 1
                return
            self._num_struck = strike.number
        who = "rank " if self._is_rank else ""
        self.note(f"{who}{signal.Signals(strike.signal).name}", event, attempt)
        os.kill(os.getpid(), strike.signal)

    def _take(self, plan: Plan) -> None:
        self._clock_s = max(self._clock_s, self._plan.clock_s, plan.clock_s)
        if plan.clock_s > self._plan.clock_s:
            self.note("clock", f"{plan.clock_s:g} s ahead")
        strike = self._strike_of(plan)
        if strike is not None and strike != self._strike_of(self._plan):
            self._skip = strike.skip
        self._plan = plan
        self._num_spoilt.clear()
        self.random.seed(plan.seed)

    def _strike_of(self, plan: Plan) -> Strike | None:
        return plan.rank_strike if self._is_rank else plan.strike


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Return what tells a plan file from the one that it replaced: both existed at once, so their inodes differ."""
    return stat.st_ino, stat.st_mtime_ns


class _Held(NamedTuple):
    frames: Sequence[Any]
    until: float  # monotonic seconds


@dataclass(slots=True)
class _End:
    """Messages of one socket that the injector keeps for later."""

    coming: deque[list[Any]] = field(default_factory=deque[list[Any]])  # received, not yet returned
    held: dict[Way, list[_Held]] = field(default_factory=lambda: {"in": [], "out": []})
    is_sealed: bool = False  # only pulls and pages go over it, which cannot be read here

    def due(self, way: Way) -> list[Any]:
        """Remove and return the messages whose delay is over, in the order in which it was over."""
        now, held = _real_monotonic(), sorted(self.held[way], key=lambda each: each.until)
        self.held[way] = [each for each in held if each.until > now]
        return [each.frames for each in held if each.until <= now]

    @property
    def wakes_at(self) -> float:
        """The time at which a poll of the socket must return, even without input."""
        if self.coming:
            return 0.0
        return min((each.until for held in self.held.values() for each in held), default=float("inf"))


class FaultyWire(bus.Wire):
    """A wire that drops, duplicates, reorders, delays, truncates, flips and refuses messages."""

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

    def receive(self, socket: zmq.Socket[bytes], most: int, *, least: int, copy: bool) -> list[Any]:
        if socket.type != zmq.DEALER:
            frames = super().receive(socket, most, least=least, copy=copy)
            self._watch("in", frames[1:])
            return frames
        end = self._end(socket)
        self._send_due(socket, end)
        end.coming.extend(end.due("in"))
        while not end.coming:
            frames = super().receive(socket, most, least=least, copy=copy)
            end.coming.extend(self._spoilt(end, "in", frames))
        return end.coming.popleft()

    def poll(self, poller: zmq.Poller, timeout: int | None = None) -> list[tuple[Any, int]]:
        """Poll as `zmq.Poller.poll` does, but return when a delayed message of a polled socket is due."""
        ends = [self._ends[each] for each, _ in poller.sockets if each in self._ends]
        wakes_at = min((end.wakes_at for end in ends), default=float("inf"))
        if wakes_at < float("inf"):
            most = max(0, int(1000 * (wakes_at - _real_monotonic())) + 1)
            timeout = most if timeout is None or timeout < 0 else min(most, int(timeout))
        return _real_poll(poller, timeout)

    def _end(self, socket: zmq.Socket[bytes]) -> _End:
        if socket not in self._ends:
            self._ends[socket] = _End(is_sealed=socket.get(zmq.MECHANISM) == zmq.PLAIN)
        return self._ends[socket]

    def _send_due(self, socket: zmq.Socket[bytes], end: _End) -> None:
        for frames in end.due("out"):
            with contextlib.suppress(zmq.Again):  # the socket is full: the message is lost
                super().send(socket, frames, track=False)

    def _watch(self, way: Way, frames: Sequence[Any]) -> tuple[str, int]:
        """Return type and attempt of a message. The process may get its strike here."""
        tag, attempt = _tag(_bytes(frames[0])) if frames else ("?", 0)
        self._faults.reach(f"{way}:{tag}", attempt)
        return tag, attempt

    def _spoilt(self, end: _End, way: Way, frames: Sequence[Any]) -> list[Any]:
        """Return the messages to send or deliver instead of this one."""
        tag, attempt = self._watch(way, frames)
        if end.is_sealed:
            tag = "pages" if way == "in" else "pull"
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


_replaced: list[tuple[Any, str, Any]] = []  # owner, name and value of what `switch_on` has replaced


def switch_on(path: str, *, is_rank: bool = False) -> None:
    """Inject the faults of the plan file `path` into this process from now on. `is_rank` as in `Faults`."""
    for owner, name, value in replacements(Faults(Path(path), is_rank=is_rank)):
        _replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def switch_off() -> None:
    """Undo `switch_on`."""
    while _replaced:
        setattr(*_replaced.pop())


def run_rank(path: str, *args: Any) -> None:
    """Run rank 1 or above of a node in its process, with the faults of the plan file `path`. A process that was forked
    from that of the node has the node's faults until now."""
    from baton.engine.ranks import ranked_engine

    switch_off()
    run = ranked_engine.run_rank
    switch_on(path, is_rank=True)
    run(*args)


def replacements(faults: Faults) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes to replace as (owner, name, value)."""
    from baton.engine.ranks import ranked_engine
    from baton.metadata.handoff.transports.registry import TRANSPORTS
    from baton.router.waiting.entry import Entry

    wire = FaultyWire(faults)
    yield bus, "wire", wire
    yield zmq.Poller, "poll", _polling(wire)
    for transport in TRANSPORTS.values():
        for name in ("step", "receive"):
            yield transport, name, _spoiling(getattr(transport, name), faults)
    yield from _of_tiers(faults)
    yield Entry, "place", drawn_place(lambda: faults.plan.places)
    yield ranked_engine, "run_rank", partial(run_rank, str(faults.path))
    yield time, "monotonic", faults.monotonic
    for function in _our_functions():
        defaults = function.__defaults__ or ()
        if _real_monotonic in defaults:
            clocks = (faults.monotonic if each is _real_monotonic else each for each in defaults)
            yield function, "__defaults__", tuple(clocks)
        named: dict[str, Any] = function.__kwdefaults__ or {}
        if clocks_of := {name: faults.monotonic for name, each in named.items() if each is _real_monotonic}:
            yield function, "__kwdefaults__", named | clocks_of


def _of_tiers(faults: Faults) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced for faults of caches, of loans and of files."""
    from baton.engine.state.prefix_cache import PrefixCache
    from baton.engine.tiers import page_files
    from baton.engine.tiers.host_tier import HostTier
    from baton.metadata.handoff.borrower import Borrower

    yield PrefixCache, "tend", _evicting(PrefixCache.tend, faults)
    yield page_files, "_write_all", _filling(page_files._write_all, faults)
    yield page_files.PageFiles, "read", _damaging(page_files.PageFiles.read, faults)
    yield Borrower, "begin", _patient(Borrower.begin, "_token_s", faults)
    for name in ("is_sooner", "fetch"):
        yield HostTier, name, _patient(getattr(HostTier, name), "compute_token_s", faults)


def _evicting(tend: Callable[[Any], None], faults: Faults) -> Callable[[Any], None]:
    """Wrap the method of the prefix cache that each step calls."""
    from baton.engine.state.pages import Owner

    def spoilt(cache: Any) -> None:
        if cache.num_evictable and faults.choose({"evict": faults.plan.evicts}, "cache"):
            faults.note("evict", "cache")
            cache.pool.release(cache.allocate(cache.available, Owner.REQUEST))
            cache.pool.release(cache.allocate_tails(cache.available_tails, Owner.REQUEST))
        tend(cache)

    return spoilt


def _filling(write: Callable[[int, Any], int], faults: Faults) -> Callable[[int, Any], int]:
    """Wrap the function that writes a part of a file: the disk becomes full in the middle of it, or is slow."""

    def spoilt(handle: int, data: Any) -> int:
        plan = faults.plan
        kind = faults.choose({each: plan.files.get(each, 0.0) for each in ("full", "slow")}, "file")
        if kind is not None:
            faults.note(f"file {kind}", "file")
        if kind == "slow":
            time.sleep(0.2 * faults.random.random())
        if kind == "full":
            write(handle, memoryview(data).cast("B")[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    return spoilt


def _damaging(read: Callable[..., bool], faults: Faults) -> Callable[..., bool]:
    """Wrap the method that reads a file: one bit of it was flipped before, or it was removed, or the disk is slow."""

    def spoilt(files: Any, name: bytes, header: Any, slot: Any) -> bool:
        plan = faults.plan
        kind = faults.choose({each: plan.files.get(each, 0.0) for each in ("flip", "gone", "slow")}, "file")
        path = files.path / f"{name.hex()}.{header.kind}"
        if kind is not None and path.exists():
            faults.note(f"file {kind}", "file")
            if kind == "flip":
                data = bytearray(path.read_bytes())
                data[faults.random.randrange(len(data))] ^= 1 << faults.random.randrange(8)
                path.write_bytes(data)
            elif kind == "gone":
                path.unlink()
            else:
                time.sleep(0.2 * faults.random.random())
        return read(files, name, header, slot)

    return spoilt


def _patient(decide: Callable[..., Any], field: str, faults: Faults) -> Callable[..., Any]:
    """Wrap a method that asks the function in `field` in how many seconds the node computes a token of a prompt."""

    def decide_as_planned(of: Any, *args: Any) -> Any:
        token_s = faults.plan.token_s
        if token_s is not None:
            setattr(of, field, lambda: token_s)
        return decide(of, *args)

    return decide_as_planned


def _polling(wire: FaultyWire) -> Callable[..., list[tuple[Any, int]]]:
    def poll(poller: zmq.Poller, timeout: int | None = None) -> list[tuple[Any, int]]:
        return wire.poll(poller, timeout)

    return poll


def _our_functions() -> Iterator[FunctionType]:
    """Yield the functions and methods of all Baton modules imported so far."""
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if name.partition(".")[0] == "baton":
            classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
            for owner in (module, *classes):
                yield from (each for each in vars(owner).values() if isinstance(each, FunctionType))


def _spoiling(move_pages: Callable[..., Iterator[Any]], faults: Faults) -> Callable[..., Iterator[Any]]:
    """Wrap a method that yields pages as they arrive."""

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
    """Flip one bit of what has landed of the page, in this process's memory. A page on a GPU is changed through the
    host."""
    page, device = landed.move.target, getattr(transport, "device", None)
    if device is not None:
        device.store([page])
    parts = zip(transport.memory, transport.part.pools, strict=True)
    pool, spans = rng.choice([(pool, part.spans) for pool, part in parts if part.spans and pool.holds(page)])
    pages, page = pool.pages, page - pool.first
    _, start, num_bytes = rng.choice(spans)
    pages[rng.randrange(pages.shape[0]), page, start + rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
    return landed if device is None else landed._replace(checksums=device.load([page])[0])


def _damaged(frames: Sequence[Any], kind: str, rng: random.Random) -> list[Any]:
    """Return the frames with one of them truncated or with one bit flipped.

    The other frames stay the same objects, because libzmq attaches the sender to them.
    """
    index = rng.randrange(len(frames))
    frame = bytearray(_bytes(frames[index]))
    if kind == "truncate":
        del frame[rng.randrange(max(1, len(frame))) :]
    elif frame:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    damaged = bytes(frame)
    return [
        *frames[:index],
        zmq.Frame(damaged) if isinstance(frames[index], zmq.Frame) else damaged,
        *frames[index + 1 :],
    ]


def _bytes(frame: Any) -> bytes:
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)


def _tag(frame: bytes) -> tuple[str, int]:
    """Return type and attempt of a message, or ("?", 0) if the frame holds no message."""
    try:
        fields: Any = msgspec.msgpack.decode(unseal(frame) or b"")
        unit = fields.get("unit") or next(iter(fields.get("units", ())), (None, 0, 0))
        return fields["type"], fields.get("attempt", unit[2])
    except (msgspec.MsgspecError, AttributeError, LookupError, TypeError):
        return "?", 0
