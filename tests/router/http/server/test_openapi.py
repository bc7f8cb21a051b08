"""The OpenAPI document agrees with the routes, types and errors that it is generated from, and with a running router.

schemathesis compares the answers with the document. That test is skipped if the command is not installed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.router.http.anthropic.types import MessagesRequest
from baton.router.http.bodies.fields import Ignored, NotServed, rules_of, sent_type
from baton.router.http.generation.types import ChatRequest, CompletionRequest
from baton.router.http.operators.explain import Filter
from baton.router.http.responses.types import ResponsesRequest
from baton.router.http.server import openapi
from baton.router.http.server.app import application
from baton.router.http.server.errors import all_statuses
from baton.router.http.server.routes import ROUTES

from ...conftest import System
from ...dispatching.test_runner import wait_until

DOCUMENT = openapi.document(ROUTES)


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_document_has_all_routes_and_fields(system: System) -> None:
    status, body, _ = system.router.request("GET", "/openapi.json")
    assert status == 200
    expected = openapi.document(ROUTES, has_api_keys=False, has_admin_key=False)
    assert body == msgspec.json.decode(msgspec.json.encode(expected))
    fields = body["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(fields) == set(sent_type(CompletionRequest).__struct_fields__)
    served = {resource.canonical for resource in application(system.router.router.api).router.resources()}
    assert set(body["paths"]) == served


def test_the_statuses_that_the_code_can_raise_are_declared() -> None:
    """The document declares exactly these statuses. conftest.py (check_is_declared) tests the routes one by one."""
    declared = {int(status) for _, operation in operations() for status in operation["responses"]}
    raised = {200, *all_statuses()}
    for path in Path(openapi.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "HttpRefusal":
                raised |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert raised - {405} == declared  # 405: a method that is not declared


def test_every_operation_is_whole() -> None:
    ids = [operation["operationId"] for _, operation in operations()]
    assert len(ids) == len(set(ids))
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    for name, operation in operations():
        assert operation["summary"], name
        assert set(operation["tags"]) <= tags, name
        assert operation["responses"]["200"]["content"], name
        for status, response in operation["responses"].items():
            assert status == "200" or "application/json" in response["content"], (name, status)
        path_names = set(re.findall(r"{(\w+)}", name))
        assert {each.get("name") for each in operation["parameters"] if each.get("in") == "path"} == path_names, name


def test_every_reference_points_to_something() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    for reference in set(re.findall(r'"\$ref":"#/([^"]+)"', text)):
        place: Any = DOCUMENT
        for key in reference.split("/"):
            place = place[key]


@pytest.mark.parametrize(
    ("has_api_keys", "has_admin_key", "client", "figures", "operator"),
    [
        (False, False, [], [], []),
        (True, False, ["api_key"], ["admin_key"], ["api_key"]),
        (False, True, [], ["admin_key"], ["admin_key"]),
        (True, True, ["api_key", "admin_key"], ["admin_key"], ["admin_key"]),
    ],
)
def test_the_document_declares_the_keys_that_the_router_needs(
    has_api_keys: bool, has_admin_key: bool, client: list[str], figures: list[str], operator: list[str]
) -> None:
    paths = openapi.document(ROUTES, has_api_keys=has_api_keys, has_admin_key=has_admin_key)["paths"]
    for path, method, expected in (
        ("/health", "get", []),
        ("/v1/completions", "post", client),
        ("/metrics", "get", figures),
        ("/admin/flush", "post", operator),
        ("/debug/nodes", "get", operator),
    ):
        assert [name for each in paths[path][method]["security"] for name in each] == expected, path


def test_the_events_of_streams_are_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for path, name in (("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatChunk")):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        event = content["text/event-stream"]["schema"]
        assert "[DONE]" in event["description"]
        chunk, error, done = event["properties"]["data"]["anyOf"]
        assert chunk["contentSchema"] == {"$ref": f"#/components/schemas/{name}"}
        assert error["contentSchema"] == {"$ref": "#/components/schemas/ErrorBody"}
        assert done["const"] == "[DONE]"
        assert "usage" in schemas[name]["properties"]


def test_every_field_of_the_table_is_described_and_those_that_are_refused_are_not_promised() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest):
        fields = schemas[kind.__name__]["properties"]
        for name, rule in rules_of(kind).items():
            if not isinstance(rule, Ignored | NotServed) or not name.isidentifier():
                continue
            field = fields[name]
            assert field["description"].startswith("Not served" if isinstance(rule, NotServed) else "Accepted, "), name
            if isinstance(rule, NotServed):
                assert field["deprecated"] and field["enum"] == list(rule.accepted), name
    assert schemas["CompletionRequest"]["properties"]["best_of"]["deprecated"]


def test_fields_whose_meaning_is_not_openais_are_described() -> None:
    names = ["cache_salt", "draft_steps", "logprobs", "priority", "seed", "timeout_s"]
    for kind, more in (("CompletionRequest", []), ("ChatRequest", ["thinking_token_budget", "top_logprobs"])):
        fields = DOCUMENT["components"]["schemas"][kind]["properties"]
        assert [name for name in [*names, *more] if not fields[name].get("description")] == []


def test_the_filters_of_requests_are_declared() -> None:
    parameters = DOCUMENT["paths"]["/debug/requests"]["get"]["parameters"]
    assert tuple(each["name"] for each in parameters if each.get("in") == "query") == Filter.__struct_fields__


def test_a_timeout_is_declared_as_it_is_sent() -> None:
    """408 means that the body did not come, 504 that the request took too long."""
    responses = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert "body" in responses["408"]["description"]
    assert "timeout_s" in responses["504"]["description"]
    described = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]["timeout_s"]
    assert "504" in str(described)
    assert "408" not in str(described)


COMMAND = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

MAX_EXAMPLES = int(os.environ.get("BATON_SCHEMATHESIS_EXAMPLES", "6"))  # per operation and phase


@pytest.mark.whole
@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed: pip install -e '.[test]'")
def test_schemathesis_finds_no_answer_that_the_document_does_not_declare(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    output = [300, 301, 302, 303, 1] * 128  # longer than the context, for requests that ignore the end of sequence
    system = make_system(router={"api_key": "client", "admin_key": "boss"}, script=lambda prompt, choice: output)
    system.behaviour.step_tokens = 64
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    key = {"Authorization": "Bearer boss"}
    wait_until(lambda: system.router.request("GET", "/ready", headers=key)[0] == 200)
    assert COMMAND is not None
    schema = tmp_path / "openapi.json"  # read from its URL, the document's own route would be left out
    schema.write_text(json.dumps(system.router.request("GET", "/openapi.json", headers=key)[1]))
    began = time.monotonic()
    here = Path(__file__).parents[1]
    run = subprocess.run(
        [
            *(COMMAND, "--config-file", str(here / "schemathesis.toml"), "run", str(schema)),
            *(
                "--url",
                system.router.url,
                "--header",
                "Authorization: Bearer boss",
                "--checks",
                "all",
                "--max-examples",
                str(MAX_EXAMPLES),
            ),
            *("--exclude-checks", "positive_data_acceptance"),  # schemathesis_checks.py has another one
            *("--generation-deterministic", "--continue-on-failure", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    print(f"\n{time.monotonic() - began:.1f} s; {re.findall('.* generated.*', run.stdout)}")
    assert re.search(rf"Tested: +{len(ROUTES)}\n", run.stdout), run.stdout
