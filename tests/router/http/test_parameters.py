"""What a request's fields become on their way to the nodes."""

from __future__ import annotations

import pytest

from baton.metadata.wire import messages as m
from baton.router.http import openapi
from baton.router.http.routes import ROUTES

from ..conftest import System
from ..test_dispatcher import own

BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", [None, 0, 5, 15])
def test_both_nodes_get_the_drafts_that_the_request_asks_for(system: System, path: str, given: int | None) -> None:
    body = {"model": "fake", "max_tokens": 100, **BODIES[path]}
    for fields in ({"draft_steps": given}, {} if given is None else {"draft_steps": given}):
        assert system.router.request("POST", path, {**body, **fields})[0] == 200
    asked = [*own(system.cluster.by_name("p0"), m.Prefill), *own(system.cluster.by_name("d0"), m.Reserve)]
    assert [message.request.params.draft_steps for message in asked] == [given] * 4


def test_drafts_out_of_range_are_refused_with_their_bound(system: System) -> None:
    for path, fields in BODIES.items():
        status, body, _ = system.router.request("POST", path, {"model": "fake", **fields, "draft_steps": 16})
        assert (status, body["error"]["param"]) == (400, "draft_steps")
        assert body["error"]["message"] == "draft_steps: Expected `int` <= 15"


def test_the_openapi_document_tells_of_drafts() -> None:
    schemas = openapi.document(ROUTES)["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        field = schemas[name]["properties"]["draft_steps"]
        assert {"type": "integer", "minimum": 0, "maximum": 15} in field["anyOf"]
        assert "not speculated" in field["description"]
