"""Routes for operators: nodes, page ledgers, and taking a node out of service."""

from __future__ import annotations

from collections.abc import Callable

from baton.metadata.wire import messages as m

from ...conftest import System
from ...dispatching.test_runner import own


def test_operators_see_the_nodes_and_the_ledger(system: System) -> None:
    assert system.complete()[0] == 200
    _, body, _ = system.router.request("GET", "/debug/nodes")
    assert {node["node_id"]: node["role"] for node in body["nodes"]} == {"p0": "prefill", "d0": "decode"}
    assert body["pairs"] == [{"prefill": "p0", "decode": "d0", "state": "ready", "is_reported": False}]
    for method, path in (("GET", "/debug/ledger"), ("POST", "/admin/flush")):
        status, body, _ = system.router.request(method, path)
        assert status == 200
        assert body["router"]["requests"] == []
        assert {name: report["requests"] for name, report in body["nodes"].items()} == {"p0": [], "d0": []}
        assert body["nodes"]["p0"]["pool"]["free"] == 512


def test_a_node_is_drained_and_put_back(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    request = system.router.request

    def reserves(name: str) -> int:
        return len(own(system.cluster.by_name(name), m.Reserve))

    status, body, _ = request("POST", "/admin/nodes/d0/drain", {"timeout_s": 0})
    assert (status, body["node_id"], body["is_draining"]) == (200, "d0", True)
    for _ in range(3):
        assert system.complete()[0] == 200
    assert (reserves("d0"), reserves("d1")) == (0, 3)
    assert request("POST", "/admin/nodes/d1/drain")[0] == 200, "the body may be left out"
    assert request("POST", "/admin/nodes/d0/undrain")[1]["is_draining"] is False
    assert system.complete()[0] == 200
    assert (reserves("d0"), reserves("d1")) == (1, 3)
    for path in ("drain", "undrain"):
        status, body, _ = request("POST", f"/admin/nodes/nobody/{path}")
        assert (status, body["error"]["code"]) == (404, "not_found")
    for bad in ({"timeout_s": -1}, {"timeout": 1}, b"{", []):
        assert request("POST", "/admin/nodes/d0/drain", bad)[0] == 400


def test_each_request_asks_every_node_once(system: System) -> None:
    for method, path, kind in (("GET", "/debug/ledger", m.Inspect), ("POST", "/admin/flush", m.Flush)):
        status, body, _ = system.router.request(method, path)
        assert status == 200 and set(body["nodes"]) == {"p0", "d0"} and all(body["nodes"].values())
        assert [len(node.got(kind)) for node in system.cluster.nodes] == [1, 1]
