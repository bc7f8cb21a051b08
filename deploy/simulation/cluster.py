"""A simulated cluster: one router, some prefill nodes and some decode nodes, each with a GPU of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...decode_node.config import DecodeConfig
from ...prefill_node.config import PrefillConfig
from ...router.nodes.prompt_role import GroupFacts, LocalPrefill
from .agenda import Agenda
from .costs import Costs
from .decode_node import SimulatedDecodeNode
from .figures import Record
from .prefill_node import SimulatedPrefillNode
from .request import SimulatedRequest
from .router import SimulatedRouter
from .times import Times
from .traffic import Arrival


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The number of nodes of each role, and the role that computes prompts."""

    num_prefill: int
    num_decode: int
    local_prefill: LocalPrefill

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D {self.local_prefill}"

    @property
    def flags(self) -> str:
        """Flags of `baton up` that start it."""
        flags = f"--prefill {self.num_prefill} --decode {self.num_decode}"
        return flags if not self.num_prefill else f"{flags} --local-prefill {self.local_prefill}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated load."""

    records: list[Record]  # of answered requests, in the order of their arrival
    took_s: float  # from the start to the last token
    num_refused: int  # requests that no node can hold
    num_local: int  # prompts that decode nodes computed
    num_preemptions: int
    prefill_busy: float  # mean share of the time in which prefill nodes compute; 0 without any
    decode_busy: float


def simulate(
    shape: ClusterShape, times: Times, arrivals: Sequence[Arrival], max_running: int, max_gap_s: float | None = None
) -> Outcome:
    """Run a load until its last token. `max_running`: sequences that each node computes at once, if decode nodes have
    tail pages for them. `max_gap_s`: the decode nodes' bound on gaps beside local prompts; None: their default."""
    agenda, costs = Agenda(), Costs(times, max_running)
    facts = GroupFacts(shape.local_prefill, lacks_prefill=not shape.num_prefill, decodes_compute=True)
    router = SimulatedRouter(agenda, costs, facts)
    pool, num_running = times.pool_tokens, min(max_running, times.tail_sequences or max_running)
    chunk, local_chunk = PrefillConfig().chunk("cuda"), DecodeConfig().chunk("cuda")
    prefills = [
        SimulatedPrefillNode(agenda, costs, max_running, pool, chunk, router.computed) for _ in range(shape.num_prefill)
    ]
    decodes = [
        SimulatedDecodeNode(agenda, costs, num_running, pool, local_chunk, max_gap_s, router)
        for _ in range(shape.num_decode)
    ]
    router.join(prefills, decodes)
    requests = [SimulatedRequest(order, arrival) for order, arrival in enumerate(arrivals) if _fits(arrival, times)]
    for request in requests:
        agenda.at(request.arrived_s + costs.router_s, router.receive, request)
    agenda.run()
    assert len(router.done) == len(requests), "a request has not ended"
    assert router.is_empty and all(node.is_empty for node in (*prefills, *decodes)), "the books do not balance"
    took_s = max(agenda.now, 1e-9)
    return Outcome(
        [request.record for request in requests],
        took_s,
        len(arrivals) - len(requests),
        router.num_local,
        sum(node.num_preemptions for node in decodes),
        sum(node.busy_s for node in prefills) / took_s / max(1, len(prefills)),
        sum(node.busy_s for node in decodes) / took_s / len(decodes),
    )


def _fits(arrival: Arrival, times: Times) -> bool:
    """Whether an empty node could serve the request."""
    num_tokens = arrival.prompt_len + arrival.num_tokens
    return num_tokens <= times.context_len and num_tokens + 2 <= times.pool_tokens
