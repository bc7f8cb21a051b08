"""A prefill and a decode node in one thread, with real sockets, driven by a minimal router."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from local_nodes import start_decode, start_prefill

from baton.decode_node.config import DecodeConfig
from baton.decode_node.node import DecodeNode
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.membership import Heartbeat, Hello, Inspect, LedgerReport, RouterHeartbeat, Welcome
from baton.metadata.wire.messages import (
    Admitted,
    CapacityFreed,
    Compute,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    to_router_decoder,
)
from baton.metadata.wire.node_info import Lender, Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import (
    Ended,
    GenerationRequest,
    SamplingParams,
    TokenLogprobs,
    Unit,
    pack_ids,
    unpack_ids,
)
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.node import PrefillNode
from baton.router.nodes.node import FULL_S

ROUTER_EPOCH = "test-router"


@dataclass
class Result:
    """The answer that the router received for one choice."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: Ended | None = None
    failed: Failed | None = None


@dataclass
class _Waiting:
    """A request that waits for a reservation."""

    rid: str
    request: GenerationRequest
    choices: list[int]
    attempt: int = 0
    is_local: bool = False
    num_lent: int = 0


@contextmanager
def node_pairs(*, checks_books: bool = True) -> Iterator[Callable[..., NodePair]]:
    """Yield a function that starts pairs, with the arguments of NodePair. When the block ends, the books of all pairs
    are checked (unless `checks_books` is False) and all pairs are closed."""
    pairs: list[NodePair] = []
    with ExitStack() as stack:

        def start(model: Path, **options: Any) -> NodePair:
            pairs.append(NodePair(model, **options))
            stack.callback(pairs[-1].close)
            return pairs[-1]

        yield start
        for pair in pairs if checks_books else ():
            pair.check_books()


