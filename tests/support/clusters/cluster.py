"""A cluster of real processes for integration tests, started by the command line as a user would.

    with Cluster(directory, model) as cluster:        # or the fixture start_cluster, see tests/integration/conftest.py
        cluster.start(prefill=1, decode=2, node_flags=["--num-pages", "64"])
        cluster.post("/v1/completions", {...})

At the end of the block the cluster checks the books (no request, no ticket, no referenced cache page; after a flush
every page is free). It then stops all processes with SIGTERM, and checks that they exit with 0 in time and leave
nothing behind.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forked import Forked
from patience import Patience, load_factor, wait_until

READY_S = 60.0
IDLE_S = 30.0  # how long the books may take to balance after the last answer
EXIT_S = 20.0
MENDED_SINCE = "cannot be parked"  # an earlier release calls a repeated claim malformed; it serves on
# What a node sent to a newer router may be read by the older one that takes its place, which drops it as malformed.
TOO_NEW = "Expected `array` of at most length", "Invalid value 'cached_pages'"
LEAVE_S = 2.0  # how long processes that a process started may outlive it
TAIL_LINES = 40
RANKS = {"--tp", "--dp-attention"}  # another release starts such ranks in new interpreters


PORTS = range(10_000, 32_000)  # below the ephemeral ports, which the kernel gives to clients
_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens and that this process has not returned before."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


@dataclass(slots=True)
class Process:
    """One started process and its log."""

    name: str
    popen: subprocess.Popen[bytes] | Forked
    log_path: Path
    is_expected_to_run: bool = True

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of a node's ranks 1 and above."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if not any("resource_tracker" in word for word in child.cmdline())]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = EXIT_S) -> int:
        """Wait for the exit and return its status. Raises TimeoutExpired, later on a busy machine (patience.py). The
        cluster no longer expects the process to run."""
        self.is_expected_to_run = False
        patience = Patience(timeout_s)
        while True:
            try:
                return self.popen.wait(min(1.0, timeout_s))
            except subprocess.TimeoutExpired:
                if patience.is_over():
                    raise

    def kill(self) -> None:
        """Send SIGKILL, as a fault."""
        self.popen.kill()
        self.wait()


class Cluster:
    """A router and nodes of one model on loopback."""

    ready_s = READY_S
    complaints = ("Traceback", "dropped a frame")  # no log may contain these: all messages are well-formed
    exit_s = EXIT_S  # the longest that a process may take to exit
    gpu_share = 0.9  # of a GPU's memory, for all nodes together; less if the test's own process uses the GPU, too
    node_share = 0.2  # of that memory, for each node that is started alone; `start` divides `gpu_share` instead

    def __init__(self, directory: Path, model: Path | None, *, is_forked: bool = False) -> None:
        """`is_forked`: processes are forked from a warm one (support/clusters/forked.py), which is much faster."""
        self.is_forked = is_forked
        self.directory = directory
        self.model = model
        self.processes: dict[str, Process] = {}
        self.http_port, self.node_port = free_port(), free_port()
        self.api_key: str | None = None
        self.also_join: tuple[str, ...] = ()  # further routers that nodes join
        self.releases: dict[str, Path] = {}  # by process name: the directory of another release's `baton`

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def node_address(self) -> str:
        return f"tcp://127.0.0.1:{self.node_port}"

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}

    # --- starting and stopping ---

    def start(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        router_flags: list[str] | None = None,
        node_flags: list[str] | None = None,
        wait: bool = True,
    ) -> Cluster:
        """Start a router and nodes. Wait until all have joined and a request has succeeded."""
        self.start_router(*(router_flags or []))
        self.node_share = self.gpu_share / (prefill + decode)
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                self.start_node(role, f"{role}-{index}", *(node_flags or []))
        if wait:
            self.wait_ready(num_nodes=prefill + decode)
        return self

    def start_router(self, *flags: str) -> Process:
        address = ["--port", str(self.http_port), "--node-address", self.node_address]
        return self.start_process("router", "router", *address, *flags)

    def start_node(self, role: str, name: str, *flags: str, model: Path | None = None) -> Process:
        """Start a node. `role` is prefill or decode. It has one CPU thread, short chunks, because it measures their
        times at its start, and `node_share` of a GPU, unless `flags` say otherwise."""
        model = model or self.model
        chosen = ["--model", str(model)] if model else []
        routers = ",".join((self.node_address, *self.also_join))
        meeting = ["--router", routers, "--node-id", name, "--threads", "1", "--chunk-tokens", "128"]
        share = (
            [] if name in self.releases else ["--memory-share", f"{self.node_share:.3f}"]
        )  # older releases have none
        return self.start_process(name, role, *meeting, *share, *chosen, *flags)

    def start_process(self, name: str, *argv: str) -> Process:
        """Start `baton *argv` in its own process group, with its own log file."""
        log_path = self.directory / f"{name}-{len(list(self.directory.glob(f'{name}-*.log')))}.log"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.environ(name)}
        if name in self.releases:
            environ["PYTHONPATH"] = str(self.releases[name])
        log_path.touch()
        if self.is_forked and (name not in self.releases or RANKS.isdisjoint(argv)):
            popen = Forked(argv, log_path, environ, self.releases.get(name))
        else:
            popen = _start(argv, log_path, environ)
        self.processes[name] = Process(name, popen, log_path)
        return self.processes[name]

    def environ(self, name: str) -> dict[str, str]:
        """Return what is added to a process's environment."""
        return {}

    def wait_ready(self, num_nodes: int = 0, timeout_s: float | None = None) -> None:
        """Wait until /ready answers 200 and `num_nodes` have joined. Fail at once if a process has died."""

        def is_ready() -> bool:
            for process in self.processes.values():
                died = process.is_expected_to_run and process.popen.poll() is not None
                assert not died, f"{process.name} exited with {process.popen.poll()}\n{process.log}"
            try:
                return self.get("/ready")[0] == 200 and len(self.nodes()) >= num_nodes
            except OSError:
                return False

        wait_until(is_ready, "the cluster is ready", self.ready_s if timeout_s is None else timeout_s, pause_s=0.05)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.kill_all()

    def close(self) -> None:
        """Check the books, stop all processes, and check their exits and logs."""
        try:
            self.check_books()
            self.stop()
            self.check_logs()
        finally:
            self.kill_all()

    def check_logs(self) -> None:
        """Check that no log has a traceback or a message that was dropped as malformed."""
        for path in self.directory.glob("*.log"):
            log = path.read_text(encoding="utf-8", errors="replace")
            if path.stem.rpartition("-")[0] in self.releases:
                known = (MENDED_SINCE, *TOO_NEW)
                log = "\n".join(line for line in log.splitlines() if not any(each in line for each in known))
            for words in self.complaints:
                assert words not in log, f"{path.name}\n{log[max(0, log.index(words) - 500) :][:4000]}"

    def stop(self) -> None:
        """Send SIGTERM to nodes, then to routers. Check that all exit with 0 in time and leave no child process."""
        running = [process for process in self.processes.values() if process.popen.poll() is None]
        family = [child for process in running for child in psutil.Process(process.pid).children(recursive=True)]
        for process in self.processes.values():
            dead = process.is_expected_to_run and process.popen.poll() is not None
            assert not dead, f"{process.name} had exited with {process.popen.poll()} before it was asked to"
        for process in sorted(running, key=lambda process: process.name.startswith("router")):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.exit_s
        for process in running:
            status = process.wait(max(0.1, deadline - time.monotonic()))
            assert status == 0, f"{process.name} exited with {status} after SIGTERM"
        left = psutil.wait_procs(family, LEAVE_S)[1]
        assert not left, f"left behind: {left}"

    def kill_all(self) -> None:
        """Kill all running processes, without checks."""
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.kill()

    def tails(self) -> str:
        """Return the last lines of all logs."""
        parts = []
        for path in sorted(self.directory.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            parts += [f"--- {path.name}", *lines]
        return "\n".join(parts)

    # --- talking to it ---

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to the router that is opened with its first request."""
        return http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float = 60.0,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return (status, body). JSON is decoded; anything else is text. A `body` of bytes is sent unchanged."""
        connection = self.connection(timeout_s * load_factor())
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **key, **(headers or {})})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text.decode("utf-8", "replace")

    def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        return self.request("POST", path, body, **more)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Return the answer of /v1/completions, whose status must be 200."""
        status, answer = self.post("/v1/completions", {"model": self.model_name, "prompt": prompt, **fields})
        assert status == 200, answer
        return answer

    @property
    def model_name(self) -> str:
        return self.get("/v1/models")[1]["data"][0]["id"]

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that /debug/nodes lists."""
        status, answer = self.get("/debug/nodes")
        assert status == 200, answer
        return answer["nodes"]

    # --- the books ---

    def num_generated(self) -> int:
        """Return how many tokens all nodes have generated since they started."""
        return sum(books["stats"]["generated_tokens"] for books in self.ledger()["nodes"].values() if books)

    def ledger(self, *, flush: bool = False) -> dict[str, Any]:
        """Return every node's books. `flush` empties the prefix caches first."""
        status, answer = self.post("/admin/flush") if flush else self.get("/debug/ledger")
        assert status == 200, answer
        return answer

    def check_books(self, timeout_s: float = IDLE_S) -> None:
        """Check that nothing is held anywhere, and that after a flush every page is free (or padding)."""
        router = self.processes.get("router")
        if router is None or router.popen.poll() is not None:
            return
        wait_until(lambda: not held(self.ledger()), lambda: f"idle books: {held(self.ledger())}", timeout_s)
        wait_until(
            lambda: not _not_free(self.ledger(flush=True)),
            lambda: f"empty pools after a flush: {_not_free(self.ledger())}",
            timeout_s,
        )
        for name, books in self.ledger(flush=True)["nodes"].items():
            size = next(node["capacity"]["num_pages"] for node in self.nodes() if node["node_id"] == name)
            assert books["pool"]["free"] == size, f"{name}: {books['pool']} of {size}"


