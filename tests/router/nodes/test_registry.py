"""The registry welcomes nodes, lets them wait, refuses them, or declares them lost.

Most tests drive a registry without sockets, with a clock that the test turns. Those at the end run a router.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash
import zmq

from baton.metadata.bus.link import Link
from baton.metadata.bus.session import Joined, RouterSession
from baton.metadata.errors import ProtocolError
from baton.metadata.wire import data_link, protocol
from baton.metadata.wire import messages as m
from baton.metadata.wire.frames import encode
from baton.metadata.wire.membership import TokenizerFile
from baton.metadata.wire.node_info import Capacity, GroupRank, NodeStats, Service
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import Ended
from baton.router.errors import Conflict, NotFound
from baton.router.nodes import registry
from baton.router.nodes.drains import Drains
from baton.router.nodes.node import Node, NodeGroup
from baton.router.nodes.registry import CROSSING_S, MAX_EMPTY_GROUPS, MAX_LINES, MAX_WAITING, TOKENIZER_S, overdue

from ..conftest import System
from ..dispatching.test_runner import is_canary, own, wait_until
from ..fake_nodes import FakeNode, make_layout
from ..hellos import BEAT, ClockedRegistry, make_hello
from ..sites import make_group
from ..sites import make_hello as site_hello

Make = Callable[..., System]


@pytest.fixture
def clocked() -> ClockedRegistry:
    return ClockedRegistry()


# Ranks of a group
# ----------------


def rank_of(clocked: ClockedRegistry, rank: int, epoch: str = "e", size: int = 2) -> Any:
    """Let a rank of the decode group d0 join."""
    name = "d0" if rank == 0 else f"d0/rank-{rank}"
    return clocked.join(f"{epoch}{rank}", name, place=GroupRank("d0", epoch, rank, size))


def test_a_group_is_used_when_all_its_ranks_have_joined(clocked: ClockedRegistry) -> None:
    first = rank_of(clocked, 0)
    other = rank_of(clocked, 1, "another start")
    assert not first.is_live and not other.is_live
    clocked.registry.connection_lost(other.routing_id, clocked.now)
    second = rank_of(clocked, 1, "e")
    assert first.is_live and second.is_live
    assert first.unit_key == second.unit_key != other.unit_key and first.routing_id != second.routing_id
    assert {each.unit for each in (first, second)} == {"d0"}


def test_a_group_is_lost_with_any_of_its_ranks(clocked: ClockedRegistry) -> None:
    alone = clocked.join("x", "d1")
    ranks = [rank_of(clocked, rank, size=3) for rank in range(3)]
    clocked.registry.connection_lost(ranks[1].routing_id, clocked.now)
    assert list(clocked.registry.nodes) == [alone.routing_id]
    assert {node.hello.place.rank: reason for node, reason in clocked.lost} == {
        1: "its connection closed",
        0: "another rank of its group was lost",
        2: "another rank of its group was lost",
    }
    again = [rank_of(clocked, rank, size=3) for rank in range(3)]  # only a connection was lost
    assert all(each.is_live for each in again)


def test_a_rank_that_leaves_does_not_take_the_others_with_it(clocked: ClockedRegistry) -> None:
    """The ranks leave together. The others finish first."""
    first, second = rank_of(clocked, 0), rank_of(clocked, 1)
    clocked.registry.leaving(second, m.Leaving(done=True), clocked.now)
    assert list(clocked.registry.nodes) == [first.routing_id]


def test_a_group_drains_as_a_whole_by_its_name(clocked: ClockedRegistry) -> None:
    ranks = [rank_of(clocked, rank) for rank in range(2)]
    drains = Drains(clocked.registry.nodes)
    for name in ("d0", "d0/rank-1"):
        drains.begin(name, 5.0)
        assert all(rank.is_cordoned for rank in ranks)
        assert drains.undo(name) == ranks and not any(rank.is_cordoned for rank in ranks)


def test_an_older_router_refuses_a_group_in_words(clocked: ClockedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL_MAX", 6)
    protocol.agreed.cache_clear()
    peer = clocked.hello("e", place=GroupRank("d0", "e", 0, 2), protocol_min=7, protocol_max=7)
    assert clocked.refusal(peer) == "protocol versions 7..7 of the node, 4..6 of the router"
    protocol.agreed.cache_clear()


# Names that are taken, and nodes of another configuration
# --------------------------------------------------------


def test_a_node_with_the_name_of_a_dead_node_is_welcomed_once_the_death_is_known(clocked: ClockedRegistry) -> None:
    old = clocked.hello("old")
    clocked.after(3.0, old)
    new = clocked.hello("new")  # within milliseconds after the kill of the old one
    clocked.after(0.3)
    clocked.registry.greet_again(new)  # the new node sent a heartbeat
    clocked.hello("new")
    assert clocked.answers(new) == [] and clocked.joined_epochs == ["old"]
    clocked.after(0.9)  # since the last heartbeat of the old one
    assert clocked.answers(new) == [m.Welcome] and clocked.joined_epochs == ["old", "new"]
    assert list(clocked.registry.nodes) == [new]
    assert [(node.hello.epoch, reason) for node, reason in clocked.lost] == [
        ("old", "a newer process of the same name has joined")
    ]


def test_a_closed_connection_frees_the_name_at_once(clocked: ClockedRegistry) -> None:
    old = clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.connection_lost(old, clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == [m.Welcome]


def test_a_node_of_protocol_6_with_ranks_is_refused_in_words(clocked: ClockedRegistry) -> None:
    peer = clocked.hello(capacity=Capacity(num_pages=8, page_size=16, max_running=4, num_ranks=2, num_pools=2))
    assert clocked.refusal(peer) == "its 2 ranks are one node, as in protocol 6: start it from a newer release"


def test_a_node_with_the_name_of_a_living_node_is_refused(clocked: ClockedRegistry) -> None:
    old = clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.beat(clocked.registry.nodes[old], BEAT, clocked.now + 0.05)  # perhaps sent before a kill
    clocked.after(0.1)
    assert clocked.answers(new) == []
    clocked.after(0.4, old)
    clocked.hello("new")  # does not make it wait longer
    clocked.after(0.4, old)
    assert clocked.refusal(new) == "a node called 'd0' is already here; give this one another --node-id"
    assert list(clocked.registry.nodes) == [old] and clocked.joined_epochs == ["old"]


def test_a_waiting_node_is_forgotten_when_its_connection_closes(clocked: ClockedRegistry) -> None:
    clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.connection_lost(new, clocked.now)
    clocked.after(1.5)
    assert clocked.answers(new) == [] and "new" not in clocked.joined_epochs


def test_the_number_of_waiting_nodes_is_bounded(clocked: ClockedRegistry) -> None:
    clocked.hello("old")
    peers = [clocked.hello(f"e{number}") for number in range(MAX_WAITING + 1)]
    clocked.hello("e0")  # has a place already
    assert clocked.answers(peers[-1]) == [m.Refusal] and not any(map(clocked.answers, peers[:-1]))


def test_dead_nodes_of_another_configuration_keep_no_new_node_out(clocked: ClockedRegistry) -> None:
    """All nodes stop and start again with another configuration. The first Hello comes while the old nodes count as
    alive."""
    old = clocked.hello("old", role="prefill", name="p0")
    clocked.after(1.0, old)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    clocked.after(0.4)
    clocked.hello("new", layout=make_layout(page_size=32))
    assert clocked.answers(new) == [] and list(clocked.registry.nodes) == [old]
    clocked.registry.lose(clocked.registry.nodes[old], "dead", clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == [m.Welcome] and list(clocked.registry.nodes) == [new]


def test_a_living_node_of_another_configuration_has_a_new_one_refused(clocked: ClockedRegistry) -> None:
    dead = clocked.hello("dead", role="prefill", name="p0")
    alive = clocked.hello("alive", role="prefill", name="p1", target_fingerprint="e" * 16)
    clocked.after(0.3, dead, alive)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    clocked.after(0.4, alive)
    assert clocked.answers(new) == []
    clocked.after(0.4, alive)
    assert clocked.refusal(new).startswith("it can be paired with nobody: prefill node p1")
    assert new not in clocked.registry.nodes
    clocked.registry.greet_again(new)
    assert clocked.answers(new) == [m.Refusal, m.HelloAgain], "it waits no more"


def test_a_waiting_node_is_welcomed_when_a_partner_joins(clocked: ClockedRegistry) -> None:
    other = clocked.hello("alive", role="prefill", name="p0")
    clocked.after(0.3, other)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    partner = clocked.hello("other", role="prefill", name="p1", layout=make_layout(page_size=32))
    clocked.registry.connection_lost(other, clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == clocked.answers(partner) == [m.Welcome]


def test_a_node_of_another_model_is_welcomed_with_a_notice(clocked: ClockedRegistry) -> None:
    clocked.hello(role="prefill", name="p0")
    peer = clocked.hello(model="other", target_fingerprint="o" * 16)
    (welcome,) = clocked.sent[peer]
    assert isinstance(welcome, m.Welcome) and "'other'" in welcome.notice and "'fake'" in welcome.notice


# Protocols
# ---------


def test_a_hello_in_an_older_protocol_than_both_know_is_asked_for_again(clocked: ClockedRegistry) -> None:
    peer = clocked.hello(protocol=PROTOCOL_MIN)
    (asked,) = clocked.sent[peer]
    assert asked == m.HelloAgain(router_epoch="r" * 16, protocol=PROTOCOL_MAX) and not clocked.joined
    clocked.hello(protocol=PROTOCOL_MAX)
    welcome = clocked.sent[peer][1]
    assert isinstance(welcome, m.Welcome) and welcome.protocol == PROTOCOL_MAX
    assert clocked.protocols[peer] == [PROTOCOL_MAX] * 2


@pytest.mark.parametrize(("highest", "expected"), [(PROTOCOL_MIN, PROTOCOL_MIN), (5, 5), (99, PROTOCOL_MAX)])
def test_a_node_is_addressed_in_the_highest_protocol_that_both_know(
    highest: int, expected: int, clocked: ClockedRegistry
) -> None:
    peer = clocked.hello(protocol_max=highest, protocol=0 if highest < 6 else highest)
    (welcome,) = clocked.sent[peer]
    node = clocked.registry.nodes[peer]
    assert isinstance(welcome, m.Welcome) and welcome.protocol == expected
    assert clocked.protocols[peer] == [expected] and node.protocol == expected
    assert node.knows(data_link.CudaWelcome) == (expected >= 6) and node.knows(m.Reserve)


def test_a_node_that_says_hello_anew_is_lost_before_it_is_asked_for_a_newer_hello(clocked: ClockedRegistry) -> None:
    peer = clocked.hello()
    clocked.hello(protocol=PROTOCOL_MIN)
    assert clocked.answers(peer) == [m.Welcome] and not clocked.lost, "it was said before the Welcome came"
    clocked.after(CROSSING_S + 0.1, peer)
    clocked.hello(protocol=PROTOCOL_MIN)
    assert clocked.answers(peer) == [m.Welcome, m.HelloAgain] and not clocked.registry.nodes
    assert [reason for _, reason in clocked.lost] == ["it introduced itself anew"]


# Losses, tokenizers, bounds
# --------------------------


def test_a_node_that_reports_itself_stuck_is_lost(clocked: ClockedRegistry) -> None:
    node = clocked.join()
    clocked.registry.beat(node, m.Heartbeat(4, "decode round", 12.0, 10.0, BEAT.load, NodeStats()), clocked.now)
    ((lost, reason),) = clocked.lost
    assert lost is node and reason == "stuck: in 'decode round' for 12.0 s, over its limit of 10 s"
    assert not clocked.registry.nodes and not node.group.nodes


def test_a_node_that_was_told_to_stop_gets_no_new_work_and_then_leaves(clocked: ClockedRegistry) -> None:
    node = clocked.join()
    clocked.registry.leaving(node, m.Leaving(done=False, reason="SIGTERM"), clocked.now)
    assert node.is_draining and not clocked.lost
    clocked.registry.leaving(node, m.Leaving(done=True, reason="SIGTERM"), clocked.now)
    assert clocked.lost == [(node, "it left")]


def test_a_tokenizer_reaches_all_groups_that_need_it(clocked: ClockedRegistry, tokenizer_file: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file)
    file = m.TokenizerFile(digest, zlib.compress(tokenizer_file))
    nodes = [clocked.join(name=name, model=name, tokenizer=digest) for name in ("one", "two")]
    other = clocked.join(name="other", model="other")
    clocked.registry.take_tokenizer(nodes[0], file)
    assert nodes[0].group.tokenizer is nodes[1].group.tokenizer is not None and other.group.tokenizer is None
    later = clocked.join(name="three", model="three", tokenizer=digest)
    assert later.group.tokenizer is nodes[0].group.tokenizer and not asks_for_tokenizer(clocked, later.routing_id)


def test_a_tokenizer_that_no_group_needs_is_forgotten(clocked: ClockedRegistry, tokenizer_file: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file)
    clocked.registry.take_tokenizer(
        clocked.join(tokenizer=digest), m.TokenizerFile(digest, zlib.compress(tokenizer_file))
    )
    for number in range(MAX_EMPTY_GROUPS + 2):
        clocked.now += CROSSING_S
        clocked.hello(model=f"model-{number}")
    clocked.registry.trim(lambda group: False)
    assert asks_for_tokenizer(clocked, clocked.hello("later", "d1", tokenizer=digest))


def test_a_tokenizer_that_got_lost_is_asked_for_again(clocked: ClockedRegistry) -> None:
    peer = clocked.hello()
    clocked.after(0.9 * TOKENIZER_S, peer)
    assert len(clocked.sent[peer]) == 1
    clocked.after(0.2 * TOKENIZER_S, peer)
    assert len(clocked.sent[peer]) == 2 and asks_for_tokenizer(clocked, peer)


def test_a_tokenizer_that_cannot_be_read_is_not_asked_for_again(
    clocked: ClockedRegistry, tokenizer_file: bytes
) -> None:
    digest = xxhash.xxh3_128_hexdigest(tokenizer_file)
    node = clocked.join(tokenizer=digest)
    with pytest.raises(ProtocolError, match=f"sent a tokenizer of digest {'b' * 16}, but its Hello promised {digest}"):
        clocked.registry.take_tokenizer(node, m.TokenizerFile("b" * 16, b""))
    assert not node.group.has_bad_tokenizer
    with pytest.raises(ProtocolError, match="damaged"):
        clocked.registry.take_tokenizer(node, m.TokenizerFile(digest, b"no zlib stream"))
    clocked.after(2 * TOKENIZER_S, node.routing_id)
    assert len(clocked.sent[node.routing_id]) == 1


def asks_for_tokenizer(clocked: ClockedRegistry, peer: bytes) -> bool:
    """Return whether the last message to a node was a Welcome that asks for its tokenizer."""
    message = clocked.sent[peer][-1]
    assert isinstance(message, m.Welcome), message
    return message.need_tokenizer


def test_groups_without_nodes_are_forgotten_but_for_a_few(clocked: ClockedRegistry) -> None:
    """A node joins under ever new model names. Requests wait in one of the groups."""
    registry = clocked.registry
    for number in range(50):
        clocked.now += CROSSING_S
        clocked.hello(model=f"model-{number}")
    first = next(iter(registry.groups.values()))
    forgotten = registry.trim(lambda group: group is first)
    assert len(registry.groups) == 1 + MAX_EMPTY_GROUPS + 1 == 50 - len(forgotten)
    assert [group.key.model for group in registry.groups.values()][:2] == ["model-0", f"model-{49 - MAX_EMPTY_GROUPS}"]
    assert not registry.trim(lambda group: group is first)


def test_log_lines_on_nodes_that_come_and_go_are_bounded(
    clocked: ClockedRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    with caplog.at_level("INFO", logger="baton.router.nodes.registry"):
        for _ in range(200):
            clocked.hello()  # lost and joined
            clocked.hello(name="d1", protocol_max=0, protocol_min=0)  # refused
    assert 0 < len(caplog.records) <= (2 + int(time.monotonic() - begun)) * MAX_LINES


# Through a router and fake nodes
# -------------------------------


def test_a_node_that_fits_no_other_is_refused_and_a_fitting_one_serves(make_system: Make) -> None:
    system = make_system()
    system.cluster.add("prefill", "p0")
    wait_until(lambda: system.cluster.by_name("p0").got(m.Welcome))
    node = system.cluster.add("decode", "d0", layout=make_layout(page_size=32))
    reason = wait_until(lambda: node.refusal)
    assert "page_size: 32 here, 16 there" in reason and not node.got(m.Welcome), reason
    system.cluster.add("decode", "d1")
    system.router.wait_ready()


def test_ready_names_a_node_without_a_partner(make_system: Make) -> None:
    system = make_system()
    system.cluster.add("prefill", "p0")
    wait_until(lambda: system.cluster.by_name("p0").got(m.Welcome))
    card = msgspec.structs.replace(system.cluster.card(), name="other")
    node = system.cluster.add("decode", "d0", model=card, target_fingerprint="o" * 16)
    wait_until(lambda: node.got(m.Welcome))
    for word in ("'other'", "'fake'"):
        assert word in node.notice
    status, body, _ = system.router.request("GET", "/ready")
    assert status == 503
    assert "'other'" in body["error"]["message"]


def test_two_models_are_served_at_the_same_time(make_system: Make) -> None:
    system = make_system().up()
    card = msgspec.structs.replace(system.cluster.card(), name="other")
    system.cluster.add("prefill", "p1", model=card, target_fingerprint="o" * 16)
    system.cluster.add("decode", "d1", model=card, target_fingerprint="o" * 16)
    wait_until(lambda: len(system.router.request("GET", "/v1/models")[1]["data"]) == 2)
    assert system.complete(model="other")[0] == 200
    assert system.complete(model="fake")[0] == 200
    assert len(own(system.cluster.by_name("p1"), m.Prefill)) == 1
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) == 1


def test_a_router_forgets_all_of_a_forgotten_group(make_system: Make) -> None:
    system = make_system().up()
    dispatcher = system.router.router.dispatcher
    system.complete()
    (group,) = dispatcher.registry.groups.values()
    for name in ("p0", "d0"):
        system.cluster.by_name(name).stop()
    wait_until(lambda: not dispatcher.registry.nodes)

    def forget() -> None:
        assert dispatcher.health._votes
        for number in range(MAX_EMPTY_GROUPS):
            key = group.key._replace(model=f"model-{number}")
            dispatcher.registry.groups[key] = NodeGroup(key, msgspec.structs.replace(hello, node_id="x"))

    hello = system.cluster.by_name("p0").hello()
    system.router.call(forget)
    wait_until(lambda: group not in dispatcher.registry.groups.values())
    wait_until(lambda: not dispatcher.queues.knows(group) and group not in dispatcher.health._votes)


def test_a_lost_node_that_lives_says_hello_again(make_system: Make) -> None:
    """The router declares a living node lost. The node's next heartbeat brings HelloAgain, and it serves again."""
    system = make_system().up()
    dispatcher = system.router.router.dispatcher
    system.router.call(
        lambda: [
            dispatcher.registry.lose(node, "dead", time.monotonic())
            for node in list(dispatcher.registry.nodes.values())
        ]
    )
    wait_until(lambda: system.cluster.by_name("d0").got(m.HelloAgain))
    system.router.wait_ready()
    assert system.complete()[0] == 200


