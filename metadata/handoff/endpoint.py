"""Endpoint: what a node of either role brings to a handoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import zmq

from ..bus.addresses import host_identity
from ..bus.allow_list import AllowList
from ..bus.curve import KeyPair
from ..wire.data_link import LinkHello
from ..wire.node_info import HandoffSchema
from .memory import PageMemory
from .pages import DevicePool
from .schema import differences
from .transports.registry import TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One node of a handoff: its identity, its pools, and the ways in which pages can travel.

    `fingerprints` are the digests of target and draft weights. `memory` holds the target pool, then the draft pool. If
    `device` is given, the pages lie in its pools, and `memory` is their host mirror. `transports` are names from
    transports/registry.py, best first.
    """

    node_id: str
    epoch: str
    schema: HandoffSchema
    fingerprints: tuple[str, str | None]
    memory: Sequence[PageMemory]
    transports: Sequence[str]
    device: DevicePool | None = None
    keys: KeyPair | None = None
    clock: Callable[[], float] = time.monotonic
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context[zmq.Socket[bytes]].instance)
    host: str = field(default_factory=host_identity)

    @property
    def allow_list(self) -> AllowList | None:
        """The list of keys that may connect; None if there is none."""
        return None if self.keys is None else self.keys.allow_list

    def hello(self, inbox: str) -> LinkHello:
        """Return the hello of a decode node that receives file descriptors at `inbox` (empty: nowhere)."""
        return LinkHello(
            node_id=self.node_id,
            epoch=self.epoch,
            layout=self.schema,
            target_fingerprint=self.fingerprints[0],
            draft_fingerprint=self.fingerprints[1],
            transports=tuple(self.transports),
            host=self.host,
            inbox=inbox,
        )

    def objections(self, hello: LinkHello, transports: Collection[str]) -> list[str]:
        """Return why this prefill node, which can serve by `transports`, and the decode node that said this hello
        cannot hand over, with both values ("here" is this node); empty if they can."""
        reasons = differences(self.schema, hello.layout)
        theirs = (hello.target_fingerprint, hello.draft_fingerprint)
        for name, here, there in zip(("target", "draft"), self.fingerprints, theirs, strict=True):
            if here != there:
                reasons.append(f"{name} weights: {here} here, {there} there")
        if not any(can_use(name, transports, hello, self.host) for name in hello.transports):
            hosts = "same host" if hello.host == self.host else "another host"
            here, there = ", ".join(transports), ", ".join(hello.transports)
            reasons.append(f"transports: {here} here, {there} there ({hosts})")
        return reasons


def can_use(transport: str, ours: Collection[str], hello: LinkHello, host: str) -> bool:
    """Return whether pages can travel by `transport`, if it is one of ours, from this host (`host_identity`) to the
    decode node that said this hello."""
    return transport in ours and TRANSPORTS[transport].can_reach(hello, host)
