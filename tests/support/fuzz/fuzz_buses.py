"""Hostile frames against both ends of the bus: the router with all it knows, and a node's membership."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import zmq
from fuzz_frames import hostile_frames
from fuzz_targets import Target
from handoff_nodes import SCHEMA
from samples import make_sample
from wire import Wire

from baton.engine.checkpoint.model_card import read_tokenizer
from baton.engine.checkpoint.model_check import DEMO
from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.membership import Membership
from baton.metadata.bus.sockets import Received
from baton.metadata.errors import BatonError, Refused, RequestError
from baton.metadata.logs import Throttle
from baton.metadata.wire import messages as m
from baton.metadata.wire.frames import encode
from baton.metadata.wire.node_info import Capacity, Load, ModelCard, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import Ended, SamplingParams, Unit, pack_ids
from baton.router.config import RouterConfig
from baton.router.dispatching.runner import RunningDispatcher
from baton.router.figures.metrics import Metrics
from baton.router.requests.delta import Delta
from baton.router.requests.request import Request, Sequence

VOCAB_SIZE = 420
LOAD = Load(free_pages=100, running=0, waiting=0)


def make_hello(role: str, name: str, epoch: str = "1", digest: str = "t") -> m.Hello:
    card = ModelCard(
        name="fake",
        context_len=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(1,),
        bos_token_id=0,
        tokenizer_digest=digest,
        chat_template=None,
    )
    return m.Hello(
        role=role, node_id=name, epoch=epoch, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, layout=SCHEMA,
        target_fingerprint="f" * 16, draft_fingerprint=None, model=card,
        capacity=Capacity(num_pages=100, page_size=4, max_running=16), data_address="tcp://127.0.0.1:1",
        protocol=PROTOCOL_MAX,
    )  # type: ignore[arg-type]  # fmt: skip


class Client:
    """The listener of a request. It checks that the request ends once."""

    def __init__(self) -> None:
        self.num_ends = 0
        self.ids: list[int] = []

    def on_delta(self, choice: Sequence, delta: Delta, /) -> None:
        assert not self.num_ends

    def on_done(self, request: Request, /) -> None:
        self.num_ends += 1

    def on_error(self, request: Request, error: BatonError, /) -> None:
        self.num_ends += 1


class RouterTarget(Target):
    """A hub with the requests behind it, and nodes that lie, each with its own routing id."""

    name = "hub and router"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.failures: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.nodes = [("prefill", "p0"), ("decode", "d0"), ("decode", "d1")]
        self.number = 0
        self.is_known = False
        self.clients: dict[Request, Client] = {}
        self.tokenizer = read_tokenizer(DEMO)
        self.loop.run_until_complete(self._start())

    def feed(self, rng: random.Random) -> None:
        self.loop.run_until_complete(self._feed(rng))
        for context in self.failures:
            raise context.get("exception") or AssertionError(context)

    def close(self) -> None:
        self.loop.run_until_complete(self._stop())
        self.loop.close()

    async def _start(self) -> None:
        self.dispatcher = RunningDispatcher(RouterConfig(canary_interval_s=3600.0), "e0", Metrics())
        # no canary of such nodes is right, and requests must go on
        self.dispatcher.health.is_usable = lambda prefill, _: prefill is not None
        self.hub = Hub("tcp://127.0.0.1:*", "e0", None, self.dispatcher.on_message, self.dispatcher.on_connection_lost)
        self.hub._failures = Throttle(0.0)
        self.hub._loop = asyncio.get_running_loop()
        self.hub._monitor = SimpleNamespace(know=lambda descriptor: None)  # type: ignore[assignment]
        self.asked: deque[tuple[bytes, Any]] = deque(maxlen=12)  # what nodes were given to do
        self.hub.send = self._send  # type: ignore[method-assign]
        self.dispatcher.start(self.hub)
        self._join()

    def _send(self, peer: bytes, message: Any, protocol: int | None = None) -> bool:
        encode(message, protocol)
        if isinstance(message, m.Dispatch):
            self.asked.append((peer, message))
        return True

    def _join(self) -> None:
        for role, name in self.nodes:
            if f"{name}:1".encode() not in self.dispatcher.registry.nodes:
                hello = make_hello(role, name, digest=self.tokenizer.digest)
                self.hub._take(Received(f"{name}:1".encode(), [encode(hello)], None))
        if not self.is_known:
            self.hub._take(Received(b"p0:1", [encode(self.tokenizer)], None))
            self.is_known = True

    async def _feed(self, rng: random.Random) -> None:
        if rng.random() < 0.1:
            self._join()
            self._submit(rng)
        if self.clients and rng.random() < 0.02:
            request = rng.choice(list(self.clients))
            del self.clients[request]
            self.dispatcher.cancel(request, "its client left")
        if self.asked and rng.random() < 0.6:
            sender, message = self._answer(rng)
        else:
            sender = f"{rng.choice(self.nodes)[1]}:{rng.choice('1112')}".encode() + rng.choice([b"", b"", b":beat"])
            message = self._valid(rng)
        before = self.hub.dropped_frames
        frames = [encode(message)] if rng.random() < 0.5 else hostile_frames(rng, message)
        self.hub._take(Received(sender, frames, None))
        self.num_accepted += self.hub.dropped_frames == before
        await asyncio.sleep(0)
        self._check()

    def _submit(self, rng: random.Random) -> None:
        groups = [node.group for node in self.dispatcher.registry.nodes.values() if node.group.tokenizer is not None]
        if not groups or len(self.dispatcher.requests) > 8:
            return
        self.number += 1
        params = SamplingParams(max_tokens=rng.choice([1, 8, 100]))
        client = Client()
        request = Request(
            f"r{self.number}",
            groups[0],
            [5, 6, 7],
            params,
            client,
            num_choices=rng.choice([1, 2]),
            now=time.monotonic(),
        )
        self.clients[request] = client
        try:
            self.dispatcher.submit(request)
        except BatonError:
            del self.clients[request]

    def _check(self) -> None:
        for request, client in list(self.clients.items()):
            assert client.num_ends == (request.rid not in self.dispatcher.requests), request.rid
            if client.num_ends:
                del self.clients[request]
        assert len(self.dispatcher.registry.nodes) <= 2 * len(self.nodes)

    async def _stop(self) -> None:
        for request in list(self.dispatcher.requests.values()):
            self.dispatcher.cancel(request, "the end")
        assert not self.dispatcher.requests
        held = [node.node_id for node in self.dispatcher.registry.nodes.values() if not node.holds_nothing]
        assert not held, held
        self.dispatcher.close()
        self.hub.close()

    def _answer(self, rng: random.Random) -> tuple[bytes, Any]:
        """Return an answer that a node with work could send now."""
        peer, asked = rng.choice(list(self.asked))
        rid, attempt, choice = asked.rid, asked.attempt, rng.choice(asked.choices)
        unit = Unit(rid, choice, attempt)
        request = self.dispatcher.requests.get(rid)
        first = len(request.sequences[choice].received) if request is not None else 0
        count = rng.choice([1, 1, 2, 5])
        ended = {0: Ended("stop", 1, 3, first + count, 0)} if rng.random() < 0.2 else {}
        ids = pack_ids(rng.randint(2, VOCAB_SIZE - 1) for _ in range(count))
        tokens = m.Tokens((unit,), pack_ids([max(0, first + rng.choice([0, 0, 0, -1, 1]))]), pack_ids([count]), ids)
        if isinstance(asked, m.Reserve | m.Compute):
            makers = (
                lambda: m.Reserved(rid=rid, attempt=attempt, granted=asked.choices, load=LOAD),
                lambda: m.Admitted(unit, 0.1, 2, 4096, 0),
                lambda: msgspec.structs.replace(tokens, ended=ended),
                lambda: m.Reserved(rid=rid, attempt=attempt, granted=(), load=LOAD),
                lambda: m.Failed(unit, "transfer_error", "it broke", rng.random() < 0.9),
            )
            return peer, rng.choices(makers, (6, 3, 8, 1, 1))[0]()
        done = m.PrefillDone(rid=rid, attempt=attempt, queue_s=0.1, compute_s=0.1, num_cached=0, load=LOAD)
        return peer, rng.choice([tokens, done])

    def _valid(self, rng: random.Random) -> Any:
        requests = list(self.dispatcher.requests.values())
        rid = rng.choice(requests).rid if requests and rng.random() < 0.8 else "nobody"
        attempt, choice = rng.choice([0, 0, 0, 1]), rng.choice([0, 0, 1])
        unit = Unit(rid, choice, attempt)
        count = rng.choice([1, 1, 2, 5])
        ids = pack_ids(rng.randint(0, VOCAB_SIZE - 1) for _ in range(count))
        ended = {0: Ended("stop", 1, 3, count, 0)} if rng.random() < 0.2 else {}
        makers = (
            lambda: m.Reserved(rid=rid, attempt=attempt, granted=rng.choice([(0,), (0, 1), ()]), load=LOAD),
            lambda: m.Tokens((unit,), pack_ids([rng.choice([0, 1, 2])]), pack_ids([count]), ids, ended=ended),
            lambda: m.Admitted(unit, 0.1, 2, 4096, 0),
            lambda: m.PrefillDone(rid=rid, attempt=attempt, queue_s=0.1, compute_s=0.1, num_cached=0, load=LOAD),
            lambda: m.Failed(unit, rng.choice(["transfer_error", "x"]), "it broke", rng.random() < 0.7),
            lambda: m.Cancelled(rid=rid, attempt=attempt),
            lambda: m.Heartbeat(1, "idle", 0.0, 10.0, LOAD, NodeStats()),
            lambda: m.Leaving(done=rng.random() < 0.5),
            lambda: make_hello(
                rng.choice(["prefill", "decode"]), rng.choice(["p0", "d0"]), rng.choice("12"), self.tokenizer.digest
            ),
            lambda: make_sample(rng.choice(get_args(m.ToRouter)), rng),
        )
        return rng.choices(makers, (4, 6, 2, 2, 2, 2, 2, 0.05, 0.5, 3))[0]()


class _Member:
    """A node that holds nothing."""

    is_idle = True
    cache = PrefixCache(PagePool(2, 16))

    def load(self) -> Load:
        return LOAD

    def stats(self) -> NodeStats:
        return NodeStats()

    def units(self) -> tuple[Unit, ...]:
        return ()

    tickets = units

    def num_units(self) -> Counter[str]:
        return Counter()


class MembershipTarget(Target):
    """A node's end of a bus whose router lies. Every message that the node gets from it must be readable work."""

    name = "link and session"

    def __init__(self) -> None:
        super().__init__()
        wire: Any = Wire()
        self.router = wire.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        file = m.TokenizerFile(digest="t", data=b"")
        self.membership = Membership(make_hello("decode", "d0"), "tcp://127.0.0.1:1", lambda: file, None, 0.0)
        self.membership.member = _Member()  # type: ignore[assignment]
        self.membership._channels[0].link.socket.close()
        self.dealer = wire.dealer(self.router.address)
        self.membership._channels[0].link.socket = self.dealer

    def feed(self, rng: random.Random) -> None:
        before = self.membership.dropped_frames
        self.router.send_multipart([self.dealer.holder, *hostile_frames(rng, self._valid(rng))])
        try:
            work = self.membership.receive()
        except Refused:
            work = []  # a router that refuses a node ends it: that is its right
        self.num_accepted += self.membership.dropped_frames == before
        for item in work:
            if isinstance(item, m.Dispatch):
                try:
                    prompt_ids, received_ids = item.request.token_ids(VOCAB_SIZE, 512)
                except RequestError:
                    continue
                assert prompt_ids and all(0 <= token < VOCAB_SIZE for token in prompt_ids + received_ids)
                assert len({Unit(item.rid, choice, item.attempt) for choice in item.choices}) == len(item.choices) > 0
        self.router.inbox.clear()
        self.dealer.sent.clear()

    def close(self) -> None:
        self.membership.close()

    def _valid(self, rng: random.Random) -> Any:
        kind = rng.choice([*get_args(m.ToNode), *(m.Welcome, m.Reserve, m.Compute, m.Prefill) * 4])
        message = make_sample(kind, rng)
        if isinstance(message, m.Dispatch) and rng.random() < 0.7:
            ids = [pack_ids(rng.randint(0, VOCAB_SIZE - 1) for _ in range(rng.randint(1, 4))) for _ in range(2)]
            request = msgspec.structs.replace(message.request, prompt_ids=ids[0], received_ids=ids[1])
            message = msgspec.structs.replace(message, request=request)
        return msgspec.structs.replace(message, router_epoch="e0" if rng.random() < 0.95 else "e1")
