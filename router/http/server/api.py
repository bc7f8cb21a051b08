"""Everything that a handler may use: the dispatcher, the keys, request bodies, and answers.

Handlers know this file. app.py makes the aiohttp application of an Api and the route table (routes.py).
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections import Counter
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ....metadata.bus.descriptors import Descriptors
from ....metadata.errors import RequestError, Unavailable
from ....metadata.wire.node_info import Role
from ...config import RouterConfig
from ...errors import NotFound
from ...figures.metrics import Metrics
from ...nodes.node import ROLES, NodeGroup
from ...placement.availability import Expected, no_node
from ...runner import RunningDispatcher
from ...text.tokenizer import TextTokenizer
from ..bodies.bodies import Bodies, decoded_mended, decoded_strictly
from ..bodies.body_size import BODY_SIZE, most_plain, quick_size, takes_ids
from ..bodies.fields import check_served
from ..bodies.side_work import SideWork
from ..generation.cache_salts import CacheSalts
from ..generation.grammar_checks import GrammarChecks
from ..operators.ledgers import Ledgers
from ..page.feed import Feed
from ..page.snapshots import Snapshots
from .access import Access
from .in_flight import InFlight

RESPONSE_ID = web.RequestKey("response_id", str)  # id in the answer's body; only generating routes have one
ARRIVED = web.RequestKey("arrived", float)  # monotonic seconds at which the body had been read

_T = TypeVar("_T", bound=msgspec.Struct)


class Api:
    """Services of one router that handlers share."""

    def __init__(
        self, config: RouterConfig, dispatcher: RunningDispatcher, metrics: Metrics, descriptors: Descriptors
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.descriptors = descriptors
        self.is_draining = False
        self.access = Access(config)
        self.salts = CacheSalts(config.cache_scope, config.cache_secret)
        self.ledgers = Ledgers(dispatcher)
        self.snapshots = Snapshots(dispatcher, metrics, self.ledgers, self.why_not_ready, lambda: self.is_draining)
        self.feed = Feed(self.snapshots.read)
        self.grammars = GrammarChecks()
        self.in_flight = InFlight(dispatcher.abort)
        self._expected = Expected(config.expected)
        self.side_work = SideWork()
        self._bodies = Bodies(config.max_body_bytes)

    async def body(self, http_request: web.Request, kind: type[_T]) -> _T:
        """Return the request's body, decoded strictly. Raises RequestError that names a field that is wrong or not
        served."""
        if self.is_draining:
            raise Unavailable("the router is shutting down")
        data = (await self._bodies.read(http_request)).removeprefix(codecs.BOM_UTF8)  # tools of Windows write it
        http_request[ARRIVED] = time.monotonic()
        most = most_plain(kind)
        BODY_SIZE.set(quick_size(data, most) or await self.side_work.exact_size(data, most))
        if takes_ids(kind) and not BODY_SIZE.get().is_small:
            body = await self.side_work.body_of_ids(data, kind)
        else:
            body = decoded_strictly(data, kind)
            if body is None:
                body = decoded_mended(await self.side_work.mended(data, kind), kind)
        check_served(body)
        return body

    def drain(self) -> None:
        """Take no new requests, and end what only looks."""
        self.is_draining = True
        self.feed.close()

    def close(self) -> None:
        """End the processes and threads beside the event loop."""
        self.feed.close()
        self.snapshots.close()
        self.grammars.close()
        self.side_work.close()
        self._bodies.close()

    @property
    def joined_words(self) -> str:
        """How many nodes of each role are here now."""
        counts = Counter(node.role for node in self.dispatcher.registry.nodes.values())
        return f"{counts['prefill']} prefill and {counts['decode']} decode nodes are here"

    def why_not_ready(self) -> str | None:
        """Return what is missing before requests are served as meant, for operators; None if nothing is."""
        missing = self._expected.missing(self.dispatcher.registry.histories)
        if missing:
            return missing
        return None if self.dispatcher.health.is_ready else self.dispatcher.health.reason

    def group_of(self, model: str | None) -> tuple[NodeGroup, TextTokenizer]:
        """Return the group with the shortest queue that serves a model. None stands for the only model served.

        Raises NotFound for a model that no node has ever offered, Unavailable if its nodes are missing.
        """
        registry = self.dispatcher.registry
        if model is None:
            served = {group.key.model for group in registry.models()}
            names = served or {group.key.model for group in registry.groups.values() if group.nodes}
            if len(names) != 1:
                words = ", ".join(sorted(served)) or "none"
                raise RequestError(f"model: must be named; served are: {words}", param="model")
            (model,) = names
        groups = registry.groups_of(model)
        if not groups:
            if not registry.nodes:
                raise Unavailable("no node has joined")
            names = ", ".join(sorted({group.key.model for group in registry.groups.values()}))
            raise NotFound(f"model {model!r} is not served here; served are: {names}", param="model")
        now = time.monotonic()
        served = [group for group in groups if self.dispatcher.queues.may_wait(group, now)]
        ready = [group for group in served if group.can_serve] or served
        if not ready:
            missing: list[Role] = [role for role in ROLES if not any(group.live(role) for group in groups)]
            why = f"it has no {' and no '.join(missing)} node" if missing else "its nodes are not ready"
            raise no_node(f"model {model!r} cannot be served now: {why}", groups, missing)
        group = min(ready, key=lambda group: len(self.dispatcher.queues.waiting_in(group)))
        assert group.tokenizer is not None, "a group that can serve has its tokenizer"
        return group, group.tokenizer

    @staticmethod
    def new_id(http_request: web.Request, prefix: str) -> str:
        """Return a new id for a request that generates. Every answer to it carries the id, errors too."""
        http_request[RESPONSE_ID] = f"{prefix}-{secrets.token_hex(12)}"
        return http_request[RESPONSE_ID]


def request_id(http_request: web.Request) -> str | None:
    """Return the value of the answer's x-request-id: the client's own, else the id in the answer's body."""
    given = http_request.headers.get("x-request-id", "")
    if given and given.isascii() and given.isprintable():
        return given[:128]
    return http_request.get(RESPONSE_ID)


def json_response(value: Any) -> web.Response:
    """Return a successful answer whose body is a Struct as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
