"""Web pages and host names that may use the router, over real sockets, as browsers and other programs send requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import openai
import pytest

from baton.metadata.wire import messages as m
from baton.router.http.server.access import KeyLevel
from baton.router.http.server.routes import ROUTES

from ...conftest import RunningRouter, System, check_is_declared
from ...dispatching.test_runner import own

EVIL = "https://evil.example"
GOOD = "https://chat.example"
PATHS = [
    (
        route,
        route.path.replace("{id}", "d0").replace("{id:.+}", "x").replace("{model:.+}", "fake").replace("{rid}", "x"),
    )
    for route in ROUTES
]
GUARDED = [(route.method, path) for route, path in PATHS if route.needs is not KeyLevel.NOTHING]
COMPLETION = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 100}).encode()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def words(self) -> str:
        return json.loads(self.body)["error"]["message"]


def send(
    router: RunningRouter,
    method: str,
    path: str,
    *headers: str,
    body: bytes = b"",
    host: str | None = "own",
    has_length: bool = True,
) -> Answer:
    """Send one request with exactly these headers and this body, and read the answer to the end of the connection.
    HTTP/1.1 needs a Host header."""
    address, port = router.url.removeprefix("http://").rsplit(":", 1)
    body = body if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.{0 if host is None else 1}", *headers, "Connection: close"]
    if host is not None:
        lines.append(f"Host: {f'127.0.0.1:{port}' if host == 'own' else host}")
    if method == "POST" and has_length:
        lines.append(f"Content-Length: {len(body)}")
    with socket.create_connection((address, int(port)), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode(errors="surrogateescape") + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    return Answer(
        int(status.split()[1]),
        {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)},
        rest,
    )


def is_draining(system: System) -> bool:
    nodes = system.router.request("GET", "/debug/nodes")[1]["nodes"]
    return any(node["is_draining"] for node in nodes)


def test_no_web_page_drains_a_node(system: System) -> None:
    """curl -X POST http://127.0.0.1:8000/admin/nodes/decode-0/drain -H 'Origin: https://evil.example' ..."""
    answer = send(system.router, "POST", "/admin/nodes/d0/drain", f"Origin: {EVIL}", "Content-Type: text/plain")
    assert answer.status == 403
    assert "https://evil.example" in answer.words
    assert "--allow-origin https://evil.example" in answer.words
    assert "access-control-allow-origin" not in answer.headers
    assert not is_draining(system)
    assert system.complete()[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nothing_is_computed_for_a_foreign_page(system: System, path: str) -> None:
    answer = send(system.router, "POST", path, f"Origin: {EVIL}", "Content-Type: text/plain", body=COMPLETION)
    assert answer.status == 403
    assert send(system.router, "POST", path, "Content-Type: text/plain", body=COMPLETION).status == 415
    assert own(system.cluster.by_name("p0"), m.Prefill) == []


FOREIGN = [
    ("Origin: https://evil.example",),
    ("Origin: null",),
    ("Origin: http://127.0.0.1:1",),  # another port is another origin
    ("Origin: http://localhost",),
    ("Origin: http://127.0.0.1.evil.example",),
    ("Origin: not an origin",),
    ("Origin:",),
    ("Origin: https://evil.example", "Origin: http://127.0.0.1"),
    ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site"),
    ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"),
    ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: script"),
    ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"),
    ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"),
]


@pytest.mark.parametrize("headers", FOREIGN, ids=" ".join)
def test_every_route_is_closed_to_foreign_pages(system: System, headers: tuple[str, ...]) -> None:
    """The test walks the table of routes, so a new route is tested as well."""
    for method, path in GUARDED:
        answer = send(system.router, method, path, *headers, body=COMPLETION)
        assert answer.status == 403, (method, path, answer)
        check_is_declared(method, path, answer.status)
        assert "--allow-origin" in answer.words
        assert "access-control-allow-origin" not in answer.headers
    assert send(system.router, "GET", "/health", *headers).status == 200
    assert not is_draining(system)


def test_a_websocket_of_a_foreign_page_is_refused(system: System) -> None:
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    assert send(system.router, "GET", "/v1/models", f"Origin: {EVIL}", *upgrade).status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1"]
)
def test_every_route_is_closed_to_foreign_hosts(system: System, host: str) -> None:
    """If a page's own name resolves to 127.0.0.1, it has the router's origin, and its GET carries no Origin header."""
    for method, path in GUARDED:
        for headers in ((), (f"Origin: http://{host}",), ("Sec-Fetch-Site: same-origin",)):
            answer = send(system.router, method, path, *headers, body=COMPLETION, host=host)
            assert answer.status == 403, (method, path, answer)
            assert f"--allow-host {host.partition(':')[0]}" in answer.words
    assert send(system.router, "GET", "/health", host=host).status == 200
    assert not is_draining(system)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1", "127.1.2.3:1", "[::1]:8000", "localhost.", None]
)
def test_names_of_loopback_are_the_routers_own(system: System, host: str | None) -> None:
    headers = ("Content-Type: application/json",)
    assert send(system.router, "POST", "/v1/completions", *headers, body=COMPLETION, host=host).status == 200


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "baton.example", 403),
        ({"allow_host": ("baton.example",)}, "baton.example", 200),
        ({"allow_host": ("baton.example",)}, "Baton.Example:8443", 200),
        ({"allow_host": ("baton.example",)}, "a.baton.example", 403),
        ({"allow_host": ("*",)}, "anything.example", 200),
        ({"host": "localhost"}, "evil.example", 403),
        ({"api_key": "sesame"}, "baton.example", 401),  # who has the key is no page
        ({"admin_key": "boss"}, "baton.example", 403),  # an admin key protects no completion
        ({"host": "0.0.0.0"}, "baton.example", 200),
    ],
)
def test_unknown_host_names_are_refused_only_on_loopback_without_keys(
    make_router: Callable[..., RunningRouter], settings: dict[str, Any], host: str, status: int
) -> None:
    router = make_router(**settings)
    for path in ("/v1/models", "/live?once=true"):
        assert send(router, "GET", path, host=host).status == status
    assert send(router, "GET", "/health", host=host).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Origin: {own}",),
        ("Origin: {own}", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"),
        ("Origin: https://behind.a.proxy", "Sec-Fetch-Site: same-origin"),
        ("Origin: null", "Sec-Fetch-Site: same-origin"),  # a page that sends no referrer
        ("Sec-Fetch-Site: same-origin",),
    ],
)
def test_the_routers_own_pages_are_served(system: System, headers: tuple[str, ...]) -> None:
    given = [header.format(own=system.router.url) for header in headers]
    answer = send(system.router, "POST", "/v1/completions", *given, "Content-Type: application/json", body=COMPLETION)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("site", ["none", "cross-site", "same-site", "same-origin"])
