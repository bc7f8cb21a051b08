"""Waiting: first come first served, partial grants, no deadlock when pools are too small, 429 above the bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity

from .conftest import System
from .fake_nodes import FakeNode
from .test_runner import own, text_of, wait_until


def test_pools_too_small_for_the_load(make_system: Callable[..., System]) -> None:
    """Long prompts, many choices, two of each node: everything finishes, no pool is ever overdrawn."""
    system = make_system(num_pages=16, max_running=3).up(2, 2)
    prompts = ["a " * (10 + 7 * (place % 9)) for place in range(40)]
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda each: system.complete(prompt=each[1], n=1 + each[0] % 4), enumerate(prompts)))
    for place, (status, body, _) in enumerate(answers):
        assert status == 200, body
        assert [choice["text"] for choice in body["choices"]] == [system.text] * (1 + place % 4)
    system.router.wait_idle()


def test_partial_grants_are_dispatched_at_once(make_system: Callable[..., System]) -> None:
    """Four choices, room for two at a time: choices are dispatched as they are granted, as attempts of their own."""
    system = make_system(max_running=64, num_pages=4).up()
    _, body, _ = system.complete(prompt="a " * 12, n=4)
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 4
    prefills = own(system.cluster.by_name("p0"), m.Prefill)
    assert sorted(choice for prefill in prefills for choice in prefill.choices) == [0, 1, 2, 3]
    assert len({prefill.attempt for prefill in prefills}) == len(prefills) >= 2
    assert len({(prefill.rid, prefill.request.params.seed) for prefill in prefills}) == 1
    system.router.wait_idle()


def test_n_choices_cost_one_prefill(system: System) -> None:
    system.complete(n=8)
    assert [prefill.choices for prefill in own(system.cluster.by_name("p0"), m.Prefill)] == [tuple(range(8))]


def test_first_come_first_served(make_system: Callable[..., System]) -> None:
    """A large request that was refused is not starved by small ones behind it."""
    system = make_system(num_pages=16).up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(20) as pool:
        running = [pool.submit(system.complete, prompt="a " * 60) for _ in range(2)]
        decode = system.cluster.by_name("d0")
        wait_until(lambda: len(own(system.cluster.by_name("p0"), m.Prefill)) == 2)
        large = pool.submit(system.complete, prompt="b " * 100)
        wait_until(lambda: waiting(system) == 1)
        small = [pool.submit(system.complete, prompt="c") for _ in range(10)]
        wait_until(lambda: waiting(system) == 11)
        time.sleep(0.2)
        assert len(own(system.cluster.by_name("p0"), m.Prefill)) == 2, "a small request overtook a refused one"
        system.behaviour.hold.set()
        for future in (*running, large, *small):
            assert future.result()[0] == 200
    order = [prefill.rid for prefill in own(system.cluster.by_name("p0"), m.Prefill)]
    assert order.index(large.result()[1]["id"]) == 2
    assert len(own(decode, m.Reserve)) < 40, "the full node was asked over and over"


def test_full_is_found_by_asking_and_lifted_by_room(make_system: Callable[..., System]) -> None:
    """The node refuses although its figures promise room; the request waits for its Room and is not failed."""
    system = make_system().up()
    refused = 0

    def refuse_twice(node: FakeNode, message: m.Reserve) -> bool:
        nonlocal refused
        if message.rid.startswith("canary") or refused == 2:
            return False
        refused += 1
        load = node.load()
        busy = m.Load(free_pages=0, running=1, waiting=0)
        node.link.send(m.Reserved(message.rid, message.attempt, (), busy))
        node.post(m.CapacityFreed(load), after_s=0.1)
        return True

    system.behaviour.answer_reserve = refuse_twice
    assert text_of(system, stream=False) == system.text
    assert refused == 2


def test_too_many_wait(make_system: Callable[..., System]) -> None:
    system = make_system(router={"max_waiting": 3}, max_running=1).up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        served = [pool.submit(system.complete)]
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        served += [pool.submit(system.complete) for _ in range(3)]
        wait_until(lambda: waiting(system) == 3)
        status, body, headers = system.complete()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        status, body, _ = system.complete(prompt=["a", "b", "c"])
        assert status == 429
        status, body, _ = system.complete(prompt=["a", "b", "c", "d"])  # more than may ever wait
        assert (status, body["error"]["param"]) == (400, "prompt")
        system.behaviour.hold.set()
        assert [future.result()[0] for future in served] == [200] * 4
    system.router.wait_idle()


def test_a_prompt_that_never_fits(make_system: Callable[..., System]) -> None:
    system = make_system(num_pages=8).up()
    status, body, _ = system.complete(prompt="a " * 120)
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "8" in body["error"]["message"]
    assert system.complete()[0] == 200


def test_an_empty_node_that_refuses(make_system: Callable[..., System]) -> None:
    """A prompt that fits by the figures, but has no room on the empty node all the same, must not wait forever."""
    system = make_system().up()

    def refuse(node: FakeNode, message: m.Reserve) -> bool:
        node.link.send(m.Reserved(message.rid, message.attempt, (), node.load()))
        return True

    system.behaviour.answer_reserve = refuse
    status, body, _ = system.complete()
    assert (status, body["error"]["param"]) == (400, "prompt")
    system.behaviour.answer_reserve = None
    system.router.wait_idle()


def test_no_nodes(make_system: Callable[..., System]) -> None:
    system = make_system()
    status, body, headers = system.complete()
    assert (status, body["error"]["type"]) == (503, "server_error")
    assert "no node has joined" in body["error"]["message"]
    assert headers["retry-after"] == "1"
    assert system.router.request("GET", "/ready")[0] == 503
    system.cluster.add("prefill")
    wait_until(lambda: system.router.router.dispatcher.registry.nodes)
    time.sleep(0.1)
    status, body, _ = system.router.request("GET", "/ready")
    assert "no decode node" in body["error"]["message"]


def test_waiting_requests_outlive_a_restart(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(system.complete)
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        system.cluster.by_name("d0").stop()
        time.sleep(0.3)
        system.behaviour.hold.set()
        system.cluster.nodes.pop()
        system.cluster.add("decode", "d0")
        status, body, _ = future.result(60)
    assert (status, body["choices"][0]["text"]) == (200, system.text)


def test_load_is_spread(make_system: Callable[..., System]) -> None:
    system = make_system().up(2, 2)
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(system.complete, prompt=f"{place} hello") for place in range(8)]
        decodes = [node for node in system.cluster.nodes if node.role == "decode"]
        wait_until(lambda: sum(len(own(node, m.Reserve)) for node in decodes) == 8)
        system.behaviour.hold.set()
        assert [future.result()[0] for future in futures] == [200] * 8
    assert max(len(own(node, m.Reserve)) for node in decodes) <= 5  # four each, but for a canary's place


def test_equal_prefixes_meet_on_one_prefill_node(make_system: Callable[..., System]) -> None:
    system = make_system().up(2, 1)
    prefix = "the quick brown fox jumps over lazy dogs " * 3
    for place in range(6):
        system.complete(prompt=f"{prefix}{place}")
    assert sorted(len(own(node, m.Prefill)) for node in system.cluster.nodes if node.role == "prefill") == [0, 6]


@pytest.mark.parametrize("kind", ["draining", "no such capacity"])
def test_nodes_that_take_nothing(make_system: Callable[..., System], kind: str) -> None:
    system = make_system().up(1, 2)
    unwilling = system.cluster.by_name("d0")
    if kind == "draining":
        unwilling.post(m.Leaving(done=False, reason="SIGTERM"))
    else:
        unwilling.stop()
        system.cluster.nodes.remove(unwilling)
        unwilling = system.cluster.add("decode", "small", capacity=Capacity(1, 16, 64))
    time.sleep(0.2)
    before = len(own(unwilling, m.Reserve))
    for _ in range(4):
        assert system.complete(prompt="hello " * 9)[0] == 200
    assert len(own(unwilling, m.Reserve)) == before


def waiting(system: System) -> Any:
    return system.router.call(lambda: system.router.router.dispatcher.queues.num_waiting)


@pytest.mark.parametrize("len_left", [0, 1, 2])
def test_a_prompt_about_as_large_as_the_pool_is_served_or_refused_at_once(
    make_system: Callable[..., System], len_left: int
) -> None:
    """8 pages of 16 tokens. A prompt with room for two rounds is served; a longer one is refused on arrival, and holds
    up nobody."""
    system = make_system(num_pages=8).up()
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(system.complete, prompt=[5] * (8 * 16 - len_left), max_tokens=2)
        time.sleep(0.1)
        assert system.complete()[0] == 200
        status, body, _ = large.result()
    assert time.monotonic() - begun < 5, "somebody waited for room that no node has"
    assert (status, body.get("error", {}).get("param")) == ((200, None) if len_left == 2 else (400, "prompt")), body


def test_who_fits_no_node_that_is_there_stands_in_nobodys_way(make_system: Callable[..., System]) -> None:
    """The node that is large enough dies. Its request waits for another one; those behind it go on."""
    system = make_system(router={"node_wait_s": 30.0}, num_pages=8)
    system.cluster.add("prefill", "p0", capacity=Capacity(64, 16, 64))
    system.up(0, 1)
    system.cluster.add("decode", "large", capacity=Capacity(64, 16, 64))
    wait_until(lambda: system.router.call(lambda: len(system.router.router.dispatcher.registry.nodes) == 3))
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(system.complete, prompt=[5] * 200)
        wait_until(lambda: own(system.cluster.by_name("large"), m.Reserve))
        system.cluster.by_name("large").stop()
        system.cluster.nodes.pop()
        system.behaviour.hold.set()
        wait_until(lambda: waiting(system) == 1)
        begun = time.monotonic()
        assert [system.complete()[0] for _ in range(3)] == [200] * 3
        assert time.monotonic() - begun < 5
        assert not moved.done()
        system.cluster.add("decode", "large", capacity=Capacity(64, 16, 64))
        assert moved.result(30)[0] == 200
