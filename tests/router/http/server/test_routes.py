"""The route table: every route once, and the key that each request needs."""

from __future__ import annotations

import http.client
from collections.abc import Callable

import msgspec
import pytest

from baton.router.http.server.access import KeyLevel
from baton.router.http.server.routes import ROUTES

from ...conftest import RunningRouter, System


def test_every_route_is_declared_once() -> None:
    assert len({(route.method, route.template) for route in ROUTES}) == len(ROUTES)
    assert len({route.operation_id for route in ROUTES}) == len(ROUTES)


def test_routes_for_operators_lie_under_two_prefixes_and_no_other_route_does() -> None:
    """For paths without a route, app.needs_of decides by these prefixes."""
    for route in ROUTES:
        assert (route.needs is KeyLevel.ADMIN_KEY) == route.path.startswith(("/admin/", "/debug/")), route.path
    assert [route.path for route in ROUTES if route.needs is KeyLevel.NOTHING] == [
        "/health",
        "/ready",
        "/",
        "/page/{file:.+}",
    ]


def test_every_answer_is_of_its_declared_type(system: System) -> None:
    """The test calls each route without parameters in its path. test_openapi.py calls the others."""
    for route in ROUTES:
        if route.answer is None or "{" in route.path or route.body is not None:
            continue
        query = "?once=true" if route.chunk is not None else ""
        status, body, _ = system.router.request(route.method, route.path + query)
        assert status == 200, route.path
        msgspec.convert(body, route.answer)
        if isinstance(route.answer, type) and issubclass(route.answer, msgspec.Struct):
            assert body.keys() <= {*route.answer.__struct_fields__}, route.path


@pytest.mark.parametrize(
    ("method", "path", "without", "client", "admin"),
    [
        ("GET", "/health", 200, 200, 200),
        ("HEAD", "/health", 200, 200, 200),
        ("POST", "/health", 405, 405, 405),
        ("GET", "/health/more", 401, 404, 404),
        ("GET", "/nowhere", 401, 404, 404),
        ("HEAD", "/metrics", 401, 403, 200),
        ("DELETE", "/v1/models/x", 401, 405, 405),
        ("HEAD", "/debug/nodes", 401, 403, 200),
        ("POST", "/debug/nodes", 401, 403, 405),
        ("GET", "/debug/nowhere", 401, 403, 404),
        ("POST", "/admin/nodes/x/nothing", 401, 403, 404),
    ],
)
def test_unknown_paths_and_methods_need_the_key_of_their_neighbours(
    make_router: Callable[..., RunningRouter], method: str, path: str, without: int, client: int, admin: int
) -> None:
    router = make_router(api_key="client", admin_key="boss")
    for key, status in ((None, without), ("client", client), ("boss", admin)):
        connection = http.client.HTTPConnection(router.url.removeprefix("http://"))
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        assert response.status == status, (method, path, key)
        assert (response.getheader("Allow") is not None) == (status == 405)
        connection.close()
