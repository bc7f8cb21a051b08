"""Endpoint: what a node of either role brings to a handoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from ..bus.addresses import host_identity
from ..bus.allow_list import AllowList
from ..bus.curve import KeyPair
from ..wire.data_link import LinkHello, RankHello
from ..wire.node_info import HandoffSchema
from ..wire.protocol import known
from .memory import PageMemory
from .pages import DevicePool
from .ranks.shards import ONE_SHARD
from .schema import weights
from .schema.kv_layout import Shard
from .schema.schema import differences
from .transports.base import is_near
from .transports.ranks import RANKS, RanksTransport
from .transports.registry import transport_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One node of a handoff, or one rank of a node: its identity, its pools, and the ways in which pages can travel.

    `fingerprints` are the digests of target and draft weights. `memory` holds the target pool, then the draft pool. If
    `device` is given, the pages lie in its pools, and `memory` is their host mirror. `transports` are names from
    transports/registry.py, best first. `schema` describes the pages of the whole node; the pools have the heads of
    `shard`.
    """

    node_id: str
    epoch: str
    schema: HandoffSchema
    fingerprints: tuple[str, str | None]
    memory: Sequence[PageMemory]
    transports: Sequence[str]
    device: DevicePool | None = None
    shard: Shard = ONE_SHARD
    keys: KeyPair | None = None
    clock: Callable[[], float] = time.monotonic
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context[zmq.Socket[bytes]].instance)
    host: str = field(default_factory=host_identity)
    shared_dir: Path | None = None  # of this user, in which nodes of other containers find its inbox
    own_host: str = "127.0.0.1"  # this host's address in the network of the nodes

    @property
    def allow_list(self) -> AllowList | None:
        """The list of keys that may connect; None if there is none."""
        return None if self.keys is None else self.keys.allow_list

    def hello(self, inbox: str) -> LinkHello:
        """Return the hello of a decode node that receives file descriptors at `inbox` (empty: nowhere). If the node has
        several ranks, the link is for tickets, and its pages travel on links of the ranks."""
        return LinkHello(
            node_id=self.node_id,
            epoch=self.epoch,
            layout=self.schema,
            target_fingerprint=self.fingerprints[0],
            draft_fingerprint=self.fingerprints[1],
            transports=tuple(self.transports) if self.shard.size == 1 else (RANKS,),
            host=self.host,
            inbox=inbox,
        )

    def rank_hello(self, inbox: str, source: Shard) -> RankHello:
        """Return the hello of this rank of a decode node to rank `source` of a prefill node. `inbox` as in `hello`."""
        hello = msgspec.structs.replace(self.hello(inbox), transports=tuple(self.transports))
        return RankHello(
            **msgspec.structs.asdict(hello),
            rank=self.shard.rank,
            size=self.shard.size,
            source_rank=source.rank,
            source_size=source.size,
        )

    def objections(self, hello: LinkHello, transports: Collection[str]) -> list[str]:
        """Return why this prefill node, which can serve by `transports`, and the decode node that said this hello
        cannot hand over, with both values ("here" is this node); empty if they can."""
        reasons = differences(self.schema, hello.layout)
        theirs = (hello.target_fingerprint, hello.draft_fingerprint)
        for name, here, there in zip(("target", "draft"), self.fingerprints, theirs, strict=True):
            reasons += weights.difference(f"{name} weights", here, there)
        has_ranks = self.shard.size > 1 or RANKS in hello.transports
        if has_ranks and not RanksTransport.can_reach(hello, self.host):
            old = f"protocol {known(hello.protocol)} of the link, ranks need {RanksTransport.since}"
            reasons.append(f"ranks: {self.shard.size} here, {old}; the decode node or the router is older")
        elif not usable(transports, hello, self.host):
            hosts = "same host" if is_near(hello, self.host) else "no shared memory"
            here, there = ", ".join(name for name in transports if name != RANKS), ", ".join(hello.transports)
            reasons.append(f"transports: {here} here, {there} there ({hosts})")
        return reasons


def usable(ours: Collection[str], hello: LinkHello, host: str) -> list[str]:
    """Return our transports by which pages can travel from this host (`host_identity`) to the decode node that said
    this hello, in its order. The caller has removed the hello's inbox if it is out of reach.

    A decode node that knows ranks need not list them: it cannot tell whether the prefill node has several."""
    implied = () if set(ours) - {RANKS} else (RANKS,)
    listed = dict.fromkeys((*hello.transports, *implied))
    return [name for name in listed if name in ours and transport_named(name).can_reach(hello, host)]
