"""The cluster of the chaos tests: faults can be injected into each process and into each connection."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import psutil
from cluster import LEAVE_S, Cluster, Process, free_port, held, wait_until
from drawn_places import Place
from faulty import Plan
from forked import FAULT_PLAN
from partition import Lines

from baton.metadata.bus.addresses import PAGE_PORTS
from baton.metadata.bus.curve import KeyPair

ROUTERS = ("router", "router-b")
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
RANKED = ("prefill-1", "decode-1")  # the nodes that may have several ranks
Sharing = Literal["tp", "dp-attention"]  # how the ranks of a node share a model, by the flag that says so
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
NODE_FLAGS = ["--model-name", "chaos", "--page-size", "8", "--chunk-tokens", "32", "--max-running", "5"]
POOLS = {"prefill": "96", "decode": "66"}  # pages of each pool; a context of 512 tokens takes 64
# host memory for about as many pages as a pool has, and files of five times as many
HOST_FLAGS, DISK_FLAGS = ["--host-cache-gb", "0.0005"], ["--disk-cache-gb", "0.0025"]
REQUEST_S = 90.0  # timeout of a request; one that takes this long was stuck
ROUTER_FLAGS = ["--request-timeout-s", f"{REQUEST_S:g}", "--canary-interval-s", "20", "--max-waiting", "40"]
ROUTER_FLAGS += ["--drain-timeout-s", "20"]
TOKEN_S = 0.02  # in which nodes with tiers think that they compute a token of a prompt
ORPHAN_S = 2.0  # once the router has ended a request, no ledger shows it after this time
START_S = 120.0
SETTLE_S = 40.0


def role_of(name: str) -> str:
    return name.rpartition("-")[0] or name


class Rig(Cluster):
    """Routers and `nodes`. A killed process stays dead until `mend`."""

    complaints = ("Traceback",)  # warnings are expected: frames are damaged on purpose
    exit_s = 60.0  # on a busy machine, the end of the interpreter alone takes seconds

    def __init__(
        self,
        directory: Path,
        model: Path,
        flags: list[str],
        *,
        nodes: Iterable[str] = NODES,
        seed: int = 0,
        place: Place = "remote",
        num_ranks: int = 1,
        sharing: Sharing = "tp",
        has_keys: bool = False,
        num_routers: int = 1,
        has_tiers: bool = False,
    ):
        """`num_ranks`: of each node in RANKED, which share its model by `sharing`. `place`: who computes the prompts of
        requests; `seed` also draws it for each, if it is mixed. With `has_keys` all processes have one key, and pages
        travel over lines of their own. With `has_tiers` nodes keep evicted pages in host memory and files, and borrow
        pages and read files whenever they can, as if computing took long."""
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, model, is_forked=True)
        self.has_keys, keys = has_keys, directory / "cluster.key"
        if has_keys:
            KeyPair.create(keys)
        of_keys = ["--keys", str(keys)] if has_keys else []
        self.flags = [*flags, *of_keys]
        self._num_ranks, self.sharing = num_ranks, sharing
        self._router_flags = [*ROUTER_FLAGS, *of_keys, "--local-prefill", "never" if place == "remote" else "always"]
        self._places = seed if place == "mixed" else None
        self.nodes_wanted = tuple(nodes)
        self.has_tiers, self.files = has_tiers, directory / "files"
        self.data_ports = {name: free_port() for name in nodes}
        self.plans: dict[str, Plan] = {}
        # each router as its clients see it; the rig itself is the first one's
        self.doors: dict[str, Cluster] = {ROUTERS[0]: self}
        for name in ROUTERS[1:num_routers]:
            self.doors[name] = self._new_door(name)
            self.doors[name].processes = self.processes
        self.paths = {name: directory / f"{name}.plan" for name in (*self.doors, *self.nodes_wanted)}
        self.num_strikes = 0
        self._faults_read: Counter[str] = Counter()
        self.crashes: list[str] = []
        self._welcomed: set[int] = set()  # process ids
        self.stopped: set[str] = set()
        self.struck: list[dict[str, Any]] = []  # strikes that happened
        self.lines: Any = self._open_lines(seed)
        for name in self.paths:
            self.new_plan(name)  # before any process connects
        self.auditor = Auditor(self)

    def begin(self) -> Rig:
        for router in self.doors:
            self._start_router(router)
        for name in self.nodes_wanted:
            self.start_wanted(name)
        self._wait_all_ready()
        # Canaries use every pair of nodes. Cutting a line without a connection would have no effect.
        wait_until(lambda: not self.idle_lines(), lambda: f"connections through {self.idle_lines()}", SETTLE_S)
        self.auditor.start()
        return self

    def _new_door(self, name: str) -> Cluster:
        """Return a further router as its clients see it."""
        return Cluster(self.directory, self.model, is_forked=True)

    def _open_lines(self, seed: int) -> Any:
        """Return the connections between the processes, which can be disturbed."""
        lines = Lines(seed)
        for name in self.nodes_wanted:
            for router, door in self.doors.items():
                lines.open((name, router), door.node_port)
            for ends, port in self._data_lines(name).items():
                lines.open(ends, port)
        return lines

    def _data_lines(self, name: str) -> dict[tuple[str, ...], int]:
        """Return the ports to which a node opens data links, by the ends of the line that leads there."""
        if name not in self.data_ports:  # it is a router
            return {}
        ports = {each: port for each, port in self.data_ports.items() if each != name}
        lines: dict[tuple[str, ...], int] = {(name, each): port for each, port in ports.items()}
        if self.has_keys:
            lines |= {(name, each, "pages"): port + PAGE_PORTS for each, port in ports.items()}
        for each in ports.keys() & RANKED:
            for rank in range(1, self._num_ranks):
                lines[name, each, f"rank {rank}"] = ports[each] + rank
        return lines

    def idle_lines(self) -> list[tuple[str, ...]]:
        """Return the lines that canaries use and that have never had a connection. Canaries test the ranks of a group
        as one node, so a line to one rank of a group is enough. A line of loans alone may stay idle."""
        num_ends = None if self.sharing == "tp" else 2
        used = {ends[:num_ends] for ends in self.lines if self.lines[ends].num_connections}
        of_loans = {ends for ends in self.lines if ends[1] in self.nodes_wanted and not _hands_over(*ends[:2])}
        return [ends for ends in self.lines if ends[:num_ends] not in used and ends not in of_loans]

    def start_wanted(self, name: str) -> None:
        flags = [*NODE_FLAGS, "--num-pages", POOLS[role_of(name)], *self.flags]
        if self.has_tiers:
            flags += self._tier_flags(name)
        flags += self._addresses(name)
        if name in RANKED:
            flags += [f"--{self.sharing}", str(self._num_ranks)]
        self.start_node(role_of(name), name, *flags)

    def _addresses(self, name: str) -> list[str]:
        """Return the flags of a process by which it meets the others."""
        if name in self.doors:
            door = self.doors[name]
            return ["--port", str(door.http_port), "--node-address", door.node_address]
        flags = ["--router", ",".join(f"tcp://127.0.0.1:{self.lines[name, each].port}" for each in self.doors)]
        return [*flags, "--bind-host", f"tcp://127.0.0.1:{self.data_ports[name]}"]

    def _redirected(self, name: str) -> dict[str, str]:
        """Return the addresses that a process connects to by another one, its line."""
        return {
            f"tcp://127.0.0.1:{port}": f"tcp://127.0.0.1:{self.lines[ends].port}"
            for ends, port in self._data_lines(name).items()
        }

    def _tier_flags(self, name: str) -> list[str]:
        shares_pages = name in RANKED and self._num_ranks > 1 and self.sharing == "tp"  # such ranks have no files yet
        return HOST_FLAGS if shares_pages else [*HOST_FLAGS, *DISK_FLAGS, "--disk-cache", str(self.files)]

    def environ(self, name: str) -> dict[str, str]:
        return {FAULT_PLAN: str(self.paths[name])}

    def is_running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.popen.poll() is None

    def has_gone(self, name: str) -> bool:
        """Return whether a process that was killed or told to stop has ended."""
        return not self.processes[name].is_expected_to_run and not self.is_running(name)

    def serving(self) -> dict[str, bool]:
        """Return by name whether a node has joined a router and was neither killed nor told to stop."""
        lives = {name: self.processes[name] for name in self.nodes_wanted}
        self._welcomed |= {life.pid for life in lives.values() if life.pid not in self._welcomed and _is_welcome(life)}
        return {
            name: life.pid in self._welcomed and life.is_expected_to_run and life.popen.poll() is None
            for name, life in lives.items()
        }

    def hit(self, name: str, number: int) -> None:
        """Send a signal to a process. `mend` continues a process stopped by SIGSTOP."""
        process = self.processes[name]
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.is_expected_to_run = False
        if number == signal.SIGSTOP:
            self.stopped.add(name)
        if number == signal.SIGCONT:
            self.stopped.discard(name)
        if process.popen.poll() is None:
            process.send_signal(number)

    def hit_rank(self, name: str, number: int) -> bool:
        """Send a signal to a rank of a node, which then ends. Return whether the node runs and has one."""
        process = self.processes[name]
        ranks = process.ranks if self.is_running(name) else []
        if ranks:
            process.is_expected_to_run = False
            ranks[0].send_signal(number)
        return bool(ranks)

    def plan(self, name: str, plan: Plan) -> None:
        """Set the faults of a process. The file is replaced in one step."""
        aside = self.paths[name].with_suffix(".new")
        aside.write_bytes(msgspec.json.encode(plan))
        aside.rename(self.paths[name])
        self.plans[name] = plan

    def new_plan(self, name: str, **changes: Any) -> None:
        """Set a plan that redirects the connections through the lines and draws the places of prompts, with `changes`
        applied."""
        clock_s = self.plans[name].clock_s if name in self.plans else 0.0
        token_s = TOKEN_S if self.has_tiers else None
        settings = {"connect": self._redirected(name), "clock_s": clock_s, "places": self._places, "token_s": token_s}
        self.plan(name, Plan(**{**settings, **changes}))

    def new_faults(self) -> list[dict[str, Any]]:
        """Return the faults recorded since the last call, each with the name of its process."""
        found: list[dict[str, Any]] = []
        for name, path in self.paths.items():
            record = path.with_suffix(".faults")
            lines = record.read_text().splitlines() if record.exists() else []
            found += [json.loads(line) | {"name": name} for line in lines[self._faults_read[name] :]]
            self._faults_read[name] = len(lines)
        return found

    def mend(self) -> None:
        """Remove all faults and restart what has ended. A process that ended by itself is recorded in `crashes`."""
        self.lines.clear()
        for name in self.paths:
            self.new_plan(name)
        for name in list(self.stopped):
            self.hit(name, signal.SIGCONT)
        struck = {fault["name"] for fault in self.struck if fault["kind"] == "SIGKILL"}
        for name in (*self.doors, *self.nodes_wanted):
            process = self.processes[name]
            if not process.is_expected_to_run:
                process.popen.wait(START_S)  # a draining process ends by itself
            if process.popen.poll() is None:
                continue
            if left := num_left(process.pid):
                self.crashes.append(f"{name} ended, and {left} of its processes did not: {_end_of(process)}")
            if process.is_expected_to_run and name not in struck:
                self.crashes.append(f"{name} exited with {process.popen.poll()}: {_end_of(process)}")
            if name in self.doors:
                self.revive_router(name)
            else:
                self.start_wanted(name)
        self.struck.clear()

    def revive_router(self, name: str) -> None:
        """Start a router again at the same addresses once the old one has ended."""
        self.processes[name].popen.wait(START_S)
        self._start_router(name)

    def _start_router(self, name: str) -> None:
        self.start_process(name, "router", *self._addresses(name), *self._router_flags)

    def _wait_all_ready(self) -> None:
        for door in self.doors.values():
            door.wait_ready(num_nodes=len(self.nodes_wanted), timeout_s=START_S)

    def settle(self) -> float:
        """Wait until all are ready and no page is held. Returns the seconds between the two."""
        self._wait_all_ready()
        ready = time.monotonic()
        wait_until(lambda: self._at_rest(), lambda: f"books at rest: {held(self.ledger())}", SETTLE_S)
        return time.monotonic() - ready

    def _at_rest(self) -> bool:
        for door in self.doors.values():
            books = door.ledger()
            books["router"]["canaries"] = 0  # there may always be some
            for report in books["nodes"].values():
                if report and any("canary-" in unit for unit in report["requests"] + report["tickets"]):
                    return False
            if held(books):
                return False
        return True

    def end(self) -> None:
        """Close the cluster and end the threads. Nothing is left in any tier."""
        self.auditor.stop()
        try:
            self.close()
            left = [str(path) for path in self.files.glob("*/*")]
            assert not left, f"files after a flush: {left}"
        finally:
            self.lines.close()

    def abandon(self) -> None:
        self.auditor.stop()
        for name in list(self.stopped):
            self.hit(name, signal.SIGCONT)
        self.kill_all()
        self.lines.close()


def _hands_over(reader: str, holder: str) -> bool:
    """Return whether the data link from one node to another serves prompts, and not only loans."""
    return (role_of(reader), role_of(holder)) == ("decode", "prefill")


def _is_welcome(process: Process) -> bool:
    return "joined router" in process.log


def num_left(group: int) -> int:
    """Return how many processes of a process group run, when its leader has ended and they had time to."""

    def running() -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if _is_in(each, group)]

    return len(psutil.wait_procs(running(), LEAVE_S)[1])


def _is_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def _end_of(process: Process) -> str:
    return " | ".join(process.log.splitlines()[-12:])


class Auditor:
    """Reads the ledger repeatedly and looks for orphans.

    A unit is an orphan if a node holds it although its router has ended its request, has begun a later attempt, or has
    died.
    `longest` is the longest life of an orphan in seconds.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._since: dict[tuple[str, str], float] = {}
        self.longest = 0.0
        self.orphans: list[str] = []  # those that lived longer than ORPHAN_S
        self.last: dict[str, Any] = {}
        self.num_looks = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while not self._is_stopped.wait(0.2):
            asked = time.monotonic()
            books = self._read()
            if books is None:
                self._since.clear()
            else:
                self._look(books, asked)

    def _read(self) -> dict[str, Any] | None:
        """Return the books of a router, with the requests of all routers that live. None: one does not answer."""
        found: list[dict[str, Any]] = []
        for name, door in self._rig.doors.items():
            if len(self._rig.doors) > 1 and not self._rig.is_running(name):
                continue
            try:
                status, books = door.request("GET", "/debug/ledger", timeout_s=12)
            except (OSError, ValueError):
                return None
            if status != 200:
                return None
            found.append(books)
        if not found:
            return None
        found[0]["router"]["requests"] = [rid for books in found for rid in books["router"]["requests"]]
        return found[0]

    def _look(self, books: dict[str, Any], asked: float) -> None:
        """Look for orphans in `books`, which were requested at the time `asked`.

        If a node's answer is lost, the router waits seconds for it, so the answers of the other nodes are that old.
        """
        self.last, now = books, time.monotonic()
        self.num_looks += 1
        alive, newest = set(books["router"]["requests"]), Counter[tuple[str, str]]()
        entries: list[tuple[str, str, str, int]] = []
        for name, report in books["nodes"].items():
            for unit in {*report["requests"], *report["tickets"]} if report else ():
                choice, _, attempt = unit.rpartition(".")
                rid = choice.rpartition("/")[0]
                if not rid.startswith(("canary-", "kept-")):  # of no client; a kept text is one that a node has left
                    entries.append((name, unit, choice, int(attempt)))
                    newest[rid, choice] = max(newest[rid, choice], int(attempt))
        orphans = {
            (name, unit)
            for name, unit, choice, attempt in entries
            if choice.rpartition("/")[0] not in alive or attempt < newest[choice.rpartition("/")[0], choice]
        }
        self._since = {key: self._since.get(key, now) for key in orphans}
        for (name, unit), since in self._since.items():
            self.longest = max(self.longest, asked - since)
            where = f"{unit} at {name}"
            if asked - since > ORPHAN_S and where not in self.orphans:
                self.orphans.append(where)
