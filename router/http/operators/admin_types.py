"""Bodies of the routes for operators and probes: /health, /ready, /debug/* and /admin/*.

The bodies of /debug/requests are declared in explain.py. The OpenAPI document is generated from these types.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ....metadata.wire.node_info import Capacity, HandoffSchema, Load, NodeStats, PoolLedger, Role, TierLedger
from ...nodes.availability import Degraded


class HealthAnswer(Struct, frozen=True, omit_defaults=True):
    """Answer of GET /health. Operators also get `local_prefill`, a sentence for each model whose prompts decode nodes
    compute."""

    status: Literal["ok"]
    local_prefill: list[str] = []


class ReadyAnswer(Struct, frozen=True, omit_defaults=True):
    """Answer of GET /ready. Operators also get `local_prefill`, a sentence for each model whose prompts decode nodes
    compute, and `degraded`, if some node is not as it should be."""

    status: Literal["ready"]
    local_prefill: list[str] = []
    degraded: list[Degraded] = []


class HeldWork(Struct, frozen=True):
    """Numbers of prompts and sequences that the router has given to a node."""

    prefilling: int
    units: int


class NodeState(Struct, frozen=True, kw_only=True):
    """One node as the router sees it. A node that has not sent a heartbeat yet has no phase and step."""

    node_id: str
    epoch: str
    role: Role
    model: str
    is_draining: bool
    last_seen_s: float
    phase: str | None
    phase_age_s: float | None
    step: int | None
    data_address: str
    layout: HandoffSchema
    target_fingerprint: str
    draft_fingerprint: str | None
    commit: str
    capacity: Capacity
    load: Load
    stats: NodeStats
    has: HeldWork


class ListedNode(NodeState, frozen=True, kw_only=True):
    """One node among others. `proven`: epochs of its partners in pairs that are ready, which it will name to the next
    router."""

    num_restarts: int
    proven: tuple[str, ...]


class PairState(Struct, frozen=True):
    """A prefill and a decode node, by id, and whether a canary request has passed through both. `is_reported`: it was
    one of an earlier router, as both nodes say."""

    prefill: str
    decode: str
    state: str
    is_reported: bool


class NodesAnswer(Struct, frozen=True, kw_only=True):
    """Answer of GET /debug/nodes."""

    router_epoch: str
    is_ready: bool
    reason: str | None
    degraded: list[Degraded]
    nodes: list[ListedNode]
    pairs: list[PairState]


class RouterLedger(Struct, frozen=True, kw_only=True):
    """Work that the router itself holds. `requests` are ids. `epoch` is new at each start of the router."""

    epoch: str
    requests: list[str]
    canaries: int
    waiting: int
    unacknowledged_cancels: int


class NodeLedger(Struct, frozen=True, kw_only=True):
    """Ledger of one node. `requests` and `tickets` name units of work as `id/choice/attempt`, whichever router gave
    them. `routers`: by the epochs of the routers that the node has joined, how many of `requests` are theirs."""

    pool: PoolLedger
    requests: list[str]
    tickets: list[str]
    load: Load
    stats: NodeStats
    tail_pool: PoolLedger | None = None  # tail pages, of layers with a window; null: the model has none
    routers: dict[str, int] = {}  # empty if the node is of an older release
    host_tier: TierLedger | None = None  # null: the node has none


class LedgersAnswer(Struct, frozen=True):
    """Answer of GET /debug/ledger and POST /admin/flush. A node that did not answer in time is null."""

    router: RouterLedger
    nodes: dict[str, NodeLedger | None]


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /admin/nodes/{id}/drain, which may be left out."""

    timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)] | None,
        Meta(
            description="Seconds after which the router moves the node's unfinished requests to other nodes; by "
            "default --drain-timeout-s."
        ),
    ] = None


class NodesOfRoles(Struct, frozen=True):
    """Ids of a group's nodes."""

    prefill: list[str]
    decode: list[str]


class HandoffField(Struct, frozen=True, kw_only=True):
    """A field of the metadata row: its size, the role that writes it, and the role that reads it."""

    name: str
    dtype: str
    width: int
    bytes: int
    writer: Role
    reader: Role
    meaning: str


class PromptBytes(Struct, frozen=True, kw_only=True):
    """Bytes that one sequence hands over if the decode node has cached nothing of its prompt."""

    prompt_tokens: int
    target_kv: int
    draft_kv: int
    hidden_state: int
    rest_of_row: int
    total: int


class HandoffGroup(Struct, frozen=True, kw_only=True):
    """Contents of a handoff between the nodes of one group. `words` says the same in lines of text."""

    model: str
    nodes: NodesOfRoles
    schema: HandoffSchema
    schema_digest: str
    page_bytes: int
    row_bytes: int
    row: list[HandoffField]
    requests: list[PromptBytes]
    words: list[str]


class HandoffAnswer(Struct, frozen=True):
    """Answer of GET /debug/handoff as JSON."""

    groups: list[HandoffGroup]
