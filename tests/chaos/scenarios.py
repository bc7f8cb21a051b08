"""Scenarios: which fault hits which process in which phase of a request. A seeded generator draws them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PHASES = (
    "queued",
    "prefilling",
    "offered",
    "pulling",
    "decoding",
    "borrowing",
    "preempted",
    "moving",
    "draining",
    "idle",
)
PROCESS = ("kill", "stop", "restart")
PARTITIONS = ("partition slow", "partition held", "partition lossy", "partition cut")
BETWEEN_HOSTS = ("partition slow", "partition lossy", "partition cut", "partition hole")
FRAMES = ("drop", "duplicate", "reorder", "delay", "truncate", "flip", "full")
PAGES = ("page flip", "page stale", "page slow")
ROUTER = ("router kill", "router stop", "router restart")
FILES = ("file full", "file flip", "file gone", "file slow")  # of nodes with a disk cache
EVICT = "evict"  # all cached pages that nobody uses leave the pool at once, those on loan included
OTHERS = ("clock", "router clock", "flood", "storm")
RANKS = ("rank kill", "rank stop")  # of the nodes that have several
KINDS_ANYWHERE = (*PROCESS, *FRAMES, *PAGES, *FILES, EVICT, *ROUTER, *OTHERS)
KINDS, KINDS_OF_HOSTS = (*PARTITIONS, *KINDS_ANYWHERE), (*BETWEEN_HOSTS, *KINDS_ANYWHERE)

# (role, phase): the event at which the fault injector strikes, and the most such events that may happen before
EVENTS = {
    ("prefill", "queued"): ("in:prefill", 0),
    ("prefill", "prefilling"): ("in:prefill", 3),
    ("prefill", "offered"): ("out:tokens", 3),
    ("prefill", "pulling"): ("in:ack", 3),
    ("prefill", "borrowing"): ("out:borrow", 1),
    ("decode", "queued"): ("in:reserve", 2),
    ("decode", "prefilling"): ("out:claim", 2),
    ("decode", "offered"): ("in:offer", 6),
    ("decode", "pulling"): ("pull", 20),
    ("decode", "borrowing"): ("in:borrow", 1),
    ("decode", "decoding"): ("out:tokens", 40),
}
# role: the same for a rank of a node while pages are pulled; a prefill rank notices pulls by ZeroMQ alone
RANK_EVENTS = {"prefill": ("in:pull", 1), "decode": ("pull", 6)}
# phase: the message types whose frames are damaged, as a node receives and sends them
COMING = {
    "queued": ("reserve", "compute"),
    "prefilling": ("prefill",),
    "offered": ("link_welcome", "offer"),
    "pulling": ("pages", "offer", "revoke", "unknown_claim"),
    "borrowing": ("offer", "pages", "revoke"),
    "moving": ("cancel", "reserve", "compute", "prefill", "resend"),
    "idle": ("router_beat", "welcome", "hello_again"),
}
# A node receives no message that belongs to these phases alone, so all messages about requests are damaged.
COMING |= dict.fromkeys(
    ("decoding", "preempted", "draining"),
    ("resend", "cancel", "reserve", "compute", "prefill", "link_welcome", "offer", "pages", "revoke", "router_beat"),
)
COMING["draining"] += ("keep", "handed_on")
GOING = {
    "queued": ("reserved", "room"),
    "prefilling": ("prefill_done", "claim"),
    "offered": ("link_hello", "claim"),
    "pulling": ("pull", "renew", "ack", "revoke_ack"),
    "borrowing": ("borrow", "pull", "ack", "drop", "cached_pages"),
    "decoding": ("tokens", "admitted"),
    "preempted": ("tokens", "admitted", "reserved"),
    "moving": ("cancelled", "failed", "reserved", "drop"),
    "draining": ("leaving", "tokens", "prefill_done", "hand_on"),
    "idle": ("beat", "hello", "tokenizer"),
}
TAGS = {"in": COMING, "out": GOING}
STORM_WEIGHTS = {"in": 6.0, "out": 1.0}  # a node receives fewer messages than it sends
PHASE_OF = {
    tag: phase
    for tags in TAGS.values()
    for phase in ("idle", "draining", "moving", "borrowing", *PHASES[:5])
    for tag in tags[phase]
}
STOPS_S = (0.4, 1.0, 2.5, 6.0)
JUMPS_S = (0.4, 1.2, 6.0, 40.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault while requests run."""

    number: int
    seed: int
    kind: str
    phase: str
    target: str  # the process to hit, or one end of the connections to disturb

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} while {self.phase}, {self.target} (seed {self.seed})"


def phases_of(kind: str) -> tuple[str, ...]:
    """Return the phases in which a kind of fault can be injected."""
    if kind in PAGES:
        return ("pulling", "borrowing", "moving", "preempted", "draining")
    if kind in FILES:
        return ("prefilling", "preempted", "moving", "draining")
    if kind == EVICT:
        return ("pulling", "borrowing", "decoding", "moving")
    if kind in ("flood", "storm"):
        return ("queued",) if kind == "flood" else PHASES
    return PHASES


def generate(seed: int, nodes: tuple[str, ...], kinds: tuple[str, ...] = KINDS) -> Iterator[Scenario]:
    """Yield each kind in each phase, in an order drawn from `seed`. Then yield them again in another order."""
    rng, number = random.Random(seed), 0
    while True:
        cells = [(kind, phase) for kind in kinds for phase in phases_of(kind)]
        rng.shuffle(cells)
        for kind, phase in cells:
            yield Scenario(number, rng.randrange(1 << 30), kind, phase, rng.choice(nodes))
            number += 1
