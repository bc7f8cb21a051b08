"""The files of the page: who gets them, and the headers under which a browser runs them."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.router.http.page.files import STATIC, _read_files

from ...conftest import RunningRouter

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Sec-Fetch-Site": "none"}
FILES = sorted(path.relative_to(STATIC).as_posix() for path in Path(STATIC).rglob("*") if path.is_file())
POLICY = {
    "default-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "object-src 'none'",
    "require-trusted-types-for 'script'",
}


@pytest.mark.parametrize("keys", [{}, {"api_key": "a"}, {"api_key": "a", "admin_key": "b"}])
def test_everybody_gets_the_page_and_a_browser_keeps_it_apart_from_all_others(
    make_router: Callable[..., RunningRouter], keys: dict[str, str]
) -> None:
    router = make_router(**keys)
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        status, body, headers = router.request("GET", path, headers=BROWSER)
        assert status == 200 and body, path
        policy = {rule.strip() for rule in headers["content-security-policy"].split(";")}
        assert policy >= POLICY, path
        assert not any("unsafe" in rule or "http" in rule or "data:" in rule or "*" in rule for rule in policy), path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cache-control"] == "no-cache"
        assert not headers["content-type"].startswith("application/octet-stream"), path
    assert router.request("GET", "/", headers=BROWSER)[2]["content-type"] == "text/html; charset=utf-8"


def test_a_browser_that_has_a_file_is_not_sent_it_again(make_router: Callable[..., RunningRouter]) -> None:
    router = make_router()
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"))

    def ask(method: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, "/page/index.html", headers={"Accept": "text/html", **headers})
        response = connection.getresponse()
        return response, response.read()

    first, body = ask("GET")
    head, nothing = ask("HEAD")
    assert (head.status, nothing, head.getheader("Content-Length")) == (200, b"", str(len(body)))
    etag = first.getheader("ETag") or ""
    assert etag.startswith('"')
    again, nothing = ask("GET", **{"If-None-Match": etag})
    assert (again.status, nothing) == (304, b"")
    assert again.getheader("Content-Security-Policy") == first.getheader("Content-Security-Policy")
    assert ask("GET", **{"If-None-Match": '"another"'})[0].status == 200
    connection.close()


def test_programs_that_do_not_ask_for_html_read_where_the_routes_are(make_router: Callable[..., RunningRouter]) -> None:
    router = make_router(api_key="a")
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        status, body, headers = router.request("GET", "/", headers=accept)
        assert (status, headers["vary"]) == (200, "Accept")
        assert "GET /v1 lists the routes" in body["words"]
    assert router.request("POST", "/", {}, headers={"Authorization": "Bearer a"})[0] == 405


@pytest.mark.parametrize("name", ["nothing.js", "../files.py", "..%2ffiles.py", "%2e%2e/files.py", "/etc/passwd", ".."])
def test_nothing_but_the_files_of_the_page_is_served(make_router: Callable[..., RunningRouter], name: str) -> None:
    status, _, _ = make_router().request("GET", f"/page/{name}")
    assert status == 404


def test_a_stray_file_beside_those_of_the_page_is_none_of_them(tmp_path: Path) -> None:
    for name in ("page.js", ".page.js.swp", "page.js~", "README"):
        (tmp_path / name).write_text("words")
    assert list(_read_files(tmp_path)) == ["page.js"]


def test_foreign_pages_get_no_data_through_the_page(make_router: Callable[..., RunningRouter]) -> None:
    """The page itself is public. A page of another origin, or of a host that was rebound, reads no snapshot."""
    router = make_router()
    foreign = ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"})
    for headers in foreign:
        assert router.request("GET", "/", headers={**BROWSER, **headers})[0] == 200
        assert router.request("GET", "/live?once=true", headers=headers)[0] == 403
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Authorization": "Bearer x"}
    status, body, headers = router.request("GET", "/live?once=true", headers=own)
    assert (status, body["sees"]) == (200, "everything")
    assert "access-control-allow-origin" not in headers
