"""Fair shares between tenants: the counters alone, and a dispatcher whose nodes compute in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.request import Ended, SamplingParams, Unit, pack_ids
from baton.router.requests.request import Request
from baton.router.tenants.fair_share import DEFAULT, MAX_IDLE, FairShares, Share, Tenant
from baton.router.waiting.queue import WaitingQueue

from ..dispatching.test_dispatcher import Client, World, load

A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


class Server:
    """A server of a few slots. Tenants wait with (prompt tokens, output tokens); each step brings one output token."""

    def __init__(self, num_slots: int) -> None:
        self.shares = FairShares()
        self.waiting: dict[str, deque[tuple[int, int]]] = {}
        self.of: dict[str, Share] = {}
        self.running: list[list[Any]] = []
        self.served: Counter[str] = Counter()
        self.num_slots = num_slots

    def arrive(self, tenant: Tenant, *requests: tuple[int, int]) -> None:
        if not self.waiting.get(tenant.name):
            self.of[tenant.name] = self.shares.begin(tenant)
        self.waiting.setdefault(tenant.name, deque()).extend(requests)

    def step(self) -> None:
        while len(self.running) < self.num_slots and any(self.waiting.values()):
            share = next(iter(self.shares.turns(lambda share: (share, self.waiting[share.name][0][0]))))
            num_prompt, num_output = self.waiting[share.name].popleft()
            if not self.waiting[share.name]:
                self.shares.end(share)
            self.shares.served(share)
            self._charge(share, num_prompt)
            self.running.append([share, num_output])
        for running in self.running:
            self._charge(running[0], 1)
            running[1] -= 1
        self.running = [running for running in self.running if running[1]]

    def _charge(self, share: Share, num_tokens: int) -> None:
        share.charge(num_tokens)
        self.served[share.name] += num_tokens


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_tenants_that_wait_all_the_time_get_tokens_by_their_weights(seed: int, weight: float) -> None:
    """The paper's bound: the tokens of two tenants, by weight, differ by at most twice what one may have under way."""
    draw, server = random.Random(seed), Server(num_slots := 4)
    largest = {"a": 400, "b": 30}
    tenants = (A, B._replace(weight=weight))
    bound = 2 * (400 + num_slots * 60)
    for step in range(6000):
        for tenant in tenants:
            if len(server.waiting.get(tenant.name, ())) <= num_slots:  # it always has more
                server.arrive(tenant, *((draw.randint(1, largest[tenant.name]), draw.randint(1, 60)) for _ in "1234"))
        server.step()
        assert abs(server.served["a"] - server.served["b"] / weight) <= bound, step
    assert server.served["b"] / server.served["a"] == pytest.approx(weight, rel=0.1)


def test_absence_saves_nothing_up_and_presence_alone_costs_nothing() -> None:
    server = Server(num_slots=1)
    server.arrive(A, *[(100, 10)] * 50)
    for _ in range(200):
        server.step()
    assert server.served == {"a": 20 * 110}, "alone, a tenant gets everything"
    server.arrive(B, *[(100, 10)] * 50)
    before = server.served["a"]
    for _ in range(200):
        server.step()
    assert abs(server.served["a"] - before - server.served["b"]) <= 2 * 110, "it does not catch up on the past"
    for waiting in server.waiting.values():
        waiting.clear()
    for share in server.of.values():
        server.shares.end(share)
    least = server.shares.least
    assert server.shares.begin(C).counter == least >= 20 * 110, "after a pause of all, nobody starts from zero"


def test_a_tenant_that_comes_now_and_then_is_next_each_time() -> None:
    server = Server(num_slots=1)
    server.arrive(A, *[(2000, 5)] * 100)
    waits = []
    for _ in range(20):
        server.arrive(B, (50, 5))
        num_before = server.served["a"]
        while server.waiting["b"]:
            server.step()
        waits.append(server.served["a"] - num_before)
        for _ in range(12):
            server.step()
    assert max(waits) <= 2005, "more than one request of the other went before"


def test_equal_counters_take_turns() -> None:
    shares = FairShares()
    for tenant in (A, B, C):
        shares.begin(tenant)
    left = {"a": 3, "b": 3, "c": 2}

    def take(share: Share) -> tuple[str, int] | None:
        if not left[share.name]:
            return None
        left[share.name] -= 1
        return share.name, 10

    assert "".join(shares.turns(take)) == "abcabcab"
    left.update(a=1, b=1, c=1)
    assert "".join(shares.turns(take)) == "abc", "a look at the order changes nothing"