def test_requests_go_on_when_a_stuck_node_is_lost(make_system: Make) -> None:
    system = make_system().up(1, 2)
    victim = system.cluster.by_name("d0")
    victim.is_silent = True
    victim.take = lambda message: None  # type: ignore[method-assign]

    victim.post(m.Heartbeat(4, "decode round", 12.0, 10.0, victim.load(), NodeStats()))
    dispatcher = system.router.router.dispatcher
    wait_until(lambda: len(dispatcher.registry.nodes) == 2, timeout=1)
    assert system.complete()[0] == 200


def test_garbage_on_the_bus_is_dropped(system: System) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(system.router.router.node_address)
    for frame in (b"", b"\xff" * 100, b"\x81\xa4type\xa5hello", encode({"type": "tokens"})):
        socket.send(frame)
    wait_until(lambda: system.router.router._hub.dropped_frames >= 4)  # type: ignore[union-attr]
    assert system.complete()[0] == 200
    socket.close()
    context.term()


def test_tokens_with_unequal_columns_are_dropped(system: System) -> None:
    """The router drops the bad message and serves on."""
    node = system.cluster.by_name("d0")
    node.post(m.Tokens((m.Unit("x", 0, 0),), bytes(4), b"\5\0\0\0", b""))
    node.post(m.Tokens((m.Unit("x", 0, 0),), bytes(4), b"\1\0\0\0", b"\xff" * 4))
    time.sleep(0.1)
    assert not system.router.errors, "it is the node's fault, not ours"
    assert system.complete()[0] == 200


