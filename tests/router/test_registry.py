"""Who may join, who is refused and what they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import NodeStats
from baton.metadata.wire.request import Ended
from baton.router.node import Group
from baton.router.registry import MAX_EMPTY_GROUPS

from .conftest import System
from .fake_nodes import make_layout
from .test_dispatcher import own, wait_until


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": make_layout(page_size=32)}, ("page_size", "32", "16")),
        ({"layout": make_layout(dtype="bfloat16")}, ("dtype", "bfloat16", "float32")),
        (
            {"layout": msgspec.structs.replace(make_layout(), frozen_layers=(0, 1))},
            ("frozen_layers: 0, 1 here, absent there",),
        ),
        ({"target_fingerprint": "e" * 16}, ("weights", "e" * 16, "f" * 16)),
        ({"draft_fingerprint": "d" * 16}, ("draft weights", "d" * 16, "None")),
        ({"protocol_min": 7, "protocol_max": 8}, ("protocol", "7..8", "4..6")),
        ({"protocol_min": 1, "protocol_max": 2}, ("protocol", "1..2", "4..6")),
    ],
)
def test_a_node_that_fits_nobody_is_refused(make_system: Callable[..., System], changes: Any, words: Any) -> None:
    system = make_system()
    system.cluster.add("prefill", "p0")
    wait_until(lambda: system.cluster.by_name("p0").got(m.Welcome))
    node = system.cluster.add("decode", "d0", **changes)
    reason = wait_until(lambda: node.refusal)
    for word in words:
        assert word in reason, reason
    assert not node.got(m.Welcome)
    system.cluster.add("decode", "d1")
    system.router.wait_ready()


def test_another_model_waits_and_is_told(make_system: Callable[..., System]) -> None:
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


def test_two_models_are_served_side_by_side(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    card = msgspec.structs.replace(system.cluster.card(), name="other")
    system.cluster.add("prefill", "p1", model=card, target_fingerprint="o" * 16)
    system.cluster.add("decode", "d1", model=card, target_fingerprint="o" * 16)
    wait_until(lambda: len(system.router.request("GET", "/v1/models")[1]["data"]) == 2)
    assert system.complete(model="other")[0] == 200
    assert system.complete(model="fake")[0] == 200
    assert len(own(system.cluster.by_name("p1"), m.Prefill)) == 1
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) == 1


def test_one_name_twice_is_refused(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    twin = system.cluster.add("decode", "d0")
    assert "'d0'" in wait_until(lambda: twin.refusal)
    assert system.complete()[0] == 200


def test_a_router_forgets_all_of_a_forgotten_group(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    dispatcher = system.router.router.dispatcher
    system.complete()
    (group,) = dispatcher.registry.groups.values()
    for name in ("p0", "d0"):
        system.cluster.by_name(name).stop()
    wait_until(lambda: not dispatcher.registry.nodes)

    def forget() -> None:
        assert dispatcher.health._elections
        for number in range(MAX_EMPTY_GROUPS):
            key = group.key._replace(model=f"model-{number}")
            dispatcher.registry.groups[key] = Group(key, msgspec.structs.replace(hello, node_id="x"))

    hello = system.cluster.by_name("p0").hello()
    system.router.call(forget)
    wait_until(lambda: group not in dispatcher.registry.groups.values())
    held = [dispatcher.admission._queues, dispatcher.admission.intake._paces, dispatcher.admission.stranded._served_at]
    wait_until(lambda: not any(group in each for each in [*held, dispatcher.health._elections]))


def test_a_forgotten_node_introduces_itself_again(make_system: Callable[..., System]) -> None:
    """The router gives a node up; its next heartbeat brings HelloAgain, and it serves on."""
    system = make_system().up()
    dispatcher = system.router.router.dispatcher
    system.router.call(
        lambda: [dispatcher.registry.lose(node, "dead") for node in list(dispatcher.registry.nodes.values())]
    )
    wait_until(lambda: system.cluster.by_name("d0").got(m.HelloAgain))
    system.router.wait_ready()
    assert system.complete()[0] == 200


def test_a_stuck_node_is_given_up(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    victim = system.cluster.by_name("d0")
    victim.is_silent = True
    victim.take = lambda message: None  # type: ignore[method-assign]

    victim.post(m.Heartbeat(4, "decode round", 12.0, 10.0, victim.load(), NodeStats()))
    dispatcher = system.router.router.dispatcher
    wait_until(lambda: len(dispatcher.registry.nodes) == 2, timeout=1)
    assert system.complete()[0] == 200


def test_garbage_on_the_bus_is_dropped(system: System) -> None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(system.router.router.node_address)
    for frame in (b"", b"\xff" * 100, b"\x81\xa4type\xa5hello", m.encode({"type": "tokens"})):
        socket.send(frame)
    wait_until(lambda: system.router.router._hub.dropped_frames >= 4)  # type: ignore[union-attr]
    assert system.complete()[0] == 200
    socket.close()
    context.term()


def test_tokens_whose_columns_do_not_fit(system: System) -> None:
    """A node's bad message is one message lost, not a router."""
    node = system.cluster.by_name("d0")
    node.post(m.Tokens((m.Unit("x", 0, 0),), bytes(4), b"\5\0\0\0", b""))
    node.post(m.Tokens((m.Unit("x", 0, 0),), bytes(4), b"\1\0\0\0", b"\xff" * 4))
    time.sleep(0.1)
    assert not system.router.errors, "it is the node's fault, not ours"
    assert system.complete()[0] == 200


