"""Why a node takes no work, why a request waits, and why it is where it is, in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from baton.metadata.wire.node_info import GroupRank, Load
from baton.router.http.operators.explain import MAX_TEXT_TOKENS
from baton.router.http.page import snapshots
from baton.router.http.page.reasons import PairStanding, node_standing
from baton.router.http.page.types import LiveNode, Snapshot
from baton.router.text.tokenizer import TextTokenizer

from ...conftest import System
from ...dispatching.test_runner import wait_until
from ...hellos import BEAT, ClockedRegistry

READY = PairStanding("ready")


def snapshot(system: System) -> Snapshot:
    return system.router.call(lambda: system.router.router.api.snapshots.read("everything"))


def node(system: System, name: str) -> LiveNode:
    return next(each for each in snapshot(system).nodes if each.id == name)


@contextmanager
def held(system: System, count: int = 1, **body: Any) -> Iterator[None]:
    """Has so many requests decode, or wait, during the block."""
    system.behaviour.hold = threading.Event()
    threads = [threading.Thread(target=system.complete, kwargs=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_until(lambda: snapshot(system).num_requests == count)
    yield
    system.behaviour.hold.set()
    for thread in threads:
        thread.join(20)
    system.behaviour.hold = None


def test_a_joined_node_says_what_it_waits_for(tokenizer: TextTokenizer) -> None:
    clocked = ClockedRegistry()
    registry, decode = clocked.registry, clocked.join(name="d0")

    def standing(*pairs: PairStanding) -> tuple[str, str]:
        return node_standing(decode, list(pairs), registry, clocked.now)

    assert standing() == ("joining", "the tokenizer of its model has not arrived yet")
    decode.group.has_bad_tokenizer = True
    assert standing() == ("faulty", "the tokenizer file of its model cannot be read")
    decode.group.tokenizer = tokenizer
    assert standing() == ("joining", "no prefill node is here")
    clocked.join(name="p0", role="prefill", model="other", target_fingerprint="o" * 16)
    state, why = standing()
    assert state == "joining" and "can be paired with nobody yet" in why and "'other'" in why
    untried = PairStanding("untried", "no canary request has passed yet")
    assert standing(untried) == ("joining", "no canary request has passed yet")
    assert standing(untried, PairStanding("faulty", "its canary failed")) == ("faulty", "its canary failed")
    assert standing(PairStanding("faulty", "its canary failed"), READY) == ("ready", "")
    decode.lose_touch()
    assert standing(READY)[0] == "silent" and "could not be sent" in standing(READY)[1]
    decode.heard(BEAT, clocked.now)
    clocked.now += 1.4
    assert standing(READY) == ("silent", "its last heartbeat came 1.4 s ago")


def test_a_node_that_is_full_says_of_what(tokenizer: TextTokenizer) -> None:
    clocked = ClockedRegistry()
    decode, prefill = clocked.join(name="d0"), clocked.join(name="p0", role="prefill")
    decode.group.tokenizer = tokenizer

    def why(which: Any) -> str:
        state, words = node_standing(which, [READY], clocked.registry, clocked.now)
        assert state == "ready"
        return words

    decode.report(Load(free_pages=3, running=1, waiting=0), clocked.now)
    decode.refuse(clocked.now)
    assert why(decode) == "full: it had no pages for the last sequence; 3 of 8 are free"
    decode.report(Load(free_pages=4, running=1, waiting=0), clocked.now)
    assert why(decode) == ""
    decode.report(Load(free_pages=0, running=1, waiting=0), clocked.now)
    assert why(decode) == "full: none of its 8 pages is free"
    tailed = msgspec.structs.replace(decode.hello.capacity, num_tails=6)
    decode.hello = msgspec.structs.replace(decode.hello, capacity=tailed)
    decode.report(Load(free_pages=4, running=1, waiting=0), clocked.now)
    assert why(decode) == "full: none of its 6 tail pages is free"
    decode.reserve("r", 0, range(4), 0)
    assert why(decode) == "full: it runs 4 of at most 4 sequences"
    for number in range(8):
        prefill.begin_prompt("r", number, 3, clocked.now)
    assert why(prefill) == "full: it holds 8 of at most 8 prompts"


def test_a_rank_waits_for_the_others_of_its_group(tokenizer: TextTokenizer) -> None:
    clocked = ClockedRegistry()
    rank = clocked.join(name="d-0", place=GroupRank("d", "g", 0, 2))
    rank.group.tokenizer = tokenizer
    standing = node_standing(rank, [], clocked.registry, clocked.now)
    assert standing == ("joining", "1 of the 2 ranks of its group d have joined")


def test_draining_and_lost_nodes_say_why(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    system.router.request("POST", "/admin/nodes/d1/drain", {"timeout_s": 60})
    drained = node(system, "d1")
    assert drained.state == "draining" and "POST /admin/nodes/d1/undrain puts it back" in drained.why
    assert [(pair.prefill, pair.decode) for pair in snapshot(system).pairs] == [("p0", "d0")]
    system.cluster.by_name("d0").stop()
    wait_until(lambda: node(system, "d0").state == "gone")
    gone, prefill = node(system, "d0"), node(system, "p0")
    assert (gone.why, gone.pages, gone.counters) == ("its connection closed", None, None)
    assert prefill.state == "joining" and "no decode node takes work: decode node d1 is draining" in prefill.why
    assert snapshot(system).router.reason is not None


def test_a_request_says_where_it_is_and_why(make_system: Callable[..., System]) -> None:
    system = make_system(max_running=1).up()
    with held(system, 3):
        wait_until(lambda: sum(each.stage == "decode" for each in snapshot(system).requests) == 1)
        seen = snapshot(system)
        waiting = [each for each in seen.requests if each.stage == "queue"]
        [runs] = [each for each in seen.requests if each.stage == "decode"]
        assert (seen.num_requests, seen.counts.waiting, seen.counts.running) == (3, 2, 1)
        assert (runs.stage, runs.prefill, runs.decode, runs.node) == ("decode", "p0", "d0", "d0")
        assert runs.why == "d0: the only decode node; p0: the only prefill node"
        for request in waiting:
            assert (request.stage, request.node) == ("queue", "")
            assert request.why == "no decode node takes more: d0 is full: it runs 1 of at most 1 sequences"
        [wait] = seen.waits
        assert (wait.where, wait.why, wait.count) == ("queue", waiting[0].why, 2)
        assert wait.oldest_s == max(request.age_s for request in waiting)
        status, body, _ = system.router.request("GET", f"/debug/requests/{runs.rid}/text")
        assert (status, body["texts"]) == (200, ["the"]), "its first token has come"
        assert system.router.request("GET", f"/debug/requests/{waiting[0].rid}/text")[1]["texts"] == [""]
        lines = system.router.request("GET", "/debug/requests?stage=queue&outcome=live")[1]
        assert {line["rid"] for line in lines["requests"]} == {request.rid for request in waiting}
        assert lines["most_finished"] == 1024
    [ended] = system.router.request("GET", f"/debug/requests/{runs.rid}")[1]["requests"]
    told = "; ".join(f"{span['node']}: {span['reason']}" for span in ended["choices"][0]["parts"] if "reason" in span)
    assert told == runs.why, "the trace of an ended request has the same words"
    ended = system.router.request("GET", f"/debug/requests/{runs.rid}/text")
    assert ended[0] == 404 and "keeps no text" in ended[1]["error"]["message"]


def test_all_choices_of_a_request_share_the_tokens_that_are_decoded_at_once(system: System) -> None:
    with held(system, n=4):
        [live] = snapshot(system).requests
        path = f"/debug/requests/{live.rid}/text"
        wait_until(lambda: system.router.request("GET", path)[1]["texts"] == ["the"] * 4)
        assert system.router.request("GET", path)[1]["most_tokens"] == MAX_TEXT_TOKENS // 4


def test_a_request_that_lost_its_node_says_what_it_waits_for_and_why_it_moved(
    make_system: Callable[..., System],
) -> None:
    system = make_system(router={"node_wait_s": 60.0}).up(1, 2)
    with held(system):
        wait_until(lambda: snapshot(system).requests[0].stage == "decode")
        mine = snapshot(system).requests[0].decode
        other = "d1" if mine == "d0" else "d0"
        system.router.request("POST", f"/admin/nodes/{other}/drain", {"timeout_s": 60})
        system.cluster.by_name(mine).stop()
        request = wait_until(lambda: next((each for each in snapshot(system).requests if each.stage == "queue"), None))
        assert request.why.startswith(f"no decode node takes work: decode node {other} is draining")
        assert f"; moved: decode node {mine}: its connection closed" in request.why
        system.router.request("POST", f"/admin/nodes/{other}/undrain")


def test_only_the_newest_live_requests_are_listed(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_REQUESTS", 2)
    told, line_of = list[Any](), snapshots._live_request
    system = make_system().up()
    with held(system, 3):
        monkeypatch.setattr(snapshots, "_live_request", lambda *given: told.append(given) or line_of(*given))
        seen = snapshot(system)
        assert len(told) == 2, "no line is made of one that is not listed"
        assert (len(seen.requests), seen.num_requests) == (2, 3)
        assert seen.requests[0].age_s <= seen.requests[1].age_s