def test_a_node_cannot_fail_or_end_sequences_of_another_node(system: System) -> None:
    expected = system.complete()[1]["choices"][0]["text"]
    other = system.cluster.add("decode", "d1")
    wait_until(lambda: other.got(m.Welcome))
    system.behaviour.hold = threading.Event()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(system.complete()))
    thread.start()
    nodes = [system.cluster.by_name(name) for name in ("d0", "d1")]
    wait_until(lambda: any(own(node, m.Reserve) and node.running for node in nodes))
    thief, owner = sorted(nodes, key=lambda node: bool(node.running))
    (tokens, *_) = owner.running[0][1]
    (unit,) = tokens.units
    thief.post(m.Failed(unit, "x", "not mine", False))
    thief.post(m.Tokens((unit,), b"\1\0\0\0", b"\1\0\0\0", b"\7\0\0\0", ended={0: Ended("stop", 7, 1, 2, 0)}))
    time.sleep(0.2)
    system.behaviour.hold.set()
    thread.join()
    assert answers[0][1]["choices"][0]["text"] == expected


def test_nodes_of_two_protocol_versions_serve_side_by_side(make_system: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is an upgrade of one node at a time. Each pair serves that shares a protocol with the router."""
    old, both, new = (7, 7), (7, 8), (8, 8)
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MIN", 7)
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MAX", 8)
    system = make_system()
    nodes = {"p-old": old, "p-both": both, "p-new": new, "d-both": both, "d-old": old}
    for name, (lowest, highest) in nodes.items():
        role = "prefill" if name.startswith("p") else "decode"
        system.cluster.add(role, name, protocol_min=lowest, protocol_max=highest)
        wait_until(lambda name=name: system.cluster.by_name(name).got(m.Welcome))
    expected = {(p, d) for p in nodes for d in nodes if p[0] == "p" and d[0] == "d"} - {("p-new", "d-old")}
    wait_until(lambda: {pair for pair, state in pair_states(system).items() if state == "ready"} == expected)
    welcomed = {name: system.cluster.by_name(name).got(m.Welcome)[0].protocol for name in nodes}
    assert welcomed == {"p-old": 7, "p-both": 8, "p-new": 8, "d-both": 8, "d-old": 7}
    assert len(system.router.router.dispatcher.registry.groups) == 1
    system.cluster.by_name("p-old").stop()
    system.cluster.by_name("p-both").stop()
    system.cluster.by_name("d-both").stop()
    wait_until(lambda: len(system.router.router.dispatcher.registry.nodes) == 2)
    assert pair_states(system) == {}, "nodes without a common version are a pair"
    assert not own(system.cluster.by_name("d-old"), m.Reserve)


def pair_states(system: System) -> dict[tuple[str, str], str]:
    body = system.router.request("GET", "/debug/nodes")[1]
    return {(pair["prefill"], pair["decode"]): pair["state"] for pair in body["pairs"]}


def test_a_lost_tokenizer_is_asked_for_again(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "TOKENIZER_S", 0.2)
    lost: list[str] = []
    send = Link.send

    def lose(link: Link, message: m.ToRouter) -> bool:
        if isinstance(message, m.TokenizerFile) and len(lost) < 2:  # of both nodes
            lost.append(message.digest)
            return True
        return send(link, message)

    monkeypatch.setattr(Link, "send", lose)
    system = make_system().up()
    assert len(lost) == 2
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)


def test_requests_are_served_after_their_node_was_wrongly_declared_dead(
    make_system: Callable[..., System],
) -> None:
    """This happens on a busy machine. The node was declared dead after it took a reservation, and joins again with no
    state."""
    system = make_system(max_running=1).up()
    dispatcher = system.router.router.dispatcher
    taken: list[m.Reserve] = []

    def take(node: FakeNode, message: m.Reserve) -> bool:
        if is_canary(message) or taken:
            return False
        taken.append(message)
        node.reserved[(message.rid, 0, message.attempt)] = message
        return True  # the answer is lost

    system.behaviour.answer_reserve = take
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(system.complete) for _ in range(3)]
        wait_until(lambda: taken)
        system.router.call(
            lambda: [
                dispatcher.registry.lose(node, "dead", time.monotonic())
                for node in list(dispatcher.registry.nodes.values())
                if node.num_units
            ]
        )
        assert [future.result()[0] for future in futures] == [200] * 3
    system.router.wait_idle()


@pytest.mark.parametrize("delay_s", [0.001, 0.3, 1.0])
def test_a_node_far_away_joins_once_and_stays(delay_s: float) -> None:
    """Messages take `delay_s` each way. Heartbeats of the node reach the router before it knows the node, and the
    router's requests for a Hello reach the node after it has said it."""
    site, under_way = ClockedRegistry(), list[tuple[float, bool, Any]]()
    peer = b"d0:e"
    hello = make_hello(epoch="e", protocol=PROTOCOL_MIN)

    def say(message: Any, _protocol: int = 0) -> bool:
        under_way.append((site.now + delay_s, True, message))
        return True

    site.registry._send = lambda _, message, protocol: under_way.append((site.now + delay_s, False, message)) or True  # type: ignore[attr-defined]
    session = RouterSession(hello, say, lambda: TokenizerFile("a" * 16, b""), lambda: site.now)
    session.start()
    events: list[Any] = []
    for step in range(200):
        site.now += 0.1
        due = [each for each in under_way if each[0] <= site.now]
        under_way[:] = [each for each in under_way if each[0] > site.now]
        for _, is_for_router, message in due:
            node = site.registry.nodes.get(peer)
            if not is_for_router:
                events += session.take([message])
            elif isinstance(message, m.Hello):
                site.registry.hello(peer, message, site.now)
                for group in site.registry.groups.values():
                    group.tokenizer = make_group().tokenizer
            elif node is None:
                site.registry.greet_again(peer)
            elif isinstance(message, m.Heartbeat):
                site.registry.beat(node, message, site.now)
        site.registry.check(site.now)
        events += session.take([])
        if step % 2 == 0:
            say(BEAT)
        if step % 10 == 0 and peer in site.registry.nodes:
            site.registry._send(peer, m.RouterHeartbeat(router_epoch="r" * 16), PROTOCOL_MIN)
    assert [type(event) for event in events] == [Joined], events
    assert len(site.joined) == 1 and not site.lost


class Drained:
    """Two decode nodes of a group, and the nodes that were evicted."""

    def __init__(self) -> None:
        self.live: list[Any] = []
        group: Any = SimpleNamespace(live=lambda role: self.live)
        self.first, self.other = (Node(site_hello("decode", name), group, 0.0) for name in ("d0", "d1"))
        self.live.append(self.other)
        self.evicted: list[Any] = []
        self.nodes: dict[bytes, Any] = {b"d0": self.first, b"d1": self.other}
        self.drains = Drains(self.nodes)

    def check(self, now: float) -> None:
        self.evicted += overdue(self.nodes.values(), now)


def test_remaining_requests_are_moved_once_when_the_time_is_over() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    assert drained.first.is_cordoned
    now = 0.0
    drained.check(now + 4.0)
    assert drained.evicted == []
    for after_s in (6.0, 6.25, 60.0):
        drained.check(now + after_s)
    assert drained.evicted == [drained.first]


def test_requests_that_no_other_node_can_take_stay_until_one_can() -> None:
    drained = Drained()
    drained.live.clear()
    drained.drains.begin("d0", 0.0)
    now = 0.0
    drained.check(now + 1.0)
    assert drained.evicted == []
    drained.live.append(drained.other)
    drained.check(now + 2.0)
    assert drained.evicted == [drained.first]


def test_a_drain_that_was_taken_back_moves_nothing() -> None:
    drained = Drained()
    drained.drains.begin("d0", 1.0)
    assert drained.drains.undo("d0") == [drained.first] and not drained.first.is_cordoned
    drained.check(60.0)
    assert drained.evicted == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NotFound, match="'d7' is not here; joined are: d0, d1"):
        Drained().drains.begin("d7", 1.0)


