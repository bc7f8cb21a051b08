"""What operators see: nodes, ledgers, figures, the API's own description."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.metadata.wire import messages as m
from baton.router import errors
from baton.router.http import openapi
from baton.router.http.openai_types import CompletionRequest

from ..conftest import System
from ..test_dispatcher import own


def test_nodes_and_ledger(system: System) -> None:
    assert system.complete()[0] == 200
    _, body, _ = system.router.request("GET", "/debug/nodes")
    assert {node["node_id"]: node["role"] for node in body["nodes"]} == {"p0": "prefill", "d0": "decode"}
    assert body["pairs"] == [{"prefill": "p0", "decode": "d0", "state": "ready"}]
    for method, path in (("GET", "/debug/ledger"), ("POST", "/admin/flush")):
        status, body, _ = system.router.request(method, path)
        assert status == 200
        assert body["router"]["requests"] == []
        assert {name: report["requests"] for name, report in body["nodes"].items()} == {"p0": [], "d0": []}
        assert body["nodes"]["p0"]["pool"]["free"] == 512


def test_metrics(system: System) -> None:
    system.complete()
    system.complete(prompt="")
    system.router.request("POST", "/v1/completions", b"{")
    page = system.router.request("GET", "/metrics")[1].decode()
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    num_tokens = len(system.say(system.text))
    assert float(figures['baton_requests_total{model="fake",outcome="done"}']) == 1
    assert float(figures['baton_output_tokens_total{model="fake"}']) == num_tokens
    assert float(figures['baton_itl_seconds_count{model="fake"}']) == num_tokens - 1
    assert float(figures['baton_ttft_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_queue_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_e2e_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_transfer_bytes_total{model="fake"}']) == 2 * 1024  # the canary's too
    assert float(figures['baton_http_responses_total{status="400"}']) == 2
    assert float(figures['baton_node_free_pages{model="fake",node="d0",role="decode"}']) == 512
    assert float(figures['baton_node_steps_total{model="fake",node="p0",role="prefill"}']) == 7


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


def test_openapi_comes_from_the_types(system: System) -> None:
    status, body, _ = system.router.request("GET", "/openapi.json")
    assert status == 200
    assert body == msgspec.json.decode(msgspec.json.encode(openapi.document()))
    fields = body["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(fields) == set(CompletionRequest.__struct_fields__)
    app = system.router.router.api.application()
    served = {resource.canonical for resource in app.router.resources()}
    assert set(body["paths"]) == served - {"/openapi.json"}


def test_the_statuses_that_the_code_can_raise_are_declared() -> None:
    """All of them, and no other. Which route answers which: conftest.py, check_is_declared."""
    declared = {
        int(status)
        for operations in openapi.document()["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    raised = {200, 500, *errors._STATUS.values()}
    for path in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "HttpRefusal":
                raised |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
            elif isinstance(node, ast.FunctionDef) and node.name == "status_of":
                returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                raised |= {each.value for each in returns if isinstance(each, ast.Constant)}
    assert raised - {405} == declared  # 405: a method that is not declared


def test_a_timeout_is_declared_as_it_is_sent() -> None:
    """408 is for a body that does not come, 504 for a request that takes too long."""
    document = openapi.document()
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert "body" in responses["408"]["description"]
    assert "timeout_s" in responses["504"]["description"]
    described = document["components"]["schemas"]["CompletionRequest"]["properties"]["timeout_s"]
    assert "504" in str(described)
    assert "408" not in str(described)


def test_the_router_imports_nothing_heavy() -> None:
    code = "import baton.router.main, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