def test_a_prompt_that_was_cached_is_refunded_and_no_counter_falls() -> None:
    share = Share(A._replace(weight=2.0))
    share.charge(1000)
    share.charge(-600)
    assert share.counter == 500.0
    share.charge(500)
    share.charge(300)
    assert share.counter == 600.0, "(1000 - 600 + 500 + 300) / 2"


def test_counters_of_tenants_that_left_are_forgotten_some_day() -> None:
    shares = FairShares()
    for index in range(3 * MAX_IDLE):
        shares.end(shares.begin(Tenant(str(index))))
    assert len(shares._shares) <= MAX_IDLE and len(shares._heap) <= 2


@pytest.mark.parametrize("num_tenants", [10, 10_000])
def test_a_turn_costs_the_logarithm_of_the_tenants(num_tenants: int) -> None:
    """Counted in comparisons of counters, which no machine changes."""

    class Counted(float):
        count = 0

        def __lt__(self, other: float) -> bool:
            Counted.count += 1
            return float.__lt__(self, other)

    shares = FairShares()
    for index in range(num_tenants):
        shares.begin(Tenant(str(index))).counter = Counted(0.0)
    order = list(itertools.islice(shares.turns(lambda share: (share, 1)), num_tenants))
    assert len(set(order)) == num_tenants, "each has its turn"
    Counted.count = 0
    for _ in range(100):
        share = next(iter(shares.turns(lambda share: (share, 1))))
        share.counter = Counted(share.counter + 1.0)
    assert Counted.count <= 100 * 4 * 15


# --- a dispatcher whose nodes compute in simulated time --------------------------------------------------------------

PREFILL_TOKEN_S = 1e-4
ROUND_S = 0.02


class Simulated(World):
    """A prefill node that computes one prompt after the other, and a decode node of a few slots."""

    def __init__(self, num_slots: int = 8, **settings: Any) -> None:
        sizes = {"num_pages": 100_000, "max_running": num_slots, "context_len": 4096, "page_size": 512}
        bounds = {"max_waiting": 100_000, "max_waiting_tokens": 1 << 30, "max_queue_s": 1e6}
        super().__init__("p0", "d0", sizes=sizes, **bounds, **settings)
        self.agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_slots, self.prefill_free_at = num_slots, self.now
        self.taken: dict[tuple[str, int], int] = {}  # tokens that are left
        self.freed: list[float] = []  # times at which a slot became free
        self.first_at: dict[str, float] = {}
        self._order = itertools.count()

    def ask(self, tenant: Tenant, num_prompt: int, num_tokens: int, on_end: Callable[[], None] = lambda: None) -> str:
        """Submit a request. Each prompt is its own. Return its id."""
        number = next(self._order)
        client = Ending(on_end)
        ids = [number % 400, number // 400 % 400, *[5] * (num_prompt - 2)]
        client.request = Request(
            f"r{number}", self.group, ids, SamplingParams(max_tokens=num_tokens), client, now=self.now, tenant=tenant
        )
        self.do(self.dispatcher.submit(client.request, self.now))
        return client.request.rid

    def flood(self, tenant: Tenant, num_requests: int, num_prompt: int, num_tokens: int) -> None:
        """Submit many requests at once; the nodes are asked afterwards."""
        pump, self.dispatcher._pump = self.dispatcher._pump, lambda *_: None  # type: ignore[method-assign]
        for _ in range(num_requests):
            self.ask(tenant, num_prompt, num_tokens)
        self.dispatcher._pump = pump  # type: ignore[method-assign]
        self.do(self.dispatcher.tick(self.now))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        next_tick = self.now
        while self.now < end:
            self._answer()
            at = self.agenda[0][0] if self.agenda else end
            if min(at, end) >= next_tick:
                self.now, next_tick = max(self.now, next_tick), next_tick + 0.05
                self.dispatcher._slow_tick_at = self.now  # it looks at all that waits, which is dear
                self.do(self.dispatcher.tick(self.now))
            elif at <= end:
                self.now, _, act, what = heapq.heappop(self.agenda)
                act(*what)
            else:
                self.now = end

    def _after(self, seconds: float, act: Callable[..., None], *what: Any) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self._order), act, what))

    def _answer(self) -> None:
        """Let the nodes act on what they were sent."""
        while self.sent:
            sent, self.sent = self.sent, []
            for _, message in sent:
                match message:
                    case m.Reserve(rid=rid, attempt=attempt):
                        has_room = len(self.taken) < self.num_slots
                        if has_room:
                            self.taken[rid, attempt] = self.dispatcher.requests[rid].params.max_tokens
                        self.say("d0", m.Reserved(rid, attempt, (0,) if has_room else (), self._load()))
                    case m.Prefill():
                        num_tokens = len(self.dispatcher.requests[message.rid].prompt_ids)
                        begun = max(self.now, self.prefill_free_at)
                        self.prefill_free_at = begun + num_tokens * PREFILL_TOKEN_S
                        self._after(self.prefill_free_at - self.now, self._computed, message)
                    case _:
                        pass

    def _load(self) -> Any:
        queued_s = max(0.0, self.prefill_free_at - self.now)
        return msgspec.structs.replace(
            load(100_000, running=len(self.taken)),
            queued_tokens=round(queued_s / PREFILL_TOKEN_S),
            prompt_token_s=PREFILL_TOKEN_S,
        )

    def _computed(self, asked: m.Prefill) -> None:
        self.first_at[asked.rid] = self.now
        self.tokens("p0", asked, 0, [40])
        self.say("p0", m.PrefillDone(asked.rid, asked.attempt, 0.0, 0.0, 0, self._load()))
        self.say("d0", m.Admitted(Unit(asked.rid, 0, asked.attempt), 0.0, 1, 1, 0))
        self._after(10 * ROUND_S, self._decoded, asked, 1)

    def _decoded(self, asked: m.Prefill, num_before: int) -> None:
        key = asked.rid, asked.attempt
        num = min(10, self.taken[key] - num_before)
        is_last = num_before + num == self.taken[key]
        ended = {0: Ended("length", None, 1, 1, 0)} if is_last else {}
        columns = pack_ids([num_before]), pack_ids([num]), pack_ids([40] * num)
        if is_last:
            del self.taken[key]
            self.freed.append(self.now)
        self.say("d0", m.Tokens((Unit(asked.rid, 0, asked.attempt),), *columns, ended=ended))
        if is_last:
            self.say("d0", m.CapacityFreed(self._load()))
        else:
            self._after(10 * ROUND_S, self._decoded, asked, num_before + num)