def test_page_navigations_are_served(system: System, site: str) -> None:
    navigation = (f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    for path in ("/v1/models", "/metrics", "/openapi.json", "/debug/requests"):
        assert send(system.router, "GET", path, *navigation).status == 200


# --- pages that are allowed --------------------------------------------------------------------------------------


@pytest.fixture
def allowing(make_system: Callable[..., System]) -> System:
    return make_system(router={"allow_origin": (GOOD, "http://localhost:3000")}).up()


def preflight(router: RunningRouter, method: str, path: str, origin: str, *headers: str) -> Answer:
    asked = (
        "Access-Control-Request-Method: " + method,
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-os",
    )
    return send(router, "OPTIONS", path, f"Origin: {origin}", *asked, *headers)


@pytest.mark.parametrize("settings", [{}, {"api_key": "sesame"}])
def test_a_preflight_of_an_allowed_page_is_answered(
    make_router: Callable[..., RunningRouter], settings: dict[str, Any]
) -> None:
    """A preflight carries no key, and every route answers it."""
    router = make_router(allow_origin=(GOOD,), **settings)
    for route, path in PATHS:
        method = route.method
        answer = preflight(router, method, path, "https://chat.example:443")
        assert (answer.status, answer.body) == (204, b""), (method, path, answer)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example:443"
        assert method in answer.headers["access-control-allow-methods"].split(", ")
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
        assert int(answer.headers["access-control-max-age"]) > 0
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
        assert "access-control-allow-private-network" not in answer.headers
        if route.needs is not KeyLevel.NOTHING:
            refused = preflight(router, method, path, EVIL)
            assert refused.status == 403
            assert not [name for name in refused.headers if name.startswith("access-control")]
    asked = "Access-Control-Request-Private-Network: true"
    assert preflight(router, "POST", "/tokenize", GOOD, asked).headers["access-control-allow-private-network"] == "true"
    assert preflight(router, "POST", "/nowhere", GOOD).status == 404


def test_an_allowed_page_reads_every_answer(allowing: System) -> None:
    asked = (f"Origin: {GOOD}", "Sec-Fetch-Site: cross-site", "Content-Type: application/json", "x-request-id: mine")
    streamed = COMPLETION[:-1] + b', "stream": true}'
    for path, body, status in (
        ("/v1/completions", COMPLETION, 200),
        ("/v1/completions", streamed, 200),
        ("/v1/completions", b"{", 400),
        ("/nowhere", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ):
        answer = send(allowing.router, "POST", path, *asked, body=body)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == GOOD
        assert {"x-request-id", "retry-after"} <= set(
            answer.headers["access-control-expose-headers"].lower().split(", ")
        )
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.headers["x-request-id"] == "mine"
    refused = send(
        allowing.router, "POST", "/v1/completions", f"Origin: {GOOD}", "Content-Type: text/plain", body=b"{}"
    )
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (415, GOOD)
    other = send(allowing.router, "GET", "/v1/models")
    assert (other.status, other.headers["vary"]) == (200, "Origin")
    assert "access-control-allow-origin" not in other.headers
    assert send(allowing.router, "GET", "/v1/models", f"Origin: {EVIL}").status == 403
    assert send(allowing.router, "GET", "/v1/models", "Origin: http://localhost:3000").status == 200
    assert send(allowing.router, "GET", "/v1/models", "Origin: http://localhost:3001").status == 403


def test_an_allowed_page_still_needs_the_key(make_router: Callable[..., RunningRouter]) -> None:
    router = make_router(allow_origin=(GOOD,), api_key="sesame")
    answer = send(router, "GET", "/v1/models", f"Origin: {GOOD}")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, GOOD)
    assert send(router, "GET", "/v1/models", f"Origin: {GOOD}", "Authorization: Bearer sesame").status == 200


def test_all_origins_may_be_allowed(make_router: Callable[..., RunningRouter]) -> None:
    router = make_router(allow_origin=("*",))
    for origin in (EVIL, "null", "chrome-extension://abc"):
        answer = send(router, "GET", "/v1/models", f"Origin: {origin}")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
        assert preflight(router, "POST", "/v1/completions", origin).status == 204
    assert send(router, "GET", "/v1/models", *FOREIGN[-1]).status == 200


def test_options_requests_list_the_allowed_methods(system: System) -> None:
    answer = send(system.router, "OPTIONS", "/v1/completions")
    assert (answer.status, answer.headers["allow"], answer.body) == (204, "OPTIONS, POST", b"")
    assert send(system.router, "OPTIONS", "/v1/models").headers["allow"] == "GET, HEAD, OPTIONS"
    assert send(system.router, "OPTIONS", "/nowhere").status == 404


# --- content types -----------------------------------------------------------------------------------------------

POSTS = [path for route, path in PATHS if route.method == "POST"]


NO_JSON = [
    *(
        "text/plain",
        "text/plain;charset=UTF-8",
        "text/plain; application/json",
        "text/json",
        "application/xml",
        "nonsense",
    ),
    *(
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/jsonx",
        "application/json; charset=utf-16",
    ),
]
SERVED = [
    *(
        "",
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
    ),
    *("application/problem+json", "application/x-www-form-urlencoded"),
]


@pytest.mark.parametrize("kind", NO_JSON)
def test_every_route_refuses_bodies_that_are_not_json(system: System, kind: str) -> None:
    for path in POSTS:
        answer = send(system.router, "POST", path, f"Content-Type: {kind}")
        assert answer.status == 415, (path, answer)
        check_is_declared("POST", path, answer.status)
        assert "JSON" in answer.words
    assert not is_draining(system)


@pytest.mark.parametrize("kind", [None, *SERVED])
def test_content_types_of_other_programs_are_served(system: System, kind: str | None) -> None:
    headers = () if kind is None else (f"Content-Type: {kind}",)
    assert send(system.router, "POST", "/v1/completions", *headers, body=COMPLETION).status == 200
    assert send(system.router, "POST", "/admin/flush", *headers).status == 200


@pytest.mark.parametrize("header", ["Origin: {own}", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: navigate"])
def test_forms_are_not_served(system: System, header: str) -> None:
    """Browsers send forms with this content type, and `curl -d` sends JSON with it."""
    given = header.format(own=system.router.url)
    for path in POSTS:
        answer = send(system.router, "POST", path, given, "Content-Type: application/x-www-form-urlencoded")
        assert answer.status == 415, path


# --- other clients are served as before --------------------------------------------------------------------------


def test_the_official_client_and_probes_are_served(make_system: Callable[..., System]) -> None:
    system = make_system(router={"host": "0.0.0.0", "api_key": "sesame", "admin_key": "boss"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    port = system.router.url.rsplit(":", 1)[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=5) as client:
        answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}])
        assert answer.choices[0].message.content == system.text
    for host in ("10.1.2.3:8000", "baton.svc.cluster.local", "kube-probe", None):
        assert send(system.router, "GET", "/health", host=host).status == 200
        key = "Authorization: Bearer boss"
        assert (
            send(system.router, "GET", "/metrics", key, "Accept: application/openmetrics-text", host=host).status == 200
        )
        assert send(system.router, "GET", "/ready", key, host=host).status == 200


def test_answers_do_not_name_software_versions(system: System) -> None:
    streamed = COMPLETION[:-1] + b', "stream": true}'
    answers = [
        send(system.router, "GET", "/health"),
        send(system.router, "GET", "/nowhere"),
        send(system.router, "PATCH", "/v1/completions"),
        send(system.router, "POST", "/v1/completions", body=COMPLETION),
        send(system.router, "POST", "/v1/completions", body=streamed),
        send(system.router, "POST", "/v1/completions", f"Origin: {EVIL}"),
        send(system.router, "GET", "/health", "Expect: nothing"),
        send(system.router, "GET", "/health", "Host: second"),  # refused before a route is found
        send(system.router, "GET", "/health", "broken header line"),
        send(system.router, "\x16\x03", "/"),
    ]
    assert [answer.headers["server"] for answer in answers] == ["baton"] * len(answers)
    assert [answer.status for answer in answers] == [200, 404, 405, 200, 200, 403, 200, 400, 400, 400]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Type: application/json; charset=\udcff", 415),
        ("Content-Type: text/\udcff", 415),
        ("Origin: https://\udcff", 403),
        ("Host: \udcff", 403),
    ],
)
def test_a_header_that_is_not_text_gets_the_usual_refusal(system: System, header: str, status: int) -> None:
    """The refusal names the value, whose bytes are not UTF-8. This once gave a 500 and a traceback in the log."""
    host = None if header.startswith("Host") else "own"
    answer = send(system.router, "POST", "/v1/completions", header, body=COMPLETION, host=host)
    assert answer.status == status and "udcff" in answer.words
