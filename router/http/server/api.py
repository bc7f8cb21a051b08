"""Everything that a handler may use: the dispatcher, the keys, request bodies, requests under way, and answers.

Handlers know this file. app.py makes the aiohttp application of an Api and the route table (routes.py).
"""

from __future__ import annotations

import asyncio
import codecs
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from ....metadata.bus.descriptors import Descriptors
from ....metadata.errors import RequestError, Unavailable
from ....metadata.wire.node_info import Role
from ...config import RouterConfig
from ...dispatching.runner import RunningDispatcher
from ...errors import NotFound, RequestCancelled
from ...figures.metrics import Metrics
from ...nodes.availability import Expected, no_node
from ...nodes.node import ROLES, NodeGroup
from ...text.tokenizer import TextTokenizer
from ..bodies.bodies import (
    BODY_SIZE,
    MAX_BODIES,
    Bodies,
    decoded_mended,
    decoded_strictly,
    most_plain,
    quick_size,
    takes_ids,
)
from ..bodies.fields import check_served
from ..bodies.side_work import SideWork
from ..generation.grammars import GrammarChecks
from ..generation.idempotency import HEADER as KEY_HEADER
from ..generation.idempotency import KEYED_SEED, keyed_seed
from ..page.feed import Feed
from ..page.snapshots import Snapshots
from .access import CALLER, Access, CacheSalts, Caller

RESPONSE_ID = web.RequestKey("response_id", str)  # id in the answer's body; only generating routes have one
ARRIVED = web.RequestKey("arrived", float)  # monotonic seconds at which the body had been read

_MESSAGES_PATH = "/v1/messages"  # answers on it and below it have Anthropic's shape
_VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request
_OPENAI_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}

_LOOK_AGAIN_S = 0.1  # how long an early request waits before it looks for nodes again

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
        self.snapshots = Snapshots(dispatcher, metrics, self.why_not_ready, lambda: self.is_draining)
        self.feed = Feed(self.snapshots.read)
        self.grammars = GrammarChecks()
        self.in_flight = InFlight()
        self.early = EarlyRequests(config)
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
        key = http_request.headers.get(KEY_HEADER)
        if key is not None:
            http_request[KEYED_SEED] = keyed_seed(key, http_request[CALLER].tenant.name, data)
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
        self.early.stop()
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

    async def group_of(self, http_request: web.Request, model: str | None) -> tuple[NodeGroup, TextTokenizer]:
        """Return the group with the shortest queue that serves a model. None stands for the only model served.

        If the router has just started, wait for the nodes of the model. Raises NotFound for a model that no node has
        ever offered, Unavailable if its nodes are missing, RequestCancelled if a client cancels it meanwhile.
        """
        while True:
            try:
                return self._group_now(model)
            except (NotFound, Unavailable):
                if not await self._has_waited(http_request):
                    raise

    async def _has_waited(self, http_request: web.Request) -> bool:
        """Wait a moment for nodes, if the request may wait for them. Raises RequestCancelled."""
        reasons: list[str] = []

        def end(reason: str) -> bool:
            reasons.append(reason)
            return True

        with self.in_flight.listed({request_id(http_request)}, http_request[CALLER], end):
            has_waited = await self.early.has_waited(BODY_SIZE.get().num_bytes)
        if reasons:
            raise RequestCancelled(f"the request was cancelled: {reasons[0]}")
        return has_waited

    def _group_now(self, model: str | None) -> tuple[NodeGroup, TextTokenizer]:
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


def is_anthropic(http_request: web.BaseRequest) -> bool:
    """Return whether a client expects Anthropic's shapes. On paths that both APIs have, and on those that no route has,
    its header tells it."""
    path = http_request.path
    if path in _OPENAI_PATHS:
        return False
    return f"{path}/".startswith(f"{_MESSAGES_PATH}/") or _VERSION_HEADER in http_request.headers


def json_response(value: Any) -> web.Response:
    """Return a successful answer whose body is a Struct as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class EarlyRequests:
    """Requests that come before the nodes of their model do. The nodes of a restarted router join it again within
    seconds, so requests wait for them until `node_wait_s` after its start. Their number and bytes are bounded."""

    def __init__(self, config: RouterConfig) -> None:
        self._until = time.monotonic() + config.node_wait_s
        self._max_requests, self._max_bytes = config.max_waiting, MAX_BODIES * config.max_body_bytes
        self.num_requests = self._num_bytes = 0

    async def has_waited(self, num_bytes: int) -> bool:
        """Wait a moment with a request of so many bytes. Return False at once if it may not wait any longer."""
        is_full = self.num_requests >= self._max_requests or self._num_bytes + num_bytes > self._max_bytes
        if is_full or time.monotonic() >= self._until:
            return False
        self.num_requests += 1
        self._num_bytes += num_bytes
        try:
            await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self.num_requests -= 1
            self._num_bytes -= num_bytes
        return True

    def stop(self) -> None:
        """No request may wait any longer."""
        self._until = time.monotonic()


class _HttpRequest(NamedTuple):
    caller: Caller
    end: Callable[[str], bool]


class InFlight:
    """The HTTP requests under way, by the ids in their answers. A client can cancel by such an id."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[_HttpRequest]] = {}  # clients choose ids, so several requests may share one

    @contextmanager
    def listed(self, ids: set[str | None], caller: Caller, end: Callable[[str], bool]) -> Generator[None]:
        """Make a request cancellable by any of the ids that it has while the block runs. `end` ends it with an error
        that states the reason, and returns False if it is over already."""
        http_request = _HttpRequest(caller, end)
        given = [each for each in ids if each is not None]
        for each in given:
            self._by_id.setdefault(each, []).append(http_request)
        try:
            yield
        finally:
            for each in given:
                self._by_id[each].remove(http_request)
                if not self._by_id[each]:
                    del self._by_id[each]

    def cancel(self, request_id: str, caller: Caller) -> None:
        """End the caller's requests with this id; an admin ends those of any caller. Each client gets one error.

        Raises NotFound if there is none.
        """
        found = [each for each in self._by_id.get(request_id, ()) if caller.is_admin or each.caller is caller]
        ended = [each.end("by DELETE /v1/requests") for each in found]
        if not any(ended):
            raise NotFound(f"no request {request_id!r} is under way: it has ended, or there never was one")
