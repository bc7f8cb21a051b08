"""The begin of a node's handoffs, on all of its ranks.

    rank 0: make_server --BeginServing--> rank i: begin, PageServer   --its address--> rank 0: HandoffServer
            make_client --BeginPulling--> rank i: begin, RankPuller   --------------->         HandoffClient

A node that lends and borrows pages of its prefix cache has both, whatever its role. Later orders and reports go over
the node's `HandoffLine` (handoff_line.py).
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from ...metadata.bus.curve import KeyPair
from ...metadata.errors import ConfigError
from ...metadata.handoff.client import HandoffClient
from ...metadata.handoff.endpoint import Endpoint
from ...metadata.handoff.loans import LendingCache
from ...metadata.handoff.page_server import PageServer
from ...metadata.handoff.ranks.orders import BeginPulling, BeginServing
from ...metadata.handoff.ranks.puller import RankPuller
from ...metadata.handoff.server import HandoffServer
from ..config import EngineConfig
from ..engine import Engine
from ..startup import make_endpoint
from .handoff_line import HandoffMember
from .processes import REPORT, RankProcesses
from .work_frames import HandoffStart, encode


def make_server(
    end: Endpoint, bind_host: str, lease_s: float, ranks: RankProcesses | None, cache: LendingCache | None = None
) -> HandoffServer:
    """Return the server of a node, which lends pages of `cache` (None: of none). `ranks`: its other ranks, which begin
    to serve their heads; None: it has none. If rank 0 has all heads of all pages, no other rank serves. `lease_s`: how
    long a ticket's lease lasts, seconds. Raises ConfigError if an address cannot be used, or if the machine has no
    memory that ranks share, and RankLost."""
    if ranks is None or end.shard.size == 1:
        return HandoffServer(end, bind_host, lease_s=lease_s, cache=cache)
    if not end.memory[0].is_shared:
        raise ConfigError("this machine has no memory that processes share, which the ranks of a node need; use --tp 1")
    addresses = _begin(ranks, BeginServing(end.epoch, end.fingerprints, bind_host, end.memory[0].where))
    line = ranks.handoff_line.serving
    return HandoffServer(end, bind_host, lease_s=lease_s, line=line, rank_addresses=addresses, cache=cache)


def make_client(end: Endpoint, ranks: RankProcesses | None) -> HandoffClient:
    """Return the client of a node. `ranks`: its other ranks, which begin to pull their heads; None: it has none.
    If rank 0 has all heads of all pages, no other rank pulls. Raises RankLost."""
    if ranks is None or end.shard.size == 1:
        return HandoffClient(end)
    _begin(ranks, BeginPulling(end.epoch, end.fingerprints))
    return HandoffClient(end, line=ranks.handoff_line.pulling)


def begin(start: HandoffStart, config: EngineConfig, name: str, engine: Engine, work: Connection) -> HandoffMember:
    """Return a part of rank 1 or above of node `name` in handoffs, and tell rank 0 the address at which it serves.
    Raises ConfigError and TransferError as `PageServer`. The links end with the process."""
    keys = KeyPair.configured(config)
    end = make_endpoint(config, name, engine, keys, start.epoch, start.fingerprints)
    if isinstance(start, BeginPulling):
        member, address = RankPuller(end), ""
    else:
        member = PageServer(end, start.bind_host, start.counted)
        address = member.address
    work.send_bytes(REPORT + address.encode())
    return member


def _begin(ranks: RankProcesses, start: HandoffStart) -> list[str]:
    """Let all other ranks begin, and return their addresses."""
    others = range(1, ranks.size)
    for rank in others:
        ranks.send(rank, encode(start))
    return [ranks.report(rank).decode() for rank in others]
