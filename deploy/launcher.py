"""`baton up`: a router and nodes on this host, as child processes.

Its life: check (model, port) -> start all -> show progress until a first request went through -> say where it
listens -> watch, restarting what dies and telling how speculation does -> on a signal, stop the router, then the
nodes, then whatever is left.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from ..metadata.errors import BatonError, Unavailable
from .acceptance import Acceptance
from .child import Child
from .client import Client
from .plan import Plan, check_model, check_port, commands, free_port
from .rundir import make_run_dir
from .terminal import Signals, Status, banner, say

_TICK_S = 0.1
_READY_POLL_S = 0.25


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
        """True when a canary request went through, False when a signal came first. Raises when a child dies."""
        start, next_poll = time.monotonic(), 0.0
        with Status(child.name for child in self._children[1:]) as status:  # the nodes: the router is there at once
            while not self._signals.stops:
                now = time.monotonic()
                if now >= next_poll:
                    if self._client.is_ready():
                        return True
                    next_poll = now + _READY_POLL_S
                for child in self._children:
                    status.take(child.name, child.new_lines())
                    if child.exit_status is not None:
                        raise Unavailable(_obituary(child))
                status.draw(now - start)
                if now - start > self._plan.up.ready_timeout_s:
                    raise Unavailable(f"not ready after {now - start:.0f} s: {self._client.why_not_ready()}")
                self._signals.wait(_TICK_S)
        return False

    def _watch(self) -> None:
        """Blocks until a signal; restarts what dies. Raises when something dies too often."""
        acceptance = Acceptance(self._plan.decode.speculative, self._client.metrics)
        while not self._signals.stops:
            now = time.monotonic()
            for child in self._children:
                if child.restart_at is not None:
                    if now >= child.restart_at:
                        say(f"{child.name} starts again")
                        child.start()
                elif child.exit_status is not None:
                    if not child.plan_restart():
                        raise Unavailable(f"giving up, too many restarts in a minute: {_obituary(child)}")
                    say(f"{_obituary(child, 3)}\n{child.name} will be restarted")
            line = acceptance.line(now)
            if line is not None:
                say(line)
            is_restarting = any(child.restart_at is not None for child in self._children)
            self._signals.wait(_TICK_S if is_restarting else acceptance.due_in(time.monotonic()))

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


def _obituary(child: Child, num_lines: int = 15) -> str:
    status = child.exit_status
    assert status is not None, f"{child.name} lives"
    how = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
    return "\n".join(
        [f"{child.name} {how}; the end of {child.log_path}:", *(f"  {line}" for line in child.tail(num_lines))]
    )
