"""Errors and operators' pages say which nodes drain or are gone, and how to put a drained node back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import ConfigError
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import GroupRank
from baton.router.config import RouterConfig
from baton.router.nodes.availability import (
    MAX_NAMED,
    Expected,
    degraded,
    drain_summary,
    missing_for_service,
    no_node,
)
from baton.router.text.tokenizer import TextTokenizer

from ..conftest import System
from ..dispatching.test_runner import own, wait_until
from ..hellos import ClockedRegistry
from ..http.server.test_access import bearer

Make = Callable[..., System]
LEAVING = m.Leaving(done=False, reason="SIGTERM")


def test_the_reason_names_the_part_that_is_missing_for_service(tokenizer: TextTokenizer) -> None:
    clocked = ClockedRegistry()

    def missing() -> str | None:
        return missing_for_service(list(clocked.registry.groups.values()))

    assert missing() == "no node has joined"
    node = clocked.join(name="p0", role="prefill")
    assert missing() == "no tokenizer has arrived yet"
    node.group.tokenizer = tokenizer
    assert missing() == "no decode node has joined"
    clocked.join(name="d0", model="other", target_fingerprint="o" * 16)
    assert "can be paired with nobody yet" in str(missing())
    clocked.join(name="d1")
    assert "decode node d0 serves model 'other'" in str(missing())
    clocked.registry.lose(clocked.registry.nodes[b"d0:e"], "dead", clocked.now)
    assert missing() is None


def test_long_lists_of_draining_nodes_are_cut() -> None:
    clocked = ClockedRegistry()
    nodes = [clocked.join(name=f"d{number}") for number in range(MAX_NAMED + 2)]
    assert drain_summary(nodes) == ""
    for node in nodes:
        clocked.registry.leaving(node, LEAVING, clocked.now)
    assert drain_summary(nodes[:1]) == "decode node d0 is leaving, since it was told to stop"
    summary = drain_summary(nodes)
    assert summary.count("; ") == MAX_NAMED and summary.endswith("; and 2 more")


def test_the_error_for_clients_counts_draining_nodes_and_the_one_for_operators_names_them() -> None:
    clocked = ClockedRegistry()
    node = clocked.join(name="d0")
    error = no_node("no decode node", [node.group], ["decode"])
    assert (error.shown, str(error)) == ("no decode node", "no decode node")
    clocked.registry.leaving(node, LEAVING, clocked.now)
    error = no_node("no decode node", [node.group], ["decode"])
    assert error.shown == "no decode node: 1 draining" and "d0 is leaving" in str(error)
    assert no_node("no prefill node", [node.group], ["prefill"]).shown == "no prefill node"


def test_nodes_that_leave_are_gone_or_keep_coming_back_are_degraded() -> None:
    clocked = ClockedRegistry()
    registry = clocked.registry

    def found() -> list[tuple[str, str]]:
        return [(each.node, each.state) for each in degraded(registry.nodes.values(), registry.histories, clocked.now)]

    for number in range(3):
        registry.lose(clocked.join(f"e{number}", "d0"), "closed", clocked.now)
    assert found() == [("d0", "gone")]
    clocked.join("last", "d0")
    assert found() == [("d0", "flapping")]
    registry.leaving(clocked.join(name="d1"), LEAVING, clocked.now)
    assert found() == [("d1", "leaving"), ("d0", "flapping")]
    registry.connection_lost(b"d1:e", clocked.now)
    assert found() == [("d0", "flapping")], "d1 announced that it leaves"
    clocked.now += 600.0
    assert found() == [], "the losses are too long ago"


# Through a router and fake nodes
# -------------------------------


def ready(system: System, **headers: str) -> tuple[int, Any]:
    status, body, _ = system.router.request("GET", "/ready", headers=headers)
    return status, body


def reason(system: System) -> str:
    status, body = ready(system)
    assert status == 503
    return body["error"]["message"]


@pytest.mark.parametrize(("name", "role"), [("d0", "decode"), ("p0", "prefill")])
def test_the_only_node_of_a_role_is_drained(make_system: Make, name: str, role: str) -> None:
    system = make_system(router={"node_wait_s": 0.4}).up()
    words = [f"{role} node {name} is draining", "an operator", f"POST /admin/nodes/{name}/undrain"]
    assert system.router.request("POST", f"/admin/nodes/{name}/drain")[0] == 200
    assert all(word in reason(system) for word in words), reason(system)
    assert "canary" not in reason(system)
    for _ in range(2):  # the first request waits for a node, the second one is refused at once
        status, body, _ = system.complete()
        assert status == 503
        message = body["error"]["message"]
        assert all(word in message for word in words), message
        assert f"no {role} node" in message
    assert system.router.request("POST", f"/admin/nodes/{name}/undrain")[0] == 200
    system.router.wait_ready()
    assert system.complete()[0] == 200


@pytest.mark.parametrize("roles", [("decode", "prefill"), ("prefill", "decode")])
def test_a_request_waits_while_only_nodes_of_one_role_have_come_back_to_the_router(
    make_system: Make, roles: tuple[str, str]
) -> None:
    system = make_system()
    system.cluster.add(roles[0], "first")
    groups = system.router.router.dispatcher.registry.groups
    wait_until(lambda: any(group.tokenizer for group in groups.values()))
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(system.complete)
        wait_until(lambda: asking.done() or system.router.router.dispatcher.queues.num_waiting == 1)
        system.cluster.add(roles[1], "second")
        status, body, _ = asking.result(30)
    assert status == 200 and body["choices"][0]["text"] == system.text, body
    system.router.wait_idle()


def test_requests_wait_for_the_first_nodes_of_a_router_that_has_just_started(make_system: Make) -> None:
    system = make_system(router={"max_waiting": 1})
    early = system.router.router.api.early
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(system.complete)
        wait_until(lambda: asking.done() or early.num_requests == 1)
        status, body, _ = system.complete()
        assert (status, body["error"]["message"]) == (503, "no node has joined"), "one more than may wait"
        system.up()
        status, body, _ = asking.result(30)
    assert status == 200 and body["choices"][0]["text"] == system.text, body
    assert early.num_requests == 0
    system.router.wait_idle()


@pytest.mark.parametrize("ends", ["its time is over", "the router stops"])
def test_no_request_waits_for_first_nodes_longer_than_stated(make_system: Make, ends: str) -> None:
    system = make_system(router={"node_wait_s": 0.5 if ends == "its time is over" else 100.0})
    api = system.router.router.api
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(system.complete)
        wait_until(lambda: asking.done() or api.early.num_requests == 1)
        if ends == "the router stops":
            system.router.call(api.drain)
        status, body, _ = asking.result(30)
    assert (status, body["error"]["message"]) == (503, "no node has joined")


def test_a_node_that_leaves_cannot_be_put_back(make_system: Make) -> None:
    system = make_system(router={"node_wait_s": 0.2}).up()
    system.cluster.by_name("d0").post(m.Leaving(done=False, reason="SIGTERM"))
    wait_until(lambda: ready(system)[0] == 503)
    for message in (reason(system), system.complete()[1]["error"]["message"]):
        assert "decode node d0 is leaving" in message and "undrain" not in message, message
    status, body, _ = system.router.request("POST", "/admin/nodes/d0/undrain")
    assert (status, body["error"]["code"]) == (409, "http_error") and "leaving" in body["error"]["message"]


def test_the_ranks_of_a_group_drain_as_one_node() -> None:
    clocked = ClockedRegistry()
    places = (("d0", GroupRank("d0", "e", 0, 2)), ("d0/rank-1", GroupRank("d0", "e", 1, 2)))
    ranks = [clocked.join(f"e{place.rank}", name, place=place) for name, place in places]
    for each in ranks:
        clocked.registry.leaving(each, LEAVING, clocked.now)
    assert drain_summary(ranks) == "decode node d0 is leaving, since it was told to stop"
    assert no_node("no decode node", [ranks[0].group], ["decode"]).shown == "no decode node: 1 draining"


def test_clients_without_the_admin_key_see_no_node_names(make_system: Make) -> None:
    system = make_system(router={"node_wait_s": 0.2, "admin_key": "boss"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: ready(system, **bearer("boss"))[0] == 200)
    request = system.router.request
    assert request("POST", "/admin/nodes/d0/drain", headers=bearer("boss"))[0] == 200
    assert "d0" not in str(ready(system)) and "d0" in str(ready(system, **bearer("boss")))
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5}
    message = request("POST", "/v1/completions", body)[1]["error"]["message"]
    assert "no decode node" in message and "draining" in message and "d0" not in message
    assert "d0 is draining" in request("POST", "/v1/completions", body, bearer("boss"))[1]["error"]["message"]


def test_a_stream_that_waits_for_a_node_gets_the_same_error(make_system: Make) -> None:
    system = make_system(router={"node_wait_s": 0.3}).up()
    system.router.request("POST", "/admin/nodes/d0/drain")
    status, body, _ = system.complete(stream=True)
    assert status == 503 and "d0 is draining" in body["error"]["message"]


def test_operators_see_a_drained_node_while_another_one_serves(make_system: Make) -> None:
    system = make_system().up(1, 2)
    assert ready(system) == (200, {"status": "ready"})
    system.router.request("POST", "/admin/nodes/d0/drain")
    status, body = ready(system)
    assert (status, body["status"]) == (200, "ready")
    (item,) = body["degraded"]
    assert (item["node"], item["role"], item["state"]) == ("d0", "decode", "draining")
    assert "POST /admin/nodes/d0/undrain" in item["words"]
    listed = system.router.request("GET", "/debug/nodes")[1]
    assert listed["degraded"] == body["degraded"] and listed["is_ready"] is True
    assert {node["node_id"] for node in listed["nodes"] if node["is_draining"]} == {"d0"}
    page = system.router.request("GET", "/metrics")[1].decode()
    assert 'baton_node_draining{model="fake",node="d0",role="decode"} 1.0' in page
    assert 'baton_node_draining{model="fake",node="d1",role="decode"} 0.0' in page
    system.router.request("POST", "/admin/nodes/d0/undrain")
    assert ready(system) == (200, {"status": "ready"})


def test_a_failed_canary_is_the_reason_though_another_node_is_drained(make_system: Make) -> None:
    system = make_system()
    fails = {"bad"}

    def answer(node: Any, message: m.Reserve) -> bool:
        if node.name not in fails:
            return False
        node.link.send(m.Reserved(message.rid, message.attempt, (0,), node.load()))
        for choice in message.choices:
            node.post(m.Failed(m.Unit(message.rid, choice, message.attempt), "internal", "broken inside", False))
        return True

    system.behaviour.answer_reserve = answer
    system.up(1, 1)
    system.cluster.add("decode", "bad")
    wait_until(lambda: "broken inside" in str(system.router.request("GET", "/debug/nodes")[1]["pairs"]))
    system.router.request("POST", "/admin/nodes/d0/drain")
    assert "broken inside" in reason(system) and reason(system).index("broken inside") < reason(system).index("d0 is")
    system.router.request("POST", "/admin/nodes/bad/drain")
    assert "broken inside" not in reason(system), "the failure of a drained node is not why nothing is served"
    assert "bad is draining" in reason(system) and "d0 is draining" in reason(system)


def test_a_node_that_is_drained_twice(make_system: Make) -> None:
    """The second drain sets the time limit anew. Undraining works at once."""
    system = make_system().up(1, 2)
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(system.complete)
        (holder,) = wait_until(lambda: [node.name for node in system.cluster.nodes if own(node, m.Reserve)])
        for timeout_s in (3.0, 60.0):
            assert system.router.request("POST", f"/admin/nodes/{holder}/drain", {"timeout_s": timeout_s})[0] == 200
        time.sleep(3.5)
        assert system.cluster.by_name(holder).reserved, "it was moved though it has sixty seconds"
        assert system.router.request("POST", f"/admin/nodes/{holder}/undrain")[1]["is_draining"] is False
        system.behaviour.hold.set()
        assert answer.result()[0] == 200


def test_a_drained_node_that_dies_comes_back_drained_and_one_that_left_does_not(make_system: Make) -> None:
    system = make_system().up(1, 2)
    system.router.request("POST", "/admin/nodes/d0/drain")
    system.cluster.by_name("d0").stop()
    assert len(system.router.call(lambda: system.router.router.dispatcher.registry.nodes)) >= 2
    wait_until(lambda: _states(system) == {"d0": "gone"})
    back = system.cluster.add("decode", "d0")
    wait_until(lambda: _states(system) == {"d0": "draining"})
    back.post(m.Leaving(done=True, reason="SIGTERM"))
    wait_until(lambda: not _states(system))
    back.stop()
    system.cluster.add("decode", "d0")
    wait_until(lambda: len(system.router.call(lambda: list(system.router.router.dispatcher.registry.nodes))) == 3)
    assert _states(system) == {}


def test_nodes_that_come_and_go_are_counted(make_system: Make) -> None:
    system = make_system().up(1, 2)
    for _ in range(3):
        system.cluster.by_name("d1").stop()
        system.cluster.nodes = [node for node in system.cluster.nodes if node.name != "d1"]
        wait_until(lambda: _states(system).get("d1") == "gone")
        system.cluster.add("decode", "d1")
        wait_until(lambda: _states(system).get("d1") != "gone")
    (item,) = ready(system)[1]["degraded"]
    assert item["state"] == "flapping" and "decode node d1 has come back 3 times" in item["words"]
    page = system.router.request("GET", "/metrics")[1].decode()
    assert 'baton_node_restarts_total{node="d1",role="decode"} 3.0' in page
    assert 'baton_node_losses_total{node="d1",reason="closed",role="decode"} 3.0' in page
    assert 'baton_node_restarts_total{node="d0",role="decode"} 0.0' in page


def _states(system: System) -> dict[str, str]:
    return {item["node"]: item["state"] for item in ready(system)[1].get("degraded", [])}


def test_without_nodes_requests_get_503(make_system: Callable[..., System]) -> None:
    system = make_system(router={"node_wait_s": 0.0})
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


def test_each_node_that_was_started_is_waited_for_once() -> None:
    def joined(**counts: int) -> Any:
        """Return the histories of nodes, of which each decode node is a group of two ranks."""
        return [
            SimpleNamespace(role=role, unit=f"{role}-{number}")
            for role, count in counts.items()
            for number in range(count)
            for _ in range(1 + (role == "decode"))
        ]

    expected = Expected({"prefill": 1, "decode": 2})
    assert expected.missing(joined(decode=1)) == "0 of 1 prefill nodes and 1 of 2 decode nodes have joined"
    assert expected.missing(joined(prefill=3)) == "0 of 2 decode nodes have joined"
    assert expected.missing(joined(prefill=1, decode=2)) == ""
    assert expected.missing(joined()) == "", "afterwards a lost node makes no router unready"
    assert Expected({}).missing(joined()) == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"expect": "prefill"}, "prefill=1,decode=2"),
        ({"expect": "prefill=1,prefill=2"}, "expect"),
        ({"expect": "router=1"}, "expect"),
        ({"expect": "decode=-1"}, "expect"),
        ({"ops_address": "host"}, "127.0.0.1:9090"),
        ({"ops_address": "host:70000"}, "ops_address"),
        ({"tenant_header": "X-Tenant"}, "--trusted-proxy"),
        ({"tenant_header": "X Tenant", "trusted_proxy": ("::1",)}, "X-Tenant"),
        ({"trusted_proxy": ("everyone",)}, "CIDR|10.0.0.0/8"),
        ({"cache_secret": ""}, "cache_secret"),
    ],
)
def test_wrong_settings_are_refused_by_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RouterConfig(**settings)


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ("9090", "127.0.0.1", 9090),
        (":0", "127.0.0.1", 0),
        ("0.0.0.0:9", "0.0.0.0", 9),
        ("[::1]:9", "::1", 9),
        ("Ops.example:9", "ops.example", 9),
    ],
)
def test_the_ops_address_is_on_loopback_unless_it_names_a_host(given: str, host: str, port: int) -> None:
    assert RouterConfig(ops_address=given).ops == (host, port)
    assert RouterConfig(expect="prefill=0, decode=2").expected == {"decode": 2}
