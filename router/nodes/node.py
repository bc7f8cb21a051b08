"""Nodes, and groups of nodes that can be paired. A Node keeps the router's books of the work that it was given.

Nodes of one group can hand requests over to each other: they have equal handoff schemas, weights, model names and
tokenizers. Several groups can serve one model; a request never moves between groups. A prefill and a decode node of a
group make a pair if both and the router know a common protocol version. So an operator can upgrade one node at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...metadata.bus.liveness import late_s
from ...metadata.bus.sockets import routing_id
from ...metadata.cache.names import PageNames
from ...metadata.handoff.schema.schema import tail_window, tails_before
from ...metadata.wire.membership import IDLE, Heartbeat, Hello
from ...metadata.wire.messages import Compute
from ...metadata.wire.node_info import Load, ModelCard, NodeStats, Peer, Role
from ...metadata.wire.protocol import PROTOCOL_MIN, Message, agreed
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import TextTokenizer
from .prompt_role import (
    LOST_S,
    EstimateError,
    GroupFacts,
    LocalPrefill,
    PromptTimes,
    Where,
    handoff_estimate,
    patience_s,
    place_prompt,
)
from .told_pages import ToldPages

ROLES: tuple[Role, ...] = ("prefill", "decode")
FLIGHT_S = 0.02  # a report may have been made this long before it came, without the prompts sent since
QUEUED_PER_SLOT = 2  # prompts that a prefill node of an older release may hold per slot of its batch
FULL_S = 2.0  # a node that refused a reservation is asked again after so long at the latest


class GroupKey(NamedTuple):
    """Values that must be equal in all nodes of a group."""

    schema_digest: str
    target: str
    draft: str | None
    model: str
    tokenizer: str


class _Prompt(NamedTuple):
    """A prompt that a node was given: the tokens that it is expected to compute, and when (monotonic seconds)."""

    num_tokens: int
    given_at: float


class _Held:
    """Choices of one attempt that a decode node was asked for. Until it answers, `pledge` counts pages per choice, and
    `tails` tail pages."""

    __slots__ = ("choices", "pledge", "tails")

    def __init__(self, choices: set[int], pledge: int, tails: int) -> None:
        self.choices = choices
        self.pledge = pledge
        self.tails = tails


class Node:
    """One life (epoch) of a prefill or decode node, and the books of what the router has given it.

    A decode node's books count choices: `reserve` enters them with the pages that they will take, `grant` keeps those
    that the node agreed to, `release` takes them out. The books of a node that computes prompts count prompts:
    `begin_prompt`, `end_prompt`. Every entry belongs to an attempt, named by (rid, attempt). Only this class writes the
    books.
    """

    __slots__ = (
        "_beat",
        "_evict_at",
        "_full_since",
        "_held",
        "_is_cordoned",
        "_is_leaving",
        "_is_reachable",
        "_is_whole",
        "_last_seen",
        "_load",
        "_num_units",
        "_pledged_pages",
        "_pledged_tails",
        "_prompts",
        "_refused_at_room",
        "_reported_at",
        "_welcomed_at",
        "cache",
        "group",
        "hello",
        "joined_at",
        "protocol",
        "protocols",
        "routing_id",
        "unit_epoch",
        "unit_key",
    )

    def __init__(self, hello: Hello, group: NodeGroup, now: float) -> None:
        self.routing_id = routing_id(hello.node_id, hello.epoch)
        self.hello = hello
        place = hello.place
        # of the node, or of all ranks of its group together
        self.unit_key = self.routing_id if place is None else f"{place.group}:{place.epoch}".encode()
        self.unit_epoch = hello.unit_epoch  # likewise
        self.protocols = hello.protocols  # the lowest and the highest that it knows
        self.protocol = agreed(self.protocols) or PROTOCOL_MIN  # in which it is addressed
        self.group = group
        self.joined_at = now
        self.cache = ToldPages(hello.capacity.cached_pages)
        self._load = Load.of_idle(hello.capacity)
        self._beat: Heartbeat | None = None
        self._last_seen = self._welcomed_at = self._reported_at = now
        self._is_leaving = False
        self._is_cordoned = False
        self._evict_at: float | None = None
        self._is_reachable = True
        self._is_whole = place is None
        self._prompts: dict[tuple[str, int], _Prompt] = {}
        self._held: dict[tuple[str, int], _Held] = {}
        self._num_units = 0
        self._pledged_pages = self._pledged_tails = 0
        self._full_since: float | None = None
        self._refused_at_room = 0

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def unit(self) -> str:
        """Name of what an operator starts, drains and stops: the node, or the group of which it is a rank."""
        return self.hello.unit

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def choice_room(self) -> int:
        """How many more choices the node can take."""
        return self.max_running - self.num_units

    @property
    def max_running(self) -> int:
        """Choices or prompts that it can work on at once."""
        return self.hello.capacity.max_running

    @property
    def max_prompts(self) -> int:
        """Prompts that this router may have at the node at once: what the node grants it. A node of an older release
        grants nothing, and knows no other router."""
        return self._load.max_prompts or QUEUED_PER_SLOT * self.max_running

    @property
    def num_pages(self) -> int:
        """Pages of its pool that requests may use."""
        return self.hello.capacity.num_pages

    # Heartbeats and availability

    @property
    def load(self) -> Load:
        """The load that the node reported last."""
        return self._load

    @property
    def beat(self) -> Heartbeat | None:
        """The last heartbeat."""
        return self._beat

    @property
    def stats(self) -> NodeStats:
        return self._beat.stats if self._beat is not None else NodeStats()

    @property
    def canary_router(self) -> str:
        """Epoch of the router that sends the node's routine canaries, as the node says; "": it has not said one."""
        service = self._beat.service if self._beat is not None else None
        return "" if service is None else service.canary_router

    @property
    def last_seen(self) -> float:
        """Time of the last heartbeat, or of joining."""
        return self._last_seen

    def silence_s(self, now: float) -> float:
        """Return for how long a heartbeat has been due, as the last one says, and has not come."""
        return now - self._last_seen - (late_s(self._beat) if self._beat is not None else 0.0)

    @property
    def welcomed_at(self) -> float:
        """Time of the last Welcome."""
        return self._welcomed_at

    @property
    def busy_since(self) -> float | None:
        """When the step began in which the node was at its last heartbeat: until the step ends, the node reads no
        message. None if it waited for messages, or if its step takes longer than it should."""
        beat = self._beat
        if beat is None or beat.phase == IDLE or not beat.phase_age_s <= beat.phase_limit_s:
            return None
        return self._last_seen - beat.phase_age_s

    @property
    def is_leaving(self) -> bool:
        """Whether the node said that it stops, or is gone."""
        return self._is_leaving

    @property
    def is_cordoned(self) -> bool:
        """Whether an operator drains the node."""
        return self._is_cordoned

    @property
    def is_draining(self) -> bool:
        """Whether the node takes no new work because it leaves or is drained."""
        return self._is_leaving or self._is_cordoned

    @property
    def is_reachable(self) -> bool:
        """False after a message could not be sent to it, until its next heartbeat."""
        return self._is_reachable

    @property
    def is_live(self) -> bool:
        """Whether the node takes new work."""
        return self._is_reachable and self._is_whole and not self._is_leaving and not self._is_cordoned

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        self._beat = beat
        self._last_seen = now
        self._is_reachable = True
        self.cache.count(beat.stats.cache_changes, now)
        self.report(beat.load, now)

    def report(self, load: Load, now: float) -> None:
        """Record the load that the node reports. If the load shows more room than at a refusal, the node is not full
        any more."""
        self._load = load
        self._reported_at = now
        if self._full_since is not None and (load.free_pages > self._refused_at_room or load.running == 0):
            self._full_since = None

    def complete(self) -> None:
        """All ranks of its group have joined."""
        self._is_whole = True

    def welcome(self, now: float) -> None:
        """Record that Welcome was sent."""
        self._welcomed_at = now

    def lose_touch(self) -> None:
        """A message could not be sent to the node."""
        self._is_reachable = False

    def leave(self) -> None:
        """Record that the node said that it stops, or is gone."""
        self._is_leaving = True

    def cordon(self, evict_at: float | None = None) -> None:
        """An operator drains the node. Work that it still holds at `evict_at` moves elsewhere (None: it stays)."""
        self._is_cordoned = True
        self._evict_at = evict_at

    def uncordon(self) -> None:
        """The operator takes the drain back."""
        self._is_cordoned = False
        self._evict_at = None

    def must_evict(self, now: float) -> bool:
        """Whether the time that the operator gave it to finish its work is over."""
        return self._evict_at is not None and now >= self._evict_at

    def evicted(self) -> None:
        """Its work has been moved elsewhere."""
        self._evict_at = None

    # Books of a decode node

    @property
    def num_units(self) -> int:
        """Choices that it was asked for or runs."""
        return self._num_units

    @property
    def pledged_pages(self) -> int:
        """Pages of reservations that it has not answered yet."""
        return self._pledged_pages

    @property
    def room(self) -> int:
        """The pages that are free when reservations under way have theirs."""
        return self._load.free_pages - self._pledged_pages

    def room_for(self, num_tails: int) -> int:
        """Return the most free pages that one request can get there, if it needs so many tail pages, too: 0 if these
        are not free."""
        return self.room if num_tails <= self._load.free_tails - self._pledged_tails else 0

    @property
    def is_empty(self) -> bool:
        """Whether neither the router nor the node itself knows of any work on the node."""
        return not self._num_units and not self._load.running and self._load.free_pages >= self.num_pages

    @property
    def holds_nothing(self) -> bool:
        """Whether the books show no work on the node."""
        return not (self._held or self._prompts or self._num_units or self._pledged_pages or self._pledged_tails)

    def units_of(self, rid: str, attempt: int) -> frozenset[int]:
        """Choices of an attempt that the books hold."""
        held = self._held.get((rid, attempt))
        return frozenset(held.choices) if held is not None else frozenset()

    def reserve(
        self, rid: str, attempt: int, choices: Iterable[int], pages_per_choice: int, tails_per_choice: int = 0
    ) -> None:
        """The node is asked for these choices, each with so many pages and tail pages."""
        assert (rid, attempt) not in self._held, (self.node_id, rid, attempt)
        held = self._held[rid, attempt] = _Held(set(choices), pages_per_choice, tails_per_choice)
        self._num_units += len(held.choices)
        self._pledge(held, len(held.choices))

    def grant(self, rid: str, attempt: int, choices: Iterable[int]) -> None:
        """The node answered a reservation: it holds these choices, and its own figures count their pages."""
        held = self._held.get((rid, attempt))
        if held is None:
            return
        self._pledge(held, -len(held.choices))
        held.pledge = held.tails = 0
        self.release(rid, attempt, held.choices.difference(choices))

    def refuse(self, now: float) -> None:
        """The node had no room. It is asked again when it shows more room, or after a while."""
        self._full_since = now
        self._refused_at_room = self._load.free_pages

    def make_room(self, load: Load, now: float) -> None:
        """The node said that it has room again."""
        self._full_since = None
        self.report(load, now)

    def is_full(self, now: float) -> bool:
        """Whether it refused a reservation lately and has not shown more room since."""
        return self._full_since is not None and now - self._full_since <= FULL_S

    def release(self, rid: str, attempt: int, choices: Iterable[int]) -> None:
        """Take these choices of an attempt out of the books, whether or not the node has answered for them."""
        held = self._held.get((rid, attempt))
        if held is None:
            return
        gone = held.choices.intersection(choices)
        held.choices -= gone
        self._num_units -= len(gone)
        self._pledge(held, -len(gone))
        if not held.choices:
            del self._held[rid, attempt]
            self.end_prompt(rid, attempt)

    def _pledge(self, held: _Held, num_choices: int) -> None:
        """Add the pages of so many choices to those that the node has not answered for."""
        self._pledged_pages += held.pledge * num_choices
        self._pledged_tails += held.tails * num_choices

    # Books of a node that computes prompts

    @property
    def num_prompts(self) -> int:
        """Prompts that it has not finished."""
        return len(self._prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of these prompts that it is expected to compute."""
        return sum(prompt.num_tokens for prompt in self._prompts.values())

    def num_queued_tokens(self, now: float) -> int:
        """Return how many prompt tokens the node has still to compute, if it is as fast as it reported: those that it
        reported last, and those that it was given since. If it has no other router, these are no more than those of its
        unfinished prompts."""
        token_s = self.prompt_times.token_s
        num_left, at = float(self._load.queued_tokens), self._reported_at
        given = [each for each in self._prompts.values() if each.given_at >= self._reported_at - FLIGHT_S]
        for num_tokens, given_at in [*given, _Prompt(0, now)]:  # oldest first
            if token_s > 0:
                num_left = max(0.0, num_left - max(0.0, given_at - at) / token_s)
            num_left, at = num_left + num_tokens, max(at, given_at)
        return int(num_left) if self._load.num_routers > 1 else min(self.num_prompt_tokens, int(num_left))

    def oldest_prompt_at(self, now: float) -> float:
        """Return when the node was given the oldest prompt that it has not finished; `now` if there is none."""
        return min((prompt.given_at for prompt in self._prompts.values()), default=now)

    @property
    def prompt_times(self) -> PromptTimes:
        """The times of prompts on the node, as it reported them last."""
        load = self._load
        return PromptTimes(load.prompt_token_s, load.prompt_fixed_s, load.paced_prompt_tokens, load.prompt_rest_token_s)

    def begin_prompt(self, rid: str, attempt: int, num_tokens: int, now: float) -> None:
        """Enter a prompt of which the node has to compute `num_tokens` tokens."""
        self._prompts[rid, attempt] = _Prompt(num_tokens, now)

    def end_prompt(self, rid: str, attempt: int) -> None:
        """Take the prompt out of the books: the node has finished it, or need not finish it."""
        self._prompts.pop((rid, attempt), None)

    # Pairing

    def shares_protocol(self, other: Node | Hello) -> bool:
        """Whether a protocol version exists that it, the other node and the router know."""
        return agreed(self.protocols, other.protocols) is not None

    @property
    def lends(self) -> bool:
        """Whether other nodes can borrow pages of its prefix cache."""
        return self.hello.borrows and bool(self.hello.data_address) and self._is_reachable

    def knows(self, kind: type[Message]) -> bool:
        """Whether a message of this type can be sent to it."""
        return kind.since <= self.protocol

    def peer_of(self, other: Node) -> Peer:
        """The address of this node for the other node, its partner."""
        protocol = agreed(self.protocols, other.protocols) or 0
        hello = self.hello
        return Peer(node_id=hello.node_id, epoch=hello.epoch, data_address=hello.data_address, protocol=protocol)


class NodeGroup:
    """Nodes that can be paired with each other, with the tokenizer and template of their model."""

    def __init__(
        self, key: GroupKey, hello: Hello, local_prefill: LocalPrefill = "never", page_key: bytes = b""
    ) -> None:
        """`page_key`: of the names of its pages."""
        self.key = key
        self.names = PageNames(page_key, hello.layout.page_size, hello.layout.key_lookahead)
        self.num_tails = tails_before(tail_window(hello.layout), hello.layout.page_size)
        self.facts = GroupFacts(local_prefill)  # `look` renews them
        self.handoff_s = handoff_estimate()
        self.errors: dict[Where, EstimateError] = {"remote": EstimateError(), "local": EstimateError()}
        self._had_prefill = False
        self._prefill_at: float | None = None  # when a prefill node was last seen, or the group was first looked at
        self._handed_over_at = math.inf  # when `look` last heard that a pair of nodes hands over
        self.card: ModelCard = hello.model
        self.layout = hello.layout
        self.nodes: dict[bytes, Node] = {}
        self.tokenizer: TextTokenizer | None = None
        self.has_bad_tokenizer = False  # a node sent one that cannot be read
        self.template: ChatTemplate | None = ChatTemplate.of(hello.model)
        self.created = int(time.time())

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def rounds_coarsely(self) -> bool:
        """Whether a node says that it rounds coarsely (`Hello`). Nodes of an older protocol cannot say it."""
        return any(node.hello.rounds_coarsely for node in self.nodes.values())

    def live(self, role: Role) -> list[Node]:
        """Nodes of a role that take new work."""
        return [node for node in self.nodes.values() if node.role == role and node.is_live]

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Prefill and decode nodes that take new work and know a common protocol."""
        decodes = self.live("decode")
        for prefill in self.live("prefill"):
            for decode in decodes:
                if prefill.shares_protocol(decode):
                    yield prefill, decode

    def look(self, now: float, node_wait_s: float, *, hands_over: bool = True) -> bool:
        """Renew the facts on which the placement of prompts depends. Return whether it changes for ordinary requests.

        To be called several times per second. `node_wait_s`: how long requests wait for a node. `hands_over`: not all
        pairs of nodes fail to hand pages over."""
        before = self.computes_locally, self.may_compute_locally
        decodes = self.live("decode")
        if any(node.role == "prefill" for node in self.nodes.values()):  # one that drains may be put back
            self._had_prefill, self._prefill_at = True, now
        elif self._prefill_at is None or not self.nodes:
            self._had_prefill, self._prefill_at = False, now
        if hands_over:
            self._handed_over_at = now
        most = patience_s(node_wait_s, had_prefill=self._had_prefill)
        self.facts = GroupFacts(
            self.facts.mode,
            lacks_prefill=now - self._prefill_at > most,
            lacks_handoff=now - self._handed_over_at > LOST_S,
            decodes_compute=bool(decodes) and all(node.knows(Compute) for node in decodes),
        )
        return before != (self.computes_locally, self.may_compute_locally)

    @property
    def computes_locally(self) -> bool:
        """Whether decode nodes compute the prompts of all ordinary requests."""
        place = place_prompt(self.facts)
        return place is not None and place.where == "local"

    @property
    def may_compute_locally(self) -> bool:
        """Whether decode nodes compute the prompts of some or all ordinary requests."""
        place = place_prompt(self.facts)
        return place is None or place.where == "local"

    @property
    def placement_words(self) -> str:
        """A sentence on who computes the prompts of ordinary requests."""
        place = place_prompt(self.facts)
        if place is None:
            return f"model {self.key.model}: each prompt is computed by the prefill or decode node that is sooner"
        who = "decode nodes" if place.where == "local" else "prefill nodes"
        return f"model {self.key.model}: {who} compute prompts{place.words and ', since ' + place.words}"

    def local_nodes(self) -> list[Node]:
        """Return the decode nodes that compute prompts and take new work."""
        return [node for node in self.live("decode") if node.knows(Compute)] if self.may_compute_locally else []

    @property
    def can_serve(self) -> bool:
        """Whether the group has a tokenizer, and a pair of nodes or decode nodes that compute prompts."""
        if self.tokenizer is None:
            return False
        return any(True for _ in self.pairs()) or bool(self.local_nodes())

    @property
    def context_len(self) -> int:
        """Tokens of prompt plus output that every node of the group takes."""
        return min((node.hello.model.context_len for node in self.nodes.values()), default=self.card.context_len)

    def most_pages(self, role: Role) -> int:
        """Pages of the largest pool of a role."""
        return max((node.hello.capacity.num_pages for node in self.live(role)), default=0)
