"""The simulated router: a queue of requests that wait for room, first come, first served.

Its decisions are the product's own: who computes a prompt (`place_prompt`, `place_sooner`), which decode node generates
(`choose_decode`, `choose_local`), which prefill node computes (`choose_remote`). Two things are simpler. The router
knows the load of a node at once, without waiting for a report. Prompts are all different, so no prefix cache helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...router.nodes.prompt_role import GroupFacts, handoff_estimate, place_prompt
from ...router.placement.node_choice import choose_decode
from ...router.placement.prompt_placement import choose_local, choose_remote, place_sooner
from .agenda import Agenda
from .costs import Costs
from .decode_node import SimulatedDecodeNode
from .prefill_node import SimulatedPrefillNode
from .request import SLACK, SimulatedRequest


class SimulatedRouter:
    """Owns every request from its arrival to its last token."""

    def __init__(self, agenda: Agenda, costs: Costs, facts: GroupFacts) -> None:
        self._agenda, self._costs, self._facts = agenda, costs, facts
        self._handoff_s = handoff_estimate()
        self._prefills: Sequence[SimulatedPrefillNode] = ()
        self._decodes: Sequence[SimulatedDecodeNode] = ()
        self._queue = deque[SimulatedRequest]()
        self._pairs: dict[SimulatedRequest, tuple[SimulatedPrefillNode, SimulatedDecodeNode]] = {}  # until the handoff
        self.done: list[SimulatedRequest] = []
        self.num_local = 0

    def join(self, prefills: Sequence[SimulatedPrefillNode], decodes: Sequence[SimulatedDecodeNode]) -> None:
        """These nodes serve from now on."""
        self._prefills, self._decodes = prefills, decodes

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or has a handoff before it."""
        return not self._queue and not self._pairs

    def receive(self, request: SimulatedRequest) -> None:
        """Queue a request that has arrived."""
        self._queue.append(request)
        self._dispatch()

    def granted(self, node: SimulatedDecodeNode, request: SimulatedRequest) -> None:
        """A decode node has room for a request whose prompt a prefill node computes."""
        prefill, decode = self._pairs[request]
        assert decode is node, request.order
        prefill.submit(request)

    def computed(self, node: SimulatedPrefillNode, request: SimulatedRequest, num_tokens: int) -> None:
        """A prefill node has the first token of a request, whose last chunk had `num_tokens` tokens."""
        request.take_first(self._agenda.now)
        if request.num_left:
            seconds = self._costs.handoff_s(num_tokens)
            self._agenda.at(self._agenda.now + seconds, self._handed_over, node, request, seconds)
        else:
            node.release(request)
            self.done.append(request)
            self._dispatch()

    def ended(self, request: SimulatedRequest) -> None:
        """The last token of a request has come."""
        self.done.append(request)
        self._dispatch()

    def _handed_over(self, node: SimulatedPrefillNode, request: SimulatedRequest, seconds: float) -> None:
        _, decode = self._pairs.pop(request)
        self._handoff_s.observe(seconds + decode.round_s / 2)  # as the real router does
        node.release(request)
        decode.arrive(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give nodes to the requests at the head of the queue, while there is room."""
        while self._queue and self._place(self._queue[0]):
            self._queue.popleft()

    def _place(self, request: SimulatedRequest) -> bool:
        """Give a request its nodes, as the real router's `Placement.choose` does. False if there is no room now."""
        prompt = place_prompt(self._facts)
        if prompt is None:
            return self._place_sooner(request)
        return self._place_local(request) if prompt.where == "local" else self._place_remote(request)

    def _place_sooner(self, request: SimulatedRequest) -> bool:
        """Compare the roles by the time to the first two tokens."""
        decode = self._choose_decode(request)
        prefills = list[SimulatedPrefillNode]()
        round_s = handoff_s = 0.0
        if decode is not None or request.num_tokens == 1:
            prefills = self._free_prefills()
        if request.num_tokens > 1 and decode is not None:
            round_s, handoff_s = decode.round_s, self._handoff_s.mean
        nodes = self._local_nodes()
        place, index = place_sooner(
            [node.remote_figures(request, handoff_s, round_s) for node in prefills],
            [node.local_figures(request) for node in nodes],
        )
        if index is None:
            return False
        if place.where == "local":
            self._begin_local(request, nodes[index])
        else:
            self._begin_remote(request, prefills[index], decode if request.num_tokens > 1 else None)
        return True

    def _place_local(self, request: SimulatedRequest) -> bool:
        nodes = self._local_nodes()
        index = choose_local([node.local_figures(request) for node in nodes])
        if index is None:
            return False
        self._begin_local(request, nodes[index])
        return True

    def _place_remote(self, request: SimulatedRequest) -> bool:
        decode = self._choose_decode(request) if request.num_tokens > 1 else None
        prefills = self._free_prefills()
        index = choose_remote([node.remote_figures(request, 0.0, 0.0) for node in prefills])
        if index is None or (decode is None and request.num_tokens > 1):
            return False
        self._begin_remote(request, prefills[index], decode)
        return True

    def _free_prefills(self) -> list[SimulatedPrefillNode]:
        return [node for node in self._prefills if node.num_prompts < node.max_prompts]

    def _begin_remote(
        self, request: SimulatedRequest, prefill: SimulatedPrefillNode, decode: SimulatedDecodeNode | None
    ) -> None:
        if decode is None:
            prefill.submit(request)
        else:
            self._pairs[request] = prefill, decode
            decode.ask(request)

    def _begin_local(self, request: SimulatedRequest, decode: SimulatedDecodeNode) -> None:
        request.is_local = True
        self.num_local += 1
        decode.ask(request)

    def _local_nodes(self) -> list[SimulatedDecodeNode]:
        return [node for node in self._decodes if not node.figures.is_full]

    def _choose_decode(self, request: SimulatedRequest) -> SimulatedDecodeNode | None:
        index = choose_decode([node.figures for node in self._decodes], request.prompt_len + SLACK)
        return None if index is None else self._decodes[index]