class Ending(Client):
    """A client that acts when its request has ended."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._on_end = on_end

    def on_done(self, request: Request, /) -> None:
        super().on_done(request)
        self._on_end()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def asks_one_at_a_time(world: Simulated, seconds: float) -> list[float]:
    """Let tenant b have one small request at any time. Return its times to the first token."""
    asked: dict[str, float] = {}

    def again() -> None:
        asked[world.ask(B, 100, 30, again)] = world.now

    again()
    world.run(seconds)
    return [world.first_at[rid] - at for rid, at in asked.items() if rid in world.first_at]


def test_a_flood_of_one_tenant_delays_another_by_one_slot() -> None:
    alone = asks_one_at_a_time(Simulated(), 10.0)
    world = Simulated()
    world.flood(A, 10_000, 2000, 40)
    world.run(5.0)
    since = len(world.freed)
    beside = asks_one_at_a_time(world, 25.0)
    longest = max(late - early for early, late in itertools.pairwise(world.freed[since - 1 :]))
    assert len(beside) >= 20
    assert p95(beside) <= p95(alone) + longest


@pytest.mark.parametrize("num_prompt", [300, 2000], ids=["decode-bound", "prefill-bound"])
def test_equal_tenants_cost_no_throughput(num_prompt: int) -> None:
    done: dict[int, int] = {}
    for num_tenants in (1, 4):
        world = Simulated()
        for index in range(300):
            world.ask(Tenant(f"t{index % num_tenants}") if num_tenants > 1 else DEFAULT, num_prompt, 40)
        world.run(28.0)
        done[num_tenants] = len(world.freed)
    assert done[4] >= 0.99 * done[1] > 100


@pytest.mark.timing
def test_a_place_in_a_long_queue_costs_about_as_much_as_in_a_short_one() -> None:
    took: dict[int, float] = {}
    for num_waiting in (100, 10_000):
        queue: Any = WaitingQueue()
        entries = [waiting(index) for index in range(num_waiting)]
        for entry in entries:
            queue.add(entry)
        begun = time.thread_time()
        for index in range(500):
            entry = next(iter(queue))
            queue.remove(entry)
            queue.add(waiting(index))
        took[num_waiting] = time.thread_time() - begun
    assert took[10_000] <= 4.0 * took[100]


def waiting(index: int) -> Any:
    request = SimpleNamespace(created_at=float(index), priority=0, tenant=Tenant(f"t{index % 50}"))
    return SimpleNamespace(request=request, num_tokens=1, turn=None, is_fresh=True)
