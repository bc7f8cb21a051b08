"""`baton up`: a router and nodes on this host, as child processes.

Its life: check (model, port) -> start all -> show progress until a first request went through -> say where it
listens -> watch, restarting what dies (restarts.py says when, and when to give up), telling who drains and how
speculation does -> on a signal, stop the router, then the nodes, then whatever is left.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ..metadata.errors import BatonError, Unavailable
from .acceptance import Acceptance
from .child import Child
from .client import Client
from .plan import Plan, check_model, check_port, commands, free_port
from .restarts import GiveUp, Restart, Restarts
from .rundir import make_run_dir
from .standing import Standing, Teller, look
from .terminal import Signals, Status, banner, say

_TICK_S = 0.1
_READY_POLL_S = 0.25
_LAST_LINE_LEN = 300
LOOK_S = 1.0  # the router is asked so often who is there


def run(plan: Plan) -> int:
    """Starts everything, blocks until a signal, stops everything. Returns the exit status."""
    for config in (plan.prefill, plan.decode):
        check_model(config)
    plan = plan.settled()
    port = plan.router.port or free_port(plan.router.host)
    check_port(plan.router.host, port)
    say(f"speculation: {plan.speculation}")
    run_dir = make_run_dir(plan.up.run_dir)
    secured = plan.secured(run_dir)
    children = [Child(command, run_dir) for command in commands(secured, free_port(), port)]
    key = plan.router.required_admin_key or next(iter(plan.router.client_keys), None)
    client = Client.local(plan.router.host, port, key)
    try:
        with Signals() as signals:
            return Launcher(secured, children, client, run_dir, signals).run()
    finally:
        if secured.keys_dir is not None:  # the last reader is gone
            shutil.rmtree(secured.keys_dir, ignore_errors=True)


class Launcher:
    """Owns the child processes: none outlives `run`."""

    def __init__(self, plan: Plan, children: list[Child], client: Client, run_dir: Path, signals: Signals) -> None:
        self._plan = plan
        self._children = children
        self._client = client
        self._run_dir = run_dir
        self._signals = signals
        self._restarts = Restarts((child.name, child.role) for child in children)

    def run(self) -> int:
        try:
            up = self._plan.up
            say(f"starting a router, {up.prefill} prefill and {up.decode} decode; logs in {self._run_dir}")
            for child in self._children:
                child.start()
            if not self._wait_ready():
                return self._stop()
            print(banner(self._client, self._run_dir, has_key=bool(self._plan.router.client_keys)), flush=True)
            self._watch()
            return self._stop()
        except BatonError:
            self._stop()
            raise
        finally:
            for child in self._children:
                child.kill()

    def _wait_ready(self) -> bool:
        """True when a canary request went through, False when a signal came first. Raises when that cannot be."""
        start, next_poll, next_look = time.monotonic(), 0.0, 0.0
        with Status(child.name for child in self._children[1:]) as status:  # the nodes: the router is there at once
            while not self._signals.stops:
                now = time.monotonic()
                if now >= next_poll:
                    if self._client.is_ready():
                        self._look(now, status.tell)
                        return True
                    next_poll = now + _READY_POLL_S
                if now >= next_look:
                    self._look(now, status.tell)
                    next_look = now + LOOK_S
                for child in self._children:
                    status.take(child.name, child.new_lines())
                self._tend(now, status.tell)
                status.draw(now - start)
                if now - start > self._plan.up.ready_timeout_s:
                    raise Unavailable(f"not ready after {now - start:.0f} s: {self._client.why_not_ready()}")
                self._signals.wait(_TICK_S)
        return False

    def _watch(self) -> None:
        """Blocks until a signal; restarts what dies. Raises when no pair could ever serve."""
        acceptance = Acceptance(self._plan.decode.speculative, self._client.metrics)
        teller, next_look = Teller(), 0.0
        while not self._signals.stops:
            now = time.monotonic()
            self._tend(now, say)
            if now >= next_look:
                for line in teller.lines(self._look(now, say)):
                    say(line)
                next_look = now + LOOK_S
            line = acceptance.line(now)
            if line is not None:
                say(line)
            now = time.monotonic()
            waits = (next_look - now, self._restarts.next_start_s(now), acceptance.due_in(now))
            self._signals.wait(max(0.0, min(wait_s for wait_s in waits if wait_s is not None)))

    def _tend(self, now: float, tell: Callable[[str], None]) -> None:
        """Starts whose time has come, and plans the next start of those that have ended."""
        due = self._restarts.due(now)
        for child in self._children:
            if child.name in due:
                child.start()
            elif child.exit_status is not None and not self._restarts.is_waiting(child.name):
                verdict = self._restarts.ended(child.name, child.exit_status, now)
                if isinstance(verdict, GiveUp):
                    raise Unavailable(f"{verdict.reason}: {_obituary(child)}")
                tell(_news(child, verdict, self._restarts.serving(child.role)))

    def _look(self, now: float, tell: Callable[[str], None]) -> Standing:
        """Asks the router who is there."""
        standing = look(self._client)
        if standing.answers:
            for child in self._children:
                is_there = child.role == "router" or child.name in standing.joined
                if is_there and self._restarts.joined(child.name, now) and child.num_starts > 1:
                    tell(f"{child.name} serves again")
        return standing

    def _stop(self) -> int:
        """Router first (it finishes or ends its streams), then the nodes. Returns 0 when all went by themselves."""
        say("stopping (once more stops at once)")
        self._signals.stops = 0
        router, nodes = self._children[:1], self._children[1:]
        for group in (router, nodes):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + self._plan.up.stop_timeout_s + 1.0
            while any(child.is_running for child in group) and time.monotonic() < deadline:
                if self._signals.stops:
                    return 1
                self._signals.wait(_TICK_S)
        stragglers = [child.name for child in self._children if child.is_running]
        if stragglers:
            say(f"killed, as they did not stop: {', '.join(stragglers)}")
        return 1 if stragglers else 0


def _how(child: Child) -> str:
    status = child.exit_status
    assert status is not None, f"{child.name} lives"
    return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"


def _obituary(child: Child, num_lines: int = 15) -> str:
    lines = (f"  {line}" for line in child.tail(num_lines))
    return "\n".join([f"{child.name} {_how(child)}; the end of {child.log_path}:", *lines])


def _news(child: Child, restart: Restart, serving: list[str]) -> str:
    """One line on a process that has ended. `serving`: the others of its role."""
    times = f", the {_ordinal(restart.num_in_row)} time in a row" if restart.num_in_row > 1 else ""
    if child.role == "router":
        others = "nothing is served meanwhile"
    elif serving:
        others = f"{', '.join(serving)} {'serves' if len(serving) == 1 else 'serve'} on"
    else:
        others = f"no other {child.role} node serves"
    log = f"{child.log_path}: {''.join(child.tail(1))[:_LAST_LINE_LEN]}"
    return f"{child.name} {_how(child)}{times}; next start in {restart.after_s:g} s; {others}. Log: {log}"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{suffix}"
