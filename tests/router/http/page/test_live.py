"""GET /live: who sees what, and what it costs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.router.http.page import feed
from baton.router.http.page.types import Snapshot

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD_S", 0.02)


class Viewer:
    """A client that reads one stream of snapshots."""

    def __init__(self, router: RunningRouter, headers: dict[str, str], *, buffer: int = 0) -> None:
        host, port = router.url.removeprefix("http://").rsplit(":", 1)
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.socket.sendall(f"GET /live HTTP/1.0\r\nHost: localhost\r\n{lines}\r\n".encode())
        self._file = self.socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = dict(self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        while line := self._file.readline().decode().strip():
            name, _, value = line.partition(":")
            yield name.lower(), value.strip()

    def next(self) -> Snapshot | None:
        """Return the next snapshot, None if the stream has ended."""
        for line in self._file:
            if line.startswith(b"data: "):
                return msgspec.json.decode(line[6:], type=Snapshot)
            assert line in (b"event: snapshot\n", b"\n") or line.startswith(b":"), line
        return None

    def body(self) -> Any:
        return json.loads(self._file.read())

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@pytest.fixture
def watch() -> Iterator[Callable[..., Viewer]]:
    viewers: list[Viewer] = []

    def open_one(router: RunningRouter, key: str | None = None, **settings: Any) -> Viewer:
        viewers.append(Viewer(router, {"Authorization": f"Bearer {key}"} if key else {}, **settings))
        return viewers[-1]

    yield open_one
    for viewer in viewers:
        viewer.close()


@contextmanager
def counted_reads(system: System) -> Iterator[list[str]]:
    """Yield the levels for which snapshots are read during the block. The time `at` of each is its number."""
    feed = system.router.router.api.feed
    read, levels = feed._read, list[str]()

    def read_one(sees: Any, **settings: Any) -> Snapshot:
        levels.append(sees)
        return msgspec.structs.replace(read(sees, **settings), at=float(len(levels)))

    feed._read = read_one
    yield levels
    feed._read = read


@pytest.mark.parametrize(
    ("host", "keys", "key", "status", "sees"),
    [
        ("127.0.0.1", {}, None, 200, "everything"),
        ("127.0.0.1", {"api_key": "a"}, None, 401, None),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, None, 401, None),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "a", 200, "counts"),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "b", 200, "everything"),
        ("127.0.0.1", {"admin_key": "b"}, None, 200, "counts"),
        ("0.0.0.0", {"api_key": "a"}, "a", 200, "counts"),
    ],
)
def test_a_key_sees_counts_and_who_operates_the_router_sees_everything(
    make_system: Callable[..., System],
    watch: Callable[..., Viewer],
    host: str,
    keys: dict[str, str],
    key: str | None,
    status: int,
    sees: str | None,
) -> None:
    system = make_system(router={"host": host, **keys})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    system.router.wait_ready()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    once = system.router.request("GET", "/live?once=true", headers=headers)
    viewer = watch(system.router, key)
    assert (viewer.status, once[0]) == (status, status)
    if sees is None:
        return
    for snapshot in (msgspec.convert(once[1], Snapshot), viewer.next()):
        assert snapshot is not None and snapshot.sees == sees
        assert snapshot.router.is_ready and snapshot.models == ["fake"]
        names = [node.id for node in snapshot.nodes]
        assert sorted(names) == (["d0", "p0"] if sees == "everything" else [])
        assert bool(snapshot.pairs) == (sees == "everything")


def test_a_wrong_value_of_once_is_refused_with_the_right_ones(make_router: Callable[..., RunningRouter]) -> None:
    status, body, _ = make_router().request("GET", "/live?once=yes")
    assert (status, body["error"]["param"]) == (400, "once")
    assert "'yes' is neither true nor false" in body["error"]["message"]


def test_nodes_are_asked_for_their_pages_only_for_those_who_want_them(system: System) -> None:
    def pages(query: str) -> list[bool]:
        status, body, _ = system.router.request("GET", f"/live?once=true{query}")
        assert status == 200
        return [node["pages"] is not None for node in body["nodes"]]

    assert pages("&pages=false") == [False, False]
    assert not system.cluster.by_name("d0").got(m.Inspect)
    assert pages("") == [True, True], "the snapshot without pages is not what others get"
    assert system.cluster.by_name("d0").got(m.Inspect)


def test_nothing_is_read_if_nobody_looks_and_once_for_all_who_look(
    system: System, watch: Callable[..., Viewer]
) -> None:
    feed = system.router.router.api.feed
    assert feed._timer is None
    with counted_reads(system) as levels:
        viewers = [watch(system.router) for _ in range(3)]
        shared = [viewers[2].next() for _ in range(5)][-1]
        assert shared is not None
        for viewer in viewers[:2]:
            assert any(snapshot == shared for snapshot in until(viewer, shared.at))
        for viewer in viewers:
            viewer.close()
        wait_until(lambda: feed._timer is None)
        num_read = len(levels)
        assert system.router.request("GET", "/live?once=true")[0] == 200
        assert len(levels) == num_read + 1
    assert system.cluster.by_name("d0").got(m.Inspect), "the operator sees pages by owner"


def until(viewer: Viewer, at: float) -> Iterator[Snapshot]:
    """Yield snapshots of the viewer up to the first that is not older than `at`."""
    while (snapshot := viewer.next()) is not None:
        yield snapshot
        if snapshot.at >= at:
            return


def test_a_client_that_does_not_read_gets_the_newest_snapshot_and_no_queue(
    make_system: Callable[..., System], watch: Callable[..., Viewer]
) -> None:
    system = make_system().up(4, 4)
    slow, quick = watch(system.router, buffer=8192), watch(system.router)
    system.behaviour.hold = threading.Event()
    threads = [threading.Thread(target=system.complete) for _ in range(40)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(system.router.router.dispatcher.requests) == 40)  # some 20 KB
    with counted_reads(system) as levels:
        wait_until(lambda: quick.next() and len(levels) >= 40)
        num_old = sum(1 for _ in until(slow, 40.0)) - 1
    system.behaviour.hold.set()
    for thread in threads:
        thread.join(20)
    assert num_old < 20, f"{num_old} of 40 snapshots were kept for it"


def test_few_may_look_at_once_and_the_rest_is_told_so(
    make_system: Callable[..., System], watch: Callable[..., Viewer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS_OF_ONE", 2)
    system = make_system(router={"api_key": "a", "admin_key": "b"})
    viewers = [watch(system.router, "a") for _ in range(3)]
    assert [viewer.status for viewer in viewers] == [200, 200, 429]
    words = viewers[2].body()["error"]["message"]
    assert "2 streams of /live are open for this caller" in words and "once=true" in words
    assert "retry-after" in viewers[2].headers
    assert watch(system.router, "b").status == 200, "operators are counted apart"
    assert system.router.request("GET", "/live?once=true", headers={"Authorization": "Bearer a"})[0] == 200
    viewers[0].close()
    wait_until(lambda: watch(system.router, "a").status == 200)
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    assert watch(system.router, "b").status == 200, "the streams of clients do not keep operators out"


def test_a_stream_ends_when_its_key_is_taken_away(
    make_router: Callable[..., RunningRouter], watch: Callable[..., Viewer], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-first-api-key\nthe-second-api-key\n")
    router = make_router(api_keys=str(keys))
    ended, stays = watch(router, "the-first-api-key"), watch(router, "the-second-api-key")
    assert ended.next() is not None and stays.next() is not None
    keys.write_text("the-second-api-key\n")
    assert any(ended.next() is None for _ in range(1000))
    snapshot = stays.next()
    assert snapshot is not None and snapshot.sees == "everything"


def test_streams_end_with_a_last_snapshot_when_the_router_drains(
    make_system: Callable[..., System], watch: Callable[..., Viewer]
) -> None:
    system = make_system().up()
    viewer = watch(system.router)
    assert viewer.next() is not None
    system.router.call(system.router.router.api.drain)
    read = list(iter(viewer.next, None))
    assert read[-1].router.is_draining and read[-1].router.reason == "the router is shutting down"
    late = watch(system.router)
    assert late.status == 503
    wait_until(lambda: system.router.router.api.feed._timer is None)
    status, body, _ = system.router.request("GET", "/live?once=true")
    assert (status, body["router"]["is_ready"]) == (200, False)


def test_streams_end_though_the_last_snapshot_cannot_be_read(
    make_system: Callable[..., System], watch: Callable[..., Viewer], caplog: pytest.LogCaptureFixture
) -> None:
    system = make_system().up()
    viewer = watch(system.router)
    assert viewer.next() is not None

    def drain() -> None:
        system.router.router.api.feed._read = lambda *_, **__: 1 / 0
        system.router.router.api.drain()

    system.router.call(drain)
    list(iter(viewer.next, None))
    assert "the last snapshot could not be sent" in caplog.text
    assert watch(system.router).status == 503


def test_a_probe_without_a_body_gets_no_stream(make_router: Callable[..., RunningRouter]) -> None:
    with urlopen(Request(f"{make_router().url}/live", method="HEAD"), timeout=20) as response:
        assert (response.status, response.read()) == (200, b"")
        assert response.headers["Content-Type"] == "application/json"


def test_markup_in_names_is_data(make_system: Callable[..., System]) -> None:
    """Names come from nodes and from clients. They are strings of JSON, which no browser reads as a page."""
    evil = "<img src=x onerror=alert(1)>\n\ndata: {}"
    system = make_system(model=evil)
    for role in ("prefill", "decode"):
        system.cluster.add(role, f"</script><b>{role}")
    system.router.wait_ready()
    status, body, headers = system.router.request("GET", "/live?once=true")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body["models"] == [evil] and body["nodes"][0]["model"] == evil
    viewer = Viewer(system.router, {})
    snapshot = viewer.next()
    viewer.close()
    assert viewer.headers["content-type"].startswith("text/event-stream")
    assert snapshot is not None and sorted(node.id for node in snapshot.nodes) == [
        "</script><b>decode",
        "</script><b>prefill",
    ]
