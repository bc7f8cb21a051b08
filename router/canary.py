"""Is a (prefill, decode) pair ready? A canary is a greedy request of several pages under a fresh salt that goes
through exactly that pair; the group's known answer must come back.

Pairs that served a request lately need none. A pair without room is not at fault. A pair whose canary failed, or on
which a transfer failed, gets no requests until a later canary passes. A client that leaves says nothing of a pair.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

from ..metadata.errors import BatonError
from ..metadata.request import SamplingParams, TokenLogprobs
from .admission import PairFull
from .generation import Choice, Delta, Generation
from .registry import Group, Node

if TYPE_CHECKING:
    from .request_life import RequestLife

logger = logging.getLogger(__name__)

NUM_PAGES = 3
NUM_TOKENS = 4
RETRY_S = 2.0  # after a failed canary
FULL_RETRY_S = 0.5  # after one that found no room
TIMEOUT_S = 30.0
TIE_GAP = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}  # best two log-probabilities nearer than this are a tie


class Answer(NamedTuple):
    """A canary's tokens, and each one's lead over the next best."""

    ids: tuple[int, ...]
    leads: tuple[float, ...]


class Pair:
    """What is known of one pair."""

    __slots__ = ("canary", "failure", "is_doubted", "retry_at", "worked_at")

    def __init__(self) -> None:
        self.worked_at: float | None = None
        self.retry_at = 0.0  # not before
        self.failure: str | None = None
        self.canary: Generation | None = None
        self.is_doubted = False  # a request failed on it, but not in transfer


class PairHealth:
    """All pairs of live nodes, and the canaries under way."""

    def __init__(self, life: RequestLife, interval_s: float) -> None:
        self._life = life
        self._interval_s = interval_s
        self._pairs: dict[tuple[bytes, bytes], Pair] = {}
        self._answers: dict[Group, Answer] = {}

    @property
    def is_ready(self) -> bool:
        """At least one pair works and takes new requests."""
        return any(
            self.state(prefill, decode) == "ready"
            for group in self._life.registry.groups.values()
            for prefill, decode in group.pairs()
        )

    @property
    def reason(self) -> str:
        """Why no pair works, in words."""
        failures = [pair.failure for pair in self._pairs.values() if pair.failure is not None]
        return failures[0] if failures else self._life.registry.unready_reason()

    def failure_in(self, group: Group) -> str:
        """Why no pair of a group works, in words."""
        failures = [self.state(*pair) for pair in group.pairs() if not self.is_usable(*pair)]
        return failures[0] if failures else "its nodes know no common protocol version"

    def state(self, prefill: Node, decode: Node) -> str:
        """A word on one pair: ready, untried, or what is wrong with it."""
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        if pair is None or (pair.worked_at is None and pair.failure is None):
            return "untried"
        return pair.failure or "ready"

    def is_usable(self, prefill: Node, decode: Node) -> bool:
        """False after a failed canary or transfer, and where the two know no common protocol."""
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        return (pair is None or pair.failure is None) and prefill.shares_protocol(decode.hello)

    def worked(self, prefill: Node, decode: Node, now: float) -> None:
        """A request went through the pair."""
        pair = self._pairs.setdefault((prefill.routing_id, decode.routing_id), Pair())
        pair.worked_at = now

    def doubt(self, prefill: Node, decode: Node, failure: str | None) -> None:
        """A request failed on the pair: a canary looks into it at once. `failure`, of a transfer, in words: until then
        the pair gets no requests."""
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        if pair is None:
            return
        pair.is_doubted = True
        if failure is not None and pair.failure is None:
            name = f"{prefill.node_id} -> {decode.node_id}"
            logger.warning("pair %s is taken out: %s", name, failure)
            pair.failure = f"pair {name}: {failure}"
            pair.retry_at = 0.0

    def forget(self, node: Node) -> None:
        """The node is gone, and with it all its pairs."""
        for key in [key for key in self._pairs if node.routing_id in key]:
            del self._pairs[key]

    def forget_group(self, group: Group) -> None:
        """The group is no more, and its answer with it."""
        self._answers.pop(group, None)

    def look(self, now: float) -> None:
        """Starts the canaries that are due, and gives up those that hang."""
        for group in self._life.registry.groups.values():
            if group.tokenizer is None:
                continue
            for prefill, decode in group.pairs():
                pair = self._pairs.setdefault((prefill.routing_id, decode.routing_id), Pair())
                self._look_at(group, prefill, decode, pair, now)

    def _look_at(self, group: Group, prefill: Node, decode: Node, pair: Pair, now: float) -> None:
        if pair.canary is not None:
            if now - pair.canary.created_at > TIMEOUT_S:
                self._life.fail(pair.canary, BatonError(f"no answer within {TIMEOUT_S:.0f} s"))
            return
        if now < pair.retry_at:
            return
        has_worked_lately = pair.worked_at is not None and now - pair.worked_at < self._interval_s
        if has_worked_lately and pair.failure is None and not pair.is_doubted:
            return
        pair.retry_at = now + RETRY_S
        pair.is_doubted = False
        run = _Canary(self, group, pair, prefill, decode)
        generation = Generation(
            f"canary-{secrets.token_hex(6)}",
            group,
            _prompt(group),
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=2),
            run,
            salt=secrets.token_hex(8),
            now=now,
            is_canary=True,
        )
        pair.canary = generation
        if not self._life.submit_canary(generation, (prefill, decode)):
            pair.canary = None
            pair.retry_at = now + FULL_RETRY_S

    def judge(self, group: Group, answer: Answer) -> str | None:
        """Compares an answer with the group's known one; the first becomes the known one. None when it is right."""
        known = self._answers.setdefault(group, answer)
        for place, (here, there) in enumerate(zip(known.ids, answer.ids, strict=False)):
            if here != there:
                is_tie = known.leads[place] < TIE_GAP[group.layout.target.dtype]
                return None if is_tie else f"its canary's token {place} is {there}, the group's known answer has {here}"
        return None if len(known.ids) == len(answer.ids) else f"its canary gave {len(answer.ids)} tokens"


