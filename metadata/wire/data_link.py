"""Messages that open a data link: a decode node says hello to a prefill node, which welcomes or refuses it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from .node_info import DevicePools, HandoffSchema
from .protocol import Message, Since
from .request import Count, Digest, Index, Name, Text

MIN_LEASE_S = 0.05


class LinkHello(Message, frozen=True, tag="link_hello"):
    """The decode node opens the link. `transports` are those that it can use, best first. Two nodes with equal `host`
    can share memory. `inbox` is where the node receives file descriptors (descriptors.py); empty if it needs none."""

    node_id: Name
    epoch: Digest
    layout: HandoffSchema
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    transports: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=8)]
    host: Digest
    protocol: Annotated[Index, Since(6)] = 0  # the two nodes address each other in it; 0: the decode node is older
    inbox: Annotated[str, Meta(pattern=r"^(baton-[0-9a-f]{32})?$", max_length=38), Since(6)] = ""


class LinkWelcome(Message, frozen=True, tag="link_welcome"):
    """The link is open. If `transport` is `local`, the pools are /proc/PID/fd/FD of the prefill node, one fd per pool,
    with sizes in bytes."""

    node_id: Name
    epoch: Digest
    transport: Name
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=1e4)]  # a shorter lease would be renewed all the time
    num_pages: Count = 0
    pid: Count = 0
    fds: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()


class CudaWelcome(LinkWelcome, frozen=True, tag="cuda_welcome", kw_only=True):
    """LinkWelcome for `cuda`. `fds` and `sizes` name only the host mirror of the target's pool, which holds the
    generations."""

    since: ClassVar[int] = 6

    pools: DevicePools


class LinkRefused(Message, frozen=True, tag="link_refused"):
    """The two nodes cannot hand over; the reason names both values."""

    reason: Text