def test_a_drain_belongs_to_the_name_until_the_node_leaves() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    again = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(again)
    assert again.is_cordoned and not drained.other.is_cordoned
    drained.drains.left(again)
    fresh = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(fresh)
    assert not fresh.is_cordoned


def test_a_node_that_leaves_is_not_put_back() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    drained.first.leave()
    with pytest.raises(Conflict, match=r"d0 is leaving.*cannot be undone"):
        drained.drains.undo("d0")


def test_a_drain_of_a_node_that_is_gone_can_be_undone() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    del drained.nodes[b"d0"]
    with pytest.raises(NotFound, match=r"d0.* will not drain when it comes back"):
        drained.drains.undo("d0")
    again = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(again)
    assert not again.is_cordoned


class Shared:
    """A node that another router shares, as this router's drains see it."""

    def __init__(self) -> None:
        group: Any = SimpleNamespace(live=lambda role: [])
        self.node = Node(site_hello("decode", "d0"), group, 0.0)
        self.drains = Drains({self.node.routing_id: self.node})

    def says(self, *, is_cordoned: bool) -> bool:
        """The node sends a heartbeat. Return whether it takes requests again."""
        return self.drains.heard(self.node, Service(is_cordoned), 9.0)


def test_a_node_that_another_router_drains_is_drained_here_and_put_back_with_it() -> None:
    shared = Shared()
    assert not shared.says(is_cordoned=False) and not shared.node.is_cordoned
    assert not shared.says(is_cordoned=True) and shared.node.is_cordoned
    assert shared.drains.to_tell() == [] and shared.node.must_evict(9.0)
    assert shared.says(is_cordoned=False) and not shared.node.is_cordoned


def test_a_heartbeat_from_before_a_drain_does_not_undo_it() -> None:
    shared = Shared()
    shared.drains.begin("d0", 5.0)
    for _ in range(2):  # until the node confirms it, it is told again
        assert shared.drains.to_tell() == [(shared.node, True)]
        assert not shared.says(is_cordoned=False) and shared.node.is_cordoned
    assert not shared.says(is_cordoned=True) and shared.drains.to_tell() == []
    shared.drains.undo("d0")
    assert shared.drains.to_tell() == [(shared.node, False)]
    assert not shared.says(is_cordoned=True) and not shared.node.is_cordoned
    assert not shared.says(is_cordoned=False) and shared.drains.to_tell() == []


def test_a_drained_node_that_comes_back_is_told_anew() -> None:
    shared = Shared()
    shared.drains.begin("d0", 5.0)
    shared.says(is_cordoned=True)
    shared.node.uncordon()  # another epoch
    shared.drains.joined(shared.node)
    assert shared.drains.to_tell() == [(shared.node, True)]
