"""What client programs send is answered, whole and streamed, in the shapes that the official types allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..conftest import System
from .chats import TEMPLATE, call, say
from .client_bodies import BODIES, MESSAGES, RESPONSES
from .test_official_types import CASES, checked, events_of


@pytest.mark.parametrize("calls", [False, True])
def test_the_requests_of_clients_are_answered(make_system: Callable[..., System], *, calls: bool) -> None:
    system = make_system(template=TEMPLATE, context_len=4096).up()
    if calls:
        say(system, "Look: " + call("get_weather", {"city": "Paris"}))
    types = {path: kinds for path, _, *kinds in CASES.values()}
    for name, (path, fields) in BODIES.items():
        limit = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
        body = {"model": "fake", **fields, **({} if "n_predict" in fields else {limit: 50})}
        whole, event = types[path]
        status, answer, _ = system.router.request("POST", path, body)
        assert status == 200, (name, answer)
        checked(answer, whole)
        status, raw, _ = system.router.request("POST", path, {**body, "stream": True})
        assert status == 200, (name, raw)
        for each in events_of(raw):
            if each.get("type") != "ping":
                checked(each, event)
    system.router.wait_idle()