class NodePair:
    """`submit` requests, then `run` until all have ended. The decode node is asked for reservations in order."""

    def __init__(
        self,
        model: Path,
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        is_adaptive: bool = False,
        overlaps: bool | None = None,
    ):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        common: dict[str, Any] = {
            "router": f"tcp://127.0.0.1:{port}",
            "model": str(model),
            "device": "cpu",
            "threads": 1,
        }
        self._nodes: list[PrefillNode | DecodeNode] = []
        self._ranks = ExitStack()
        with ExitStack() as stack:
            stack.callback(self.close)
            settings = PrefillConfig(**(common | (prefill or {})))
            self.prefill = start_prefill("prefill-0", settings, lease_s=5.0, ranks=self._ranks, overlaps=overlaps)
            self._nodes.append(self.prefill)
            settings = DecodeConfig(**(common | (decode or {})))
            self.decode = start_decode(
                "decode-0", settings, ranks=self._ranks, is_adaptive=is_adaptive, overlaps=overlaps
            )
            self._nodes.append(self.decode)
            stack.pop_all()
        for node in (
            self.prefill,
            self.decode,
        ):  # this thread is also their router, which must not count as gone while a node computes
            node.membership._channels[0].session._clock = lambda: 0.0
        self.results: dict[tuple[str, int], Result] = {}
        self.admitted: list[Admitted] = []
        self.done: dict[str, PrefillDone] = {}
        self.ledgers: list[LedgerReport] = []
        self._ids: dict[str, bytes] = {}
        self._hellos: dict[str, Hello] = {}
        self._waiting: list[_Waiting] = []
        self._reserving: _Waiting | None = None
        self.is_full = False
        self._refused_at = 0.0
        self._join()

    @property
    def hellos(self) -> dict[str, Hello]:
        """The Hello of each role."""
        return self._hellos

    def submit(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        received: Sequence[int] = (),
        is_local: bool = False,
        num_lent: int = 0,
        **more: Any,
    ) -> None:
        """Queue a request. Its results are `results[rid, choice]`. `is_local`: the decode node computes the prompt.
        `num_lent`: leading pages of the prompt that the router knows to be in the cache of the other node."""
        request = GenerationRequest(
            prompt_ids=pack_ids(prompt_ids), params=params, received_ids=pack_ids(received), **more
        )
        for choice in range(n):
            self.results[rid, choice] = Result()
        self._waiting.append(_Waiting(rid, request, list(range(n)), is_local=is_local, num_lent=num_lent))

    def run(self, timeout_s: float = 60.0) -> dict[tuple[str, int], Result]:
        """Step both nodes until every choice has ended or failed and both nodes hold nothing."""
        self.step_until(lambda: self.is_done, timeout_s)
        return self.results

    def step_until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Step both nodes until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.step()
            assert time.monotonic() < deadline, self.results

    @property
    def is_started(self) -> bool:
        """Whether no submitted request waits for a reservation or for its prompt."""
        return not self._waiting and self._reserving is None and not self.decode.scheduler.reserved

    @property
    def is_done(self) -> bool:
        pending = [r for r in self.results.values() if r.ended is None and r.failed is None]
        return not pending and self.prefill.is_idle and self.decode.is_idle and not self._waiting

    def step(self) -> None:
        """Step each node once, and process their messages."""
        is_busy = self.prefill.step()
        self._receive()
        is_busy |= self.decode.step()
        self._receive()
        self._dispatch()
        if not is_busy:
            time.sleep(0.0001)  # the turn of threads that move messages and pages

    def send(self, node: str, message: Any) -> None:
        self._socket.send_multipart([self._ids[node], encode(message)])

    def check_books(self) -> None:
        """Check that the nodes hold no request, ticket or state of a prompt, and that every page can be freed."""
        assert not self.prefill.prompts.keys, self.prefill.prompts.keys
        for node in (self.prefill, self.decode):
            ledger = node.cache.ledger()
            assert not node.units() and not node.tickets(), (node.units(), node.tickets())
            assert ledger.request == ledger.ticket == ledger.cache_referenced == 0, ledger
            node.cache.flush()
            ledger = node.cache.ledger()
            assert ledger.free + ledger.padding == node.cache.pool.num_pages, ledger
            tails = node.cache.tail_ledger()
            assert tails is None or tails.free + tails.padding == node.cache.pool.num_tails, tails

    def inspect(self, node: str) -> LedgerReport:
        """Return the node's books as the router gets them."""
        self.send(node, Inspect(router_epoch=ROUTER_EPOCH, query=len(self.ledgers)))
        count = len(self.ledgers)
        while len(self.ledgers) == count:
            self.step()
        return self.ledgers[-1]

    def close(self) -> None:
        for node in self._nodes:
            node.membership.close()
            node.links.close()
        self._ranks.close()
        self._socket.close()
        self._context.term()

    def _join(self) -> None:
        deadline = time.monotonic() + 10
        while len(self._ids) < 2:
            self._receive()
            assert time.monotonic() < deadline
        for name in self._ids:
            self.send(name, Welcome(router_epoch=ROUTER_EPOCH, protocol=PROTOCOL_MAX, need_tokenizer=False))

    def _receive(self) -> None:
        while True:
            try:
                sender, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(sender, decode_frame(to_router_decoder, body))

    def _handle(self, sender: bytes, message: Any) -> None:
        match message:
            case Hello():
                self._ids[message.role], self._hellos[message.role] = sender, message
            case Heartbeat():
                for name in self._ids:
                    self.send(name, RouterHeartbeat(router_epoch=ROUTER_EPOCH))
            case Reserved():
                self._granted(message)
            case CapacityFreed():
                self.is_full = False
            case Tokens():
                self._take(message)
            case Failed(unit=unit):
                result = self.results.get((unit.rid, unit.choice))  # None: the test has cancelled the request
                if result is not None and result.failed is None:
                    result.failed = message
            case Admitted():
                self.admitted.append(message)
            case PrefillDone():
                self.done[message.rid] = message
            case LedgerReport():
                self.ledgers.append(message)

    def _dispatch(self) -> None:
        """Ask for a reservation for the first waiting request. A request of one token needs none, unless its prompt is
        local."""
        if self.is_full and time.monotonic() - self._refused_at > FULL_S:
            self.is_full = False  # a node forgets an ask that is not repeated
        if self._reserving is not None or self.is_full or not self._waiting:
            return
        entry = self._waiting[0]
        if entry.request.params.max_tokens == 1 and not entry.is_local:
            self._waiting.pop(0)
            self._send_prefill(entry, tuple(entry.choices), None)
            return
        self._reserving = entry
        work: dict[str, Any] = {
            "router_epoch": ROUTER_EPOCH,
            "rid": entry.rid,
            "attempt": entry.attempt,
            "choices": tuple(entry.choices),
            "request": entry.request,
        }
        if entry.is_local:
            self.send("decode", Compute(**work, lender=self._lender("prefill", entry)))
            return
        self.send("decode", Reserve(**work, prefill=self._peer("prefill")))

    def _peer(self, role: str) -> Peer:
        hello = self._hellos[role]
        return Peer(node_id=hello.node_id, epoch=hello.epoch, data_address=hello.data_address, protocol=PROTOCOL_MAX)

    def _lender(self, role: str, entry: _Waiting) -> Lender | None:
        return Lender(self._peer(role), entry.num_lent) if entry.num_lent else None

    def _granted(self, message: Reserved) -> None:
        entry = self._reserving
        if entry is None or (entry.rid, entry.attempt) != (message.rid, message.attempt):
            return  # the answer came twice
        self._reserving = None
        if entry not in self._waiting:  # the test has cancelled the request
            return
        if message.granted and not entry.is_local:
            self._send_prefill(entry, message.granted, self._peer("decode"))
        entry.choices = [choice for choice in entry.choices if choice not in message.granted]
        entry.attempt += 1
        if entry.choices:
            self.is_full, self._refused_at = True, time.monotonic()
        else:
            self._waiting.pop(0)

    def _send_prefill(self, entry: _Waiting, choices: tuple[int, ...], decode: Peer | None) -> None:
        self.send(
            "prefill",
            Prefill(
                router_epoch=ROUTER_EPOCH,
                rid=entry.rid,
                attempt=entry.attempt,
                choices=choices,
                request=entry.request,
                decode=decode,
                lender=self._lender("decode", entry),
            ),
        )

    def _take(self, message: Tokens) -> None:
        firsts, counts, ids = unpack_ids(message.firsts), unpack_ids(message.counts), unpack_ids(message.ids)
        start = 0
        for i, unit in enumerate(message.units):
            new, start = ids[start : start + counts[i]], start + counts[i]
            self._merge(unit, firsts[i], new, list(message.logprobs.get(i, ())), message.ended.get(i))

    def _merge(
        self, unit: Unit, first: int, ids: list[int], logprobs: list[TokenLogprobs], ended: Ended | None
    ) -> None:
        result = self.results.get((unit.rid, unit.choice))
        if result is None:
            return  # these came before the node read that the test cancels the choice
        if not result.ids and first:
            result.ids = [-1] * first  # received by an earlier attempt
        assert first <= len(result.ids), (unit, first, result)
        known = min(
            len(result.ids) - first, len(ids)
        )  # the prefill node's message may come later than the decode node's, which repeats it
        assert result.ids[first : first + known] == ids[:known], (unit, first, ids, result.ids)
        result.ids += ids[known:]
        result.logprobs += logprobs[known:]
        result.ended = ended or result.ended


def params(max_tokens: int, **more: Any) -> SamplingParams:
    """Return sampling parameters, greedy unless `more` says otherwise."""
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **more})


def replace(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def check_moves(pair: NodePair, prompt: list[int]) -> None:
    """Compare the text of a request that moved, early and late, with that of the request itself, sampled by a seed."""
    asked = params(14, temperature=1.0, seed=3)
    pair.submit("three", prompt, asked, n=3)
    texts = [pair.run()["three", choice].ids for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    for is_local in (False, True):
        for num_received in (1, 4, 13):
            pair.prefill.cache.flush()
            pair.decode.cache.flush()
            rid = f"moved {is_local} {num_received}"
            pair.submit(rid, prompt, asked, received=texts[0][:num_received], is_local=is_local)
            assert pair.run()[rid, 0].ids[num_received:] == texts[0][num_received:]
