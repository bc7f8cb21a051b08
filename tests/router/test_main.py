"""The router process: it starts and ends cleanly, reports taken ports, and serves streams over its transport."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from key_files import Listed
from service_manager import ServiceManager

from baton.metadata.errors import ConfigError
from baton.router.config import RouterConfig
from baton.router.main import run

from .conftest import RunningRouter, System
from .dispatching.test_runner import stream_events

START = (
    "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stderr);"
    "from baton.router.config import RouterConfig; from baton.router.main import run;"
    "sys.exit(run(RouterConfig(port=0, node_address='tcp://127.0.0.1:*')))"
)


@pytest.mark.timing
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_from_start_to_end(number: signal.Signals) -> None:
    begun = time.monotonic()
    with (
        subprocess.Popen([sys.executable, "-c", START], stderr=subprocess.PIPE, text=True) as process,
        ExitStack() as end,
    ):
        end.callback(process.kill)  # or what fails here would be waited for without end
        assert process.stderr is not None
        assert "files and connections" in process.stderr.readline()
        line = process.stderr.readline()
        assert "serving HTTP on http://127.0.0.1:" in line
        assert time.monotonic() - begun < 5, "well under a second on an idle machine"
        with open(f"/proc/{process.pid}/status") as status:  # noqa: PTH123
            rss = next(line for line in status if line.startswith("VmRSS")).split()[1]
        assert int(rss) < 150_000
        os.kill(process.pid, number)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_router_tells_its_service_manager_when_it_serves_what_is_wrong_and_that_it_stops(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    start = START.replace("RouterConfig(", f"RouterConfig(api_keys={str(keys)!r}, ")
    with ServiceManager() as manager, ExitStack() as end:
        environ = {**os.environ, "NOTIFY_SOCKET": manager.address}
        process = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.PIPE, text=True, env=environ)
        end.enter_context(process)
        end.callback(process.kill)
        assert "serves http://127.0.0.1:" in manager.hear("STATUS=")
        assert manager.said[0] == "READY=1"
        keys.write_text("a b c d e\n")
        process.send_signal(signal.SIGHUP)
        assert "line 1: it has 5 words" in manager.hear("keys, line"), "and the router lives"
        process.send_signal(signal.SIGTERM)
        manager.hear("STOPPING=1")
        assert process.wait(10) == 0
        assert process.stderr is not None
        log = process.stderr.read()
        assert "received SIGHUP: reading api_keys" in log and "the keys read before stay in force" in log
        assert (manager.said.count("READY=1"), manager.said.count("STOPPING=1")) == (1, 1)


@pytest.mark.parametrize("which", ["http", "nodes"])
def test_a_taken_port_is_refused(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = (
            RouterConfig(port=port, node_address="tcp://127.0.0.1:*")
            if which == "http"
            else RouterConfig(port=0, node_address=f"tcp://127.0.0.1:{port}")
        )
        with pytest.raises(ConfigError, match=f"{port}: .*another --(port|node-address)"):
            run(config)


def test_a_host_may_have_the_brackets_that_it_has_in_a_url() -> None:
    assert RouterConfig(host="[::1]").host == RouterConfig(host="::1").host == "::1"


@pytest.mark.parametrize(
    ("name", "value"), [("max_waiting", 0), ("port", 70000), ("api_key", ""), ("request_timeout_s", -1.0)]
)
def test_wrong_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        RouterConfig(**{name: value})  # type: ignore[arg-type]


def test_the_routers_key_is_called_so_in_the_allow_list(tmp_path: Path) -> None:
    listed = Listed(tmp_path / "list", "router", "p0")
    listed.pairs["p0"].write(tmp_path / "p0.key")
    with pytest.raises(ConfigError, match="calls this key 'p0'; a router's is called 'router' or router-NAME"):
        run(RouterConfig(port=0, keys=str(tmp_path / "p0.key"), allow_list=str(listed.path)))


def test_off_loopback_needs_keys() -> None:
    with pytest.raises(ConfigError, match="keys"):
        run(RouterConfig(port=0, node_address="tcp://0.0.0.0:5799"))


def test_http_1_0_gets_a_plain_stream(system: System) -> None:
    host, port = system.router.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as client:
        body = b'{"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": true}'
        client.sendall(
            b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        data = b""
        while more := client.recv(65536):
            data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_connection_is_used_again_after_a_stream(system: System) -> None:
    import http.client

    connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"), timeout=10)
    for _ in range(3):
        body = b'{"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": true}'
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert stream_events(system)[-1] == "[DONE]"


@pytest.mark.parametrize(("settings", "is_warned"), [({}, True), ({"api_key": "k"}, False), ({"host": "::1"}, False)])
def test_an_open_address_without_a_key_is_warned_of(
    make_router: Callable[..., RunningRouter],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    is_warned: bool,
) -> None:
    make_router(**{"host": "0.0.0.0", **settings})
    assert ("no --api-key is set" in caplog.text) == is_warned