def _start(argv: Sequence[str], log_path: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.deploy.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            process_group=0,
        )


def held(ledger: dict[str, Any]) -> list[str]:
    """Return, in words, everything that is held although the cluster should be idle."""
    held = [f"router: {what} {value}" for what, value in ledger["router"].items() if value and what != "epoch"]
    for name, books in ledger["nodes"].items():
        if books is None:
            held.append(f"{name} did not answer")
            continue
        held += [f"{name}: {what} {books[what]}" for what in ("requests", "tickets") if books[what]]
        owners = ("request", "ticket", "cache_referenced")
        held += [f"{name}: {books['pool'][owner]} pages of {owner}" for owner in owners if books["pool"][owner]]
        tier = books.get("host_tier") or {}  # earlier releases have none
        kinds = (tier.get("pages"), tier.get("tail_pages"))
        held += [f"{name}: files are read into {each['reading']} slots" for each in kinds if each and each["reading"]]
    return held


def _not_free(ledger: dict[str, Any]) -> list[str]:
    """Return, in words, the pools with pages that are not free, and the tiers that hold something."""
    owners = ("request", "ticket", "cache")
    return [
        f"{name}: {books and (books['pool'], books.get('host_tier'))}"
        for name, books in ledger["nodes"].items()
        if books is None or any(books["pool"][owner] for owner in owners) or _holds_any(books.get("host_tier"))
    ]


def _holds_any(tier: dict[str, Any] | None) -> bool:
    """Return whether a node's host tier, or its files, hold anything."""
    slots = [] if tier is None else [tier["pages"], tier["tail_pages"] or {}]
    disk = (tier or {}).get("disk") or {}
    return any(each.get(owner) for each in slots for owner in ("cache", "reading")) or any(disk.values())
