"""What goes wrong, when, and to whom: a seeded generator over fault x phase."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("queued", "prefilling", "offered", "pulling", "decoding", "preempted", "moving", "draining", "idle")
PROCESS = ("kill", "stop", "restart")
PARTITIONS = ("partition slow", "partition held", "partition lossy", "partition cut")
FRAMES = ("drop", "duplicate", "reorder", "delay", "truncate", "flip", "full")
PAGES = ("page flip", "page stale", "page slow")
ROUTER = ("router kill", "router stop", "router restart")
OTHERS = ("clock", "router clock", "flood", "storm")
KINDS = (*PROCESS, *PARTITIONS, *FRAMES, *PAGES, *ROUTER, *OTHERS)

# where a process meets its fault by itself (tests/chaos/faulty.py): the event, and how many of it may pass
EVENTS = {
    ("prefill", "queued"): ("in:prefill", 0),
    ("prefill", "prefilling"): ("in:prefill", 3),
    ("prefill", "offered"): ("out:tokens", 3),
    ("prefill", "pulling"): ("in:ack", 3),
    ("decode", "queued"): ("in:reserve", 2),
    ("decode", "prefilling"): ("out:claim", 2),
    ("decode", "offered"): ("in:offer", 6),
    ("decode", "pulling"): ("pull", 20),
    ("decode", "decoding"): ("out:tokens", 40),
}
# messages that belong to a phase: what the frames' faults are for, as they come to a node and as they go
COMING = {
    "queued": ("reserve",),
    "prefilling": ("prefill",),
    "offered": ("link_welcome", "offer"),
    "pulling": ("pages", "offer", "revoke", "unknown_claim"),
    "moving": ("cancel", "reserve", "prefill", "resend"),
    "idle": ("router_beat", "welcome", "hello_again"),
}
# nothing comes that belongs to these phases alone: whatever comes for any request
COMING |= dict.fromkeys(
    ("decoding", "preempted", "draining"),
    ("resend", "cancel", "reserve", "prefill", "link_welcome", "offer", "pages", "revoke", "router_beat"),
)
GOING = {
    "queued": ("reserved", "room"),
    "prefilling": ("prefill_done", "claim"),
    "offered": ("link_hello", "claim"),
    "pulling": ("pull", "renew", "ack", "revoke_ack"),
    "decoding": ("tokens", "admitted"),
    "preempted": ("tokens", "admitted", "reserved"),
    "moving": ("cancelled", "failed", "reserved", "drop"),
    "draining": ("leaving", "tokens", "prefill_done"),
    "idle": ("beat", "hello", "tokenizer"),
}
TAGS = {"in": COMING, "out": GOING}
STORM_WEIGHTS = {"in": 6.0, "out": 1.0}  # fewer messages come to a node than go
PHASE_OF = {
    tag: phase for tags in TAGS.values() for phase in ("idle", "draining", "moving", *PHASES[:5]) for tag in tags[phase]
}
STOPS_S = (0.4, 1.0, 2.5, 6.0)
JUMPS_S = (0.4, 1.2, 6.0, 40.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that goes wrong while requests run."""

    number: int
    seed: int
    kind: str
    phase: str
    target: str  # the process it befalls, or the first end of the line

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} while {self.phase}, {self.target} (seed {self.seed})"


def phases_of(kind: str) -> tuple[str, ...]:
    """The phases in which a kind of fault makes sense and can be aimed at."""
    if kind in PAGES:
        return ("pulling", "moving", "preempted", "draining")
    if kind in ("flood", "storm"):
        return ("queued",) if kind == "flood" else PHASES
    return PHASES


def generate(seed: int, nodes: tuple[str, ...], kinds: tuple[str, ...] = KINDS) -> Iterator[Scenario]:
    """Every kind in every phase, in an order drawn from `seed`; then again in another."""
    rng, number = random.Random(seed), 0
    while True:
        cells = [(kind, phase) for kind in kinds for phase in phases_of(kind)]
        rng.shuffle(cells)
        for kind, phase in cells:
            yield Scenario(number, rng.randrange(1 << 30), kind, phase, rng.choice(nodes))
            number += 1
