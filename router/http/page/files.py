"""GET / and GET /page/{file}: the page that shows the service live. Its files are static, lie beside this module, and
are the same for everybody. So they need no key; the page asks its user for one and reads GET /live with it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from ...errors import NotFound
from ..server.api import Api, json_response
from .types import RootAnswer

STATIC = Path(__file__).parent / "static"
ROOT = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing from another host, nothing inline, no markup made of strings, no frame around the page.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WORDS = "Browsers get Baton's page here. GET /v1 lists the routes for programs; GET /openapi.json describes them."


class _File(NamedTuple):
    body: bytes
    content_type: str
    etag: str


def _read_files(directory: Path) -> dict[str, _File]:
    """Return the files of the page by name. They are read once, when the router starts. A file of another kind, such
    as an editor's copy, is none of them."""
    files: dict[str, _File] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            files[path.relative_to(directory).as_posix()] = _File(body, _TYPES[path.suffix], etag)
    return files


_FILES = _read_files(STATIC)


async def root(_api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /: the page for clients whose Accept names HTML, as that of browsers does; a hint for all others."""
    if "text/html" in http_request.headers.get("Accept", ""):
        response = _answer(http_request, _FILES[ROOT])
    else:
        response = json_response(RootAnswer(_WORDS))
    response.headers["Vary"] = "Accept"
    return response


async def file(_api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /page/{file}. Raises NotFound."""
    name = http_request.match_info["file"]
    if name not in _FILES:
        raise NotFound(f"the page has no file {name!r}")
    return _answer(http_request, _FILES[name])


def _answer(http_request: web.Request, found: _File) -> web.Response:
    """Return a file, or 304 if the client has it."""
    headers = {**HEADERS, "ETag": found.etag}
    if found.etag in http_request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers={**headers, "Content-Type": found.content_type})