class _Canary:
    """Listens to one canary request."""

    def __init__(self, health: PairHealth, group: Group, pair: Pair, prefill: Node, decode: Node) -> None:
        self._health = health
        self._group = group
        self._pair = pair
        self._name = f"{prefill.node_id} -> {decode.node_id}"
        self._logprobs: list[TokenLogprobs] = []

    def on_delta(self, _choice: Choice, delta: Delta) -> None:
        self._logprobs += delta.logprobs

    def on_done(self, generation: Generation) -> None:
        self._pair.canary = None
        leads = tuple(
            entry.top_logprobs[0] - entry.top_logprobs[1] if len(entry.top_logprobs) > 1 else float("inf")
            for entry in self._logprobs
        )
        ids = tuple(generation.choices[0].received)
        answer = Answer(ids, leads + (float("inf"),) * (len(ids) - len(leads)))
        failure = self._health.judge(self._group, answer)
        if failure is not None:
            logger.error("pair %s: %s", self._name, failure)
        elif self._pair.worked_at is None or self._pair.failure is not None:
            logger.info("pair %s is ready", self._name)
        self._pair.failure = failure
        if failure is None:
            self._pair.worked_at = time.monotonic()

    def on_error(self, _generation: Generation, error: BatonError) -> None:
        self._pair.canary = None
        if isinstance(error, PairFull):
            self._pair.retry_at = time.monotonic() + FULL_RETRY_S
        else:
            logger.error("pair %s: its canary failed: %s", self._name, error)
            self._pair.failure = f"pair {self._name}: its canary failed: {error}"


def _prompt(group: Group) -> list[int]:
    """Several pages of ordinary tokens, always the same ones."""
    special = group.tokenizer.special_ids if group.tokenizer is not None else frozenset[int]()
    pages = min(group.most_pages("prefill"), group.most_pages("decode"))
    room = min(group.context_len, pages * group.page_size) - 2 * NUM_TOKENS
    length = max(1, min(NUM_PAGES * group.page_size + 1, room))
    ordinary = [token for token in range(min(group.card.vocab_size, 4096)) if token not in special]
    return [ordinary[(7919 * place + 101) % len(ordinary)] for place in range(length)]
