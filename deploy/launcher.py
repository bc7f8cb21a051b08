"""`baton up`: routers and nodes on this host, as child processes.

The launcher checks devices, model and port, starts all processes, and shows their progress until a first request has
succeeded. It then prints the URL and watches: it restarts a process that ends (restarts.py decides when, and when to
give up), and shows what the router reports (monitor.py). On a signal it stops the routers first, then the
nodes, and kills the processes that do not stop.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..engine.checkpoint.model_check import resolve_model
from ..metadata.errors import BatonError, ConfigError, Unavailable
from ..metadata.service_manager import notify
from ..router.config import RouterConfig
from ..router.http.page.types import Snapshot
from .child import Child
from .client import Client
from .monitor import LOOK_EVERY_S, Monitor, look
from .restarts import GiveUp, Restart, Restarts
from .run_dir import make_run_dir
from .terminal import Signals, StartProgress, Status, make_key_file, ready_text, say
from .up import LOOPBACK, Plan, check_port, commands, free_port

_TICK_S = 0.1
_READY_POLL_S = 0.25
_LAST_LINE_LEN = 300


def run(plan: Plan) -> int:
    """Start all processes, wait for a signal, stop all processes. Returns the exit status."""
    plan.check_devices()
    plan = plan.fetched(_say_before)
    plan.check_models()
    plan = plan.settled().watched()
    port = plan.router.port or free_port(plan.router.host, plan.up.routers)
    for index in range(plan.up.routers):
        check_port(plan.router.host, port + index)
    say(f"speculation: {plan.speculation}")
    for words in (plan.advice, plan.first_start):
        if words is not None:
            say(words)
    run_dir = make_run_dir(plan.up.run_dir)
    secured = plan.secured(run_dir)
    try:
        node_port = free_port(LOOPBACK, plan.up.routers)
        children = [Child(command, run_dir) for command in commands(secured, node_port, port)]
        key = CurrentKey(plan.router)
        clients = [Client.local(plan.router.host, port + index, key) for index in range(plan.up.routers)]
        with Signals() as signals:
            return Launcher(secured, children, clients, run_dir, signals).run()
    finally:
        if secured.keys_dir is not None:  # no process is left that reads the keys
            shutil.rmtree(secured.keys_dir, ignore_errors=True)


def _say_before(text: str) -> None:
    """Print an event of the time before processes start, and ask the service manager for more time."""
    say(text)
    notify("starting", text)


class CurrentKey:
    """A key that the router takes now. Its file of keys may change, and a mistake in it changes nothing."""

    def __init__(self, router: RouterConfig) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._router = router
        self._key = self._read()

    def __call__(self) -> str | None:
        with suppress(ConfigError):
            self._key = self._read()
        return self._key

    def _read(self) -> str | None:
        return self._router.admin_key or next(iter(self._router.client_keys), None)


class Launcher:
    """Owns the child processes. No child outlives `run`."""

    def __init__(
        self, plan: Plan, children: list[Child], clients: list[Client], run_dir: Path, signals: Signals
    ) -> None:
        """`children`: the routers first, then the nodes. `clients`: of the routers."""
        self._plan = plan
        self._children = children
        self._clients = clients
        self._run_dir = run_dir
        self._signals = signals
        self._key_file: Path | None = None  # for the printed request
        self._restarts = Restarts((child.name, child.role) for child in children)

    def run(self) -> int:
        try:
            plan = self._plan
            prefill = _nodes(plan.up.prefill, "prefill", plan.prefill.num_ranks)
            decode = _nodes(plan.up.decode, "decode", plan.decode.num_ranks)
            routers = "a router" if len(self._clients) == 1 else f"{len(self._clients)} routers"
            say(f"starting {routers}, {prefill} and {decode}; logs in {self._run_dir}")
            for child in self._children:
                child.start()
            self._recommend_shape()
            if not self._wait_ready():
                return self._stop()
            for router in self._routers:
                router.forget("--expect")  # a router that starts again serves with the nodes that it finds
            key = next(iter(self._plan.router.client_keys), None)
            self._key_file = file = make_key_file(self._run_dir, key)
            url, model = self._clients[0].url, self._clients[0].model_names()[0]
            print(ready_text(url, model, self._run_dir, asks_key=key is not None, key_file=file), flush=True)
            if others := [client.url for client in self._clients[1:]]:
                say(f"the same nodes are served by {', '.join(others)}, too")
            notify("ready", f"serves {url}")
            monitor = self._watch()
            exit_status = self._stop()
            say(monitor.summary(sum(child.num_starts - 1 for child in self._children), self._run_dir))
            return exit_status
        except BatonError:
            self._stop()
            raise
        finally:
            for child in self._children:
                child.kill()
            if self._key_file is not None:
                self._key_file.unlink(missing_ok=True)

    @property
    def _routers(self) -> list[Child]:
        return self._children[: len(self._clients)]

    @property
    def _nodes(self) -> list[Child]:
        return self._children[len(self._clients) :]

    def _recommend_shape(self) -> None:
        """Print which shape serves the GPUs of this host best. The nodes load meanwhile."""
        if num_gpus := self._plan.num_gpus_to_plan:
            from .sizing import recommendation  # the simulation, which a host without several GPUs never needs

            try:
                say(recommendation(num_gpus, resolve_model(self._plan.decode.model)))
            except ConfigError as error:  # a damaged times.json of the model, which no node reads
                say(f"no shape is recommended: {error}")

    def _wait_ready(self) -> bool:
        """Wait until a canary request has succeeded. Returns False if a signal came first.

        Raises Unavailable if the system cannot become ready, or not in time.
        """
        start, next_poll, next_look = time.monotonic(), 0.0, 0.0
        with Status() as status:
            progress = StartProgress((child.name for child in self._nodes), status)  # routers start at once
            while not self._signals.stops:
                now = time.monotonic()
                if now >= next_poll:
                    # all nodes that the routers expect are here then; a snapshot may be older
                    if all(client.is_ready() for client in self._clients):
                        self._note_joined({child.name for child in self._children}, now, status.tell)
                        return True
                    next_poll = now + _READY_POLL_S
                if now >= next_look:
                    self._look(now, status.tell)
                    next_look = now + LOOK_EVERY_S
                    notify("starting")
                for child in self._children:
                    progress.take(child.name, child.new_lines())
                self._tend(now, status.tell)
                progress.draw(now - start)
                if now - start > self._plan.up.ready_timeout_s:
                    raise Unavailable(f"not ready after {now - start:.0f} s: {self._why_not_ready()}")
                self._signals.wait(_TICK_S)
        return False

    def _why_not_ready(self) -> str:
        return next(client for client in self._clients if not client.is_ready()).why_not_ready()

    def _watch(self) -> Monitor:
        """Restart processes that end and show figures and news, until a signal. Returns what has been seen.

        Raises Unavailable if restarts are hopeless."""
        next_look = time.monotonic() + LOOK_EVERY_S  # a snapshot from before the first request may be served until then
        with Status() as status:
            monitor = Monitor(status)
            while not self._signals.stops:
                now = time.monotonic()
                self._tend(now, status.tell)
                notify("alive")
                if now >= next_look:
                    monitor.take(self._look(now, status.tell), now)
                    next_look = now + LOOK_EVERY_S
                waits = next_look - time.monotonic(), self._restarts.next_start_s(now)
                self._signals.wait(max(0.0, min(wait_s for wait_s in waits if wait_s is not None)))
            now = time.monotonic()
            monitor.take(self._look(now, status.tell), now)
        return monitor

    def _tend(self, now: float, tell: Callable[[str], None]) -> None:
        """Start the processes that are due, and schedule the next start of processes that have ended."""
        due = self._restarts.due(now)
        for child in self._children:
            if child.name in due:
                child.start()
            elif child.exit_status is not None and not self._restarts.is_waiting(child.name):
                verdict = self._restarts.ended(child.name, child.exit_status, now)
                if isinstance(verdict, GiveUp):
                    kind = ConfigError if verdict.is_misconfigured else Unavailable
                    raise kind(f"{verdict.reason}: {_last_words(child)}")
                tell(_restart_line(child, verdict, self._restarts.serving(child.role)))

    def _look(self, now: float, tell: Callable[[str], None]) -> Snapshot | None:
        """Ask the routers for snapshots, and record the processes that have joined. Return that of the first router
        which answers; None: none does."""
        first: Snapshot | None = None
        for client, router in zip(self._clients, self._routers, strict=True):
            try:
                snapshot = look(client, with_pages=False)
            except BatonError:
                continue
            names = {node.id for node in snapshot.nodes if node.state != "gone"}
            self._note_joined(names | {router.name}, now, tell)
            first = first or snapshot
        return first

    def _note_joined(self, names: set[str], now: float, tell: Callable[[str], None]) -> None:
        """Record that these processes serve: a router that answers, and the nodes that it has."""
        for child in self._children:
            if child.name in names and self._restarts.joined(child.name, now) and child.num_starts > 1:
                tell(f"{child.name} serves again")

    def _stop(self) -> int:
        """Stop the routers, which finish or end their streams, then the nodes.

        Returns 0 if every process stopped when asked, else 1.
        """
        say("stopping (press Ctrl-C again to stop at once)")
        self._signals.stops = 0
        limit_s = self._plan.up.stop_timeout_s + 1.0
        notify("stopping", limit_s=2 * limit_s)
        for group in (self._routers, self._nodes):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + limit_s
            while any(child.is_running for child in group) and time.monotonic() < deadline:
                if self._signals.stops:
                    return 1
                self._signals.wait(_TICK_S)
        running = [child.name for child in self._children if child.is_running]
        if running:
            say(f"killed because they did not stop: {', '.join(running)}")
        return 1 if running else 0


def _nodes(count: int, role: str, num_ranks: int) -> str:
    return f"{count} {role}" if num_ranks == 1 or count == 0 else f"{count} {role} of {num_ranks} ranks"


def _how_it_ended(child: Child) -> str:
    status = child.exit_status
    assert status is not None, f"{child.name} runs"
    return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"


def _last_words(child: Child, num_lines: int = 15) -> str:
    """Return how the process ended, with the end of its log."""
    lines = (f"  {line}" for line in child.tail(num_lines))
    return "\n".join([f"{child.name} {_how_it_ended(child)}; the end of {child.log_path}:", *lines])


def _restart_line(child: Child, restart: Restart, serving: list[str]) -> str:
    """Return the line about a process that has ended. `serving`: the processes of its role that still serve."""
    times = f", the {_ordinal(restart.num_in_row)} time in a row" if restart.num_in_row > 1 else ""
    if child.role == "router" and not serving:
        others = "nothing is served meanwhile"
    elif serving:
        others = f"{', '.join(serving)} {'serves' if len(serving) == 1 else 'serve'} on"
    else:
        others = f"no other {child.role} node serves"
    log = f"{child.log_path}: {''.join(child.tail(1))[:_LAST_LINE_LEN]}"
    return f"{child.name} {_how_it_ended(child)}{times}; next start in {restart.after_s:g} s; {others}. Log: {log}"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{suffix}"
