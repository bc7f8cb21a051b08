"""Times with round numbers, for tests of the simulation.

A round takes 10 ms and 1 us per token of context, a prompt 0.1 ms per token, a handoff 5 ms.
"""

from __future__ import annotations

from baton.deploy.simulation.times import ChunkPoint, HandoffPoint, RoundPoint, Times

TIMES = Times(
    model="m",
    device="d",
    sources=(),
    context_len=100_000,
    pool_tokens=100_000,
    router_ms=1.0,
    rounds=(RoundPoint(1, 100, 10.1), RoundPoint(64, 100, 16.4), RoundPoint(1, 1100, 11.1)),
    chunks=(ChunkPoint(10, 1.0), ChunkPoint(10_000, 1000.0)),
    handoffs=(HandoffPoint(100, 5.0),),
)
