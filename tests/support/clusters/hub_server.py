"""A small server that speaks the protocol of the Hugging Face hub, as far as huggingface_hub asks it.

`python tests/support/clusters/hub_server.py ORG/NAME=DIRECTORY ...` serves directories until Ctrl-C, to try by hand:
HF_ENDPOINT=http://127.0.0.1:PORT baton up --model ORG/NAME.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "hf_right"  # opens gated and private repositories
SMALL = 1 << 14  # bytes: larger files are in LFS, so that they are named by their SHA-256


@dataclass
class Repository:
    """A repository. `files` may change, and the commit of its branch with them; earlier commits stay if the test says
    so."""

    files: dict[str, bytes]
    earlier: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by commit
    is_gated: bool = False
    is_private: bool = False

    @property
    def commit(self) -> str:
        listed = "".join(f"{path} {_git(data)}\n" for path, data in sorted(self.files.items()))
        return hashlib.sha1(listed.encode()).hexdigest()


@dataclass
class HubServer:
    """The state of the server, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    agents: set[str] = field(default_factory=set)  # User-Agent
    break_after: int | None = None  # bytes of a large file after which the connection breaks
    bytes_per_s: float | None = None  # of a large file
    status: int | None = None  # answers everything with it

    def add(self, name: str, directory: Path, **more: bool) -> Repository:
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        repository = self.repositories[name] = Repository(files, **more)
        return repository

    def downloads(self, ending: str = "") -> list[str]:
        """Return the names of the files that were downloaded, at once or in parts."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and path.endswith(ending)]

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._watch])
        name = r"{name:[^/]+/[^/]+}"
        application.router.add_get(f"/api/models/{name}", self._info)
        application.router.add_get(f"/api/models/{name}/revision/{{revision}}", self._info)
        application.router.add_get(f"/api/models/{name}/tree/{{revision}}", self._tree)
        application.router.add_get(f"/{name}/resolve/{{revision}}/{{path:.+}}", self._file)  # and HEAD
        return application

    @web.middleware
    async def _watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append((request.method, request.path, request.headers.get("Range", "")))
        self.agents.add(request.headers.get("User-Agent", ""))
        return web.Response(status=self.status) if self.status is not None else await handler(request)

    def _repository(self, request: web.Request, *, opens_files: bool = False) -> Repository:
        repository = self.repositories.get(request.match_info["name"])
        token = request.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            raise web.HTTPUnauthorized(headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        if repository is None or (repository.is_private and token is None):
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "RepoNotFound"})
        if opens_files and repository.is_gated and token is None:
            raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo"})
        revision = request.match_info.get("revision", "main")
        if revision in repository.earlier:
            return Repository(repository.earlier[revision])
        if revision not in ("main", repository.commit):
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return repository

    async def _info(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        assert request.query.get("blobs") == "true", request.query
        siblings = [{"rfilename": path, **_entry(data)} for path, data in repository.files.items()]
        name = request.match_info["name"]
        return web.json_response({"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        files = self._repository(request).files
        entries = [{"type": "file", "path": path, **_entry(data), "oid": _git(data)} for path, data in files.items()]
        for entry in entries:
            if "lfs" in entry:
                entry["lfs"]["oid"] = entry["lfs"]["sha256"]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        repository = self._repository(request, opens_files=True)
        data = repository.files.get(request.match_info["path"])
        headers = {"X-Repo-Commit": repository.commit}
        if data is None:
            raise web.HTTPNotFound(headers=headers | {"X-Error-Code": "EntryNotFound"})
        begin = request.http_range.start or 0
        headers |= {"ETag": f'"{_etag(data)}"', "Content-Length": str(len(data) - begin), "Accept-Ranges": "bytes"}
        if len(data) > SMALL:
            headers |= {"X-Linked-Etag": f'"{_etag(data)}"', "X-Linked-Size": str(len(data))}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if request.method == "GET":
            await self._send(request, response, data, begin)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, data: bytes, begin: int) -> None:
        is_large = len(data) > SMALL
        limit = self.break_after if self.break_after is not None and is_large else len(data)
        step = max(1, int(self.bytes_per_s / 20)) if self.bytes_per_s and is_large else len(data)
        for start in range(begin, min(limit, len(data)), step):
            await response.write(data[start : min(start + step, limit)])
            if step < len(data):
                await asyncio.sleep(0.05)
        if limit < len(data) and request.transport is not None:
            request.transport.abort()


@cache
def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@cache
def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) > SMALL else _git(data)


def _entry(data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"size": len(data), "blobId": _git(data)}
    if len(data) > SMALL:
        entry["lfs"] = {"size": len(data), "sha256": _etag(data), "pointerSize": 134}
    return entry


@contextmanager
def running(server: HubServer, port: int = 0) -> Iterator[HubServer]:
    """Serve in a thread; `server.url` is then its address."""
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    hub = HubServer()
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if name == "rate":
            hub.bytes_per_s = float(value)
        else:
            hub.add(name, Path(value))
    with running(hub):
        print(hub.url, flush=True)
        threading.Event().wait()
