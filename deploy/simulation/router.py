"""The simulated router: a queue of requests that wait for room, first come, first served.

Its decisions are the product's own: who computes a prompt (`place_prompt`,
`place_sooner`), which decode node generates
(`choose_decode`), which prefill node computes (`choose_prefill`). Prompts are all different, so no prefix cache helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...router.placement import choose_decode, choose_prefill
from ...router.prompt_placement import GroupFacts, place_prompt, place_sooner
from .agenda import Agenda
from .costs import Costs
from .decode_node import DecodeNode
from .prefill_node import PrefillNode
from .request import SLACK, Request


class Router:
    """Owns every request from its arrival to its last token."""

    def __init__(self, agenda: Agenda, costs: Costs, facts: GroupFacts, *, is_auto: bool) -> None:
        self._agenda, self._costs, self._facts, self._is_auto = agenda, costs, facts, is_auto
        self._prefills: Sequence[PrefillNode] = ()
        self._decodes: Sequence[DecodeNode] = ()
        self._queue = deque[Request]()
        self._pairs: dict[Request, tuple[PrefillNode, DecodeNode]] = {}  # until the handoff
        self.done: list[Request] = []
        self.num_local = 0

    def join(self, prefills: Sequence[PrefillNode], decodes: Sequence[DecodeNode]) -> None:
        """These nodes serve from now on."""
        self._prefills, self._decodes = prefills, decodes

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or has a handoff before it."""
        return not self._queue and not self._pairs

    def receive(self, request: Request) -> None:
        """A request has come."""
        self._queue.append(request)
        self._dispatch()

    def granted(self, node: DecodeNode, request: Request) -> None:
        """A decode node has room for a request whose prompt a prefill node computes."""
        prefill, decode = self._pairs[request]
        assert decode is node, request.order
        prefill.submit(request)

    def computed(self, node: PrefillNode, request: Request, num_tokens: int) -> None:
        """A prefill node has the first token of a request, whose last chunk had `num_tokens` tokens."""
        request.take_first(self._agenda.now)
        if request.num_left:
            self._agenda.at(self._agenda.now + self._costs.handoff_s(num_tokens), self._handed_over, node, request)
        else:
            node.release(request)
            self.done.append(request)
            self._dispatch()

    def ended(self, request: Request) -> None:
        """The last token of a request has come."""
        self.done.append(request)
        self._dispatch()

    def _handed_over(self, node: PrefillNode, request: Request) -> None:
        _, decode = self._pairs.pop(request)
        node.release(request)
        decode.arrive(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give nodes to the requests at the head of the queue, while there is room."""
        while self._queue and self._place(self._queue[0]):
            self._queue.popleft()

    def _sooner(self, request: Request) -> DecodeNode | None:
        """Return the decode node that computes the prompt, if that brings the second token sooner."""
        index = choose_decode([node.figures for node in self._decodes], request.prompt_len + SLACK)
        round_s = 0.0 if index is None else self._decodes[index].round_s
        free = [node for node in self._prefills if node.figures.num_queued < node.figures.max_queued]
        remotes = [node.remote_figures(request, round_s) for node in free]
        found = place_sooner(remotes, [node.local_figures(request) for node in self._decodes])
        return None if found.index is None else self._decodes[found.index]

    def _place(self, request: Request) -> bool:
        """Ask a decode node, or a prefill node if no decode node is needed. False if there is no room now."""
        decode = prefill = None
        if self._is_auto:
            decode = self._sooner(request)
            request.is_local = decode is not None
        else:
            request.is_local = place_prompt(self._facts, wants_prompt_logprobs=False).where == "local"
        if decode is None and (request.is_local or request.num_tokens > 1):
            index = choose_decode([node.figures for node in self._decodes], request.prompt_len + SLACK)
            if index is None:
                return False
            decode = self._decodes[index]
        if not request.is_local:
            index = choose_prefill([node.figures for node in self._prefills], request.prompt_len)
            if index is None:
                return False
            prefill = self._prefills[index]
        self.num_local += request.is_local
        if prefill is not None and decode is not None:
            self._pairs[request] = prefill, decode
        if decode is not None:
            decode.ask(request)
        elif prefill is not None:
            prefill.submit(request)
        return True