def test_a_node_has_no_say_in_what_others_compute(system: System) -> None:
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
    thread.join(10)
    assert answers[0][1]["choices"][0]["text"] == expected


def test_canaries_have_fresh_salts_and_several_pages(make_system: Callable[..., System]) -> None:
    system = make_system(router={"canary_interval_s": 0.05}).up()

    def of_pairs() -> list[m.Prefill]:
        return [message for message in system.cluster.by_name("p0").got(m.Prefill) if message.decode is not None]

    canaries = wait_until(lambda: len(of_pairs()) > 1 and of_pairs(), timeout=8)
    assert all(canary.rid.startswith("canary") for canary in canaries)
    assert len({canary.request.cache_salt for canary in canaries}) == len(canaries)
    assert len({canary.request.prompt_ids for canary in canaries}) == 1
    assert len(canaries[0].request.prompt_ids) // 4 > 3 * system.cluster.page_size


def test_nodes_of_two_protocol_versions_serve_side_by_side(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade one node at a time: each pair that shares a version with the router serves, in one group."""
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


def test_a_node_that_shares_no_protocol_version_with_anybody_is_refused(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MIN", 7)
    monkeypatch.setattr("baton.metadata.wire.protocol.PROTOCOL_MAX", 9)
    system = make_system()
    system.cluster.add("prefill", "p0", protocol_min=7, protocol_max=8)
    wait_until(lambda: system.cluster.by_name("p0").got(m.Welcome))
    node = system.cluster.add("decode", "d0", protocol_min=9, protocol_max=9)
    assert "protocol versions: 9..9 here, 7..8 there" in wait_until(lambda: node.refusal)


def test_cancels_of_one_attempt_are_acknowledged_one_by_one(system: System) -> None:
    """The answer to the first says nothing of the second, which names more choices and may be lost."""
    dispatcher, node = system.router.router.dispatcher, system.cluster.by_name("d0")
    system.behaviour.ack_cancels = False
    (known,) = (each for each in dispatcher.registry.nodes.values() if each.node_id == "d0")
    system.router.call(lambda: dispatcher._cancels.send(known, "r", 0, [0], "a stop string"))
    system.router.call(lambda: dispatcher._cancels.send(known, "r", 0, [2], "another"))
    assert [cancel.choices for cancel in wait_until(lambda: len(node.got(m.Cancel)) == 2 and node.got(m.Cancel))] == [
        (0,),
        (0, 2),
    ]
    system.router.call(lambda: dispatcher._cancels.acknowledged(known, m.Cancelled("r", 0)))
    assert ("r", 0) in known.unacked
    again = wait_until(lambda: node.got(m.Cancel)[2:])
    assert again[0].choices == (0, 2)
    system.router.call(lambda: dispatcher._cancels.acknowledged(known, m.Cancelled("r", 0)))
    assert not known.unacked


def pair_states(system: System) -> dict[tuple[str, str], str]:
    body = system.router.request("GET", "/debug/nodes")[1]
    return {(pair["prefill"], pair["decode"]): pair["state"] for pair in body["pairs"]}
