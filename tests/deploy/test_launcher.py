"""The launcher over small real child processes: start, progress, restart, stop, nothing left behind.

With the real router and nodes it is tested in tests/integration/test_up.py.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from patience import wait_until
from service_manager import ServiceManager

from baton.decode_node.config import DecodeConfig
from baton.deploy import launcher, restarts
from baton.deploy.child import Child, Command
from baton.deploy.client import Client
from baton.deploy.launcher import CurrentKey, Launcher
from baton.deploy.terminal import Signals
from baton.deploy.up import Plan, UpConfig, free_port
from baton.metadata.errors import Unavailable
from baton.prefill_node.config import PrefillConfig
from baton.router.config import RouterConfig

from .conftest import node, snapshot

# Answers as a router that is ready, from 0.3 s after its start. While a file is there, decode-0 drains. Each time it is
# asked for a snapshot, five tokens and a round of five drafts have come, four accepted.
READY_SERVER = """
import http.server, json, pathlib, sys, time
snapshot = json.loads(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"data": [{"id": "toy"}]}
        if self.path == "/live?once=true&pages=false":
            body, node = snapshot, snapshot["nodes"][0]
            body["at"] = time.time()
            body["totals"]["output_tokens"] += 5
            for name, number in ("num_rounds", 1), ("num_drafted", 5):
                node["counters"][name] += number
            node["counters"]["accepted_at"][0] += 4
            drains = pathlib.Path(sys.argv[2]).exists()
            node["state"], node["why"] = ("draining", "decode-0 rests") if drains else ("ready", "")
        body = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
time.sleep(0.3)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLEEPER = "import time; print('loading', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\nwhile True: time.sleep(1)"


def plan(decode: DecodeConfig | None = None, router: RouterConfig | None = None, **up: float) -> Plan:
    return Plan(UpConfig(**up), router or RouterConfig(), PrefillConfig(), decode or DecodeConfig())  # type: ignore[arg-type]


def command(name: str, code: str, *argv: str) -> Command:
    return Command(name, name.split("-")[0], [sys.executable, "-c", code, *argv], {})


class Running:
    """A launcher in this (the main) thread, and a script in another thread that acts on it."""

    def __init__(
        self,
        run_dir: Path,
        codes: dict[str, str],
        decode: DecodeConfig | None = None,
        router: RouterConfig | None = None,
        **up: float,
    ) -> None:
        port = free_port()
        self.drained = run_dir / "drained"
        argv = str(port), str(self.drained), msgspec.json.encode(snapshot(0.0, node(), node("decode-1"))).decode()
        children = [Child(command(name, code, *argv), run_dir) for name, code in codes.items()]
        self.children = {child.name: child for child in children}
        self._client = Client.local("127.0.0.1", port, None)
        self._plan = plan(decode, router, **{"stop_timeout_s": 1.0, "ready_timeout_s": 20.0, **up})
        self._run_dir = run_dir
        self._is_watching = threading.Event()  # the launcher has seen that all are ready

    def run(self, script: threading.Thread | None = None) -> int:
        with Signals() as signals:
            launcher = Launcher(self._plan, list(self.children.values()), [self._client], self._run_dir, signals)
            watch = launcher._watch
            launcher._watch = lambda: (self._is_watching.set(), watch())[1]  # type: ignore[method-assign]
            if script is not None:
                script.start()
            try:
                return launcher.run()
            finally:
                if script is not None:
                    script.join()
                assert not any(child.is_running for child in self.children.values())

    def until_ready(self) -> None:
        wait_until(self._is_watching.is_set, "the launcher is ready")


def listen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a function that returns what was written to the standard error so far. capfd would lose what is written
    while it reads."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal.getvalue


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_when_ready_a_request_to_try_is_printed_and_a_signal_stops_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The key for the request is gone afterwards, and files of the user in the same directory stay."""
    (tmp_path / "api.key").write_text("keys of the user")
    keyed = RouterConfig(api_key="secret")
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER}, router=keyed)

    def script() -> None:
        running.until_ready()
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    assert [path.name for path in tmp_path.glob("*.key")] == ["api.key"]
    assert (tmp_path / "api.key").read_text() == "keys of the user"
    out, err = capfd.readouterr()
    assert f"cat {tmp_path}/api-{os.getpid()}-" in out
    assert "curl http://127.0.0.1:" in out
    assert "toy" in out
    assert str(tmp_path) in out
    assert "decode-0: loading" in err


def test_a_service_manager_hears_from_the_launcher_alone_that_all_are_ready_and_that_they_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = f"import os; print('NOTIFY_SOCKET' in os.environ, flush=True); {SLEEPER}"
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": sleeper})
    with ServiceManager() as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)

        def script() -> None:
            running.until_ready()
            manager.hear("WATCHDOG=1")
            os.kill(os.getpid(), signal.SIGTERM)

        assert running.run(threading.Thread(target=script)) == 0
        manager.hear("EXTEND_TIMEOUT_USEC=14000000")
    states = [line for line in manager.said if line.startswith(("READY", "STATUS", "WATCHDOG", "STOPPING"))]
    assert states[0] == "READY=1" and states[1].startswith("STATUS=serves http://127.0.0.1:")
    assert states[2:] == ["WATCHDOG=1"] * (len(states) - 3) + ["STOPPING=1"]
    assert running.children["decode-0"].tail(2)[0] == "False"


@pytest.mark.parametrize(("gpus", "is_recommended"), [("0,1", True), ("", False)])
def test_a_host_with_several_gpus_is_told_which_shape_serves_best(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: str, is_recommended: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})

    def script() -> None:
        running.until_ready()
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    assert ("2 GPUs: for prompts of 1,024" in capfd.readouterr().err) == is_recommended


def test_figures_are_printed_while_the_cluster_runs_and_summed_up_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = listen(monkeypatch)
    monkeypatch.setattr(launcher, "LOOK_EVERY_S", 0.1)
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})

    def script() -> None:
        running.until_ready()
        wait_until(lambda: "tokens/s; " in said(), said)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    lines = said().splitlines()
    line = next(line for line in lines if "tokens/s; " in line)
    assert "; 0 running; 0 waiting; 80% of drafts accepted, 5.0 tokens per round" in line
    assert re.fullmatch(r"0 requests done; \d+ tokens \(.* while busy\); 0 moves, 0 restarts; logs in .*", lines[-1])


def test_a_child_that_dies_at_start_is_quoted(tmp_path: Path) -> None:
    code = "import sys; print('no such tensor', file=sys.stderr); sys.exit(3)"
    with pytest.raises(Unavailable) as error:
        Running(tmp_path, {"router": SLEEPER, "decode-0": code}).run()
    for word in ["decode-0", "status 3", "no such tensor", str(tmp_path / "decode-0.log")]:
        assert word in str(error.value)


def test_a_cluster_that_is_never_ready_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not ready after"):
        Running(tmp_path, {"router": SLEEPER}, ready_timeout_s=0.5).run()


def test_a_child_that_dies_later_is_restarted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})
    pids: list[int] = []

    def script() -> None:
        running.until_ready()
        child = running.children["decode-0"]
        pids.append(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: child.pid != pids[0] and child.is_running, "it runs again")
        pids.append(child.pid)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    assert pids[0] != pids[1]
    assert "decode-0 was killed by signal 9" in capfd.readouterr().err


def test_a_role_that_cannot_start_any_more_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.02)
    mark = tmp_path / "mark"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.02)"
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": code})

    def script() -> None:
        running.until_ready()
        mark.touch()

    with pytest.raises(Unavailable, match=r"(?s)no decode process could start, 5 times in a row: decode-0 exited"):
        running.run(threading.Thread(target=script))


def test_one_node_in_a_crash_loop_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is restarted after ever longer waits, until the cause of its end is gone."""
    said = listen(monkeypatch)
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(restarts, "MAX_WAIT_S", 0.2)
    mark = tmp_path / "bad"
    code = (
        f"import pathlib, sys, time\nif pathlib.Path({str(mark)!r}).exists(): sys.exit('device lost')\ntime.sleep(600)"
    )
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER, "decode-1": code})

    def script() -> None:
        running.until_ready()
        pid = running.children["decode-0"].pid
        mark.touch()
        running.children["decode-1"].kill()
        wait_until(lambda: "the 8th time in a row" in said(), said)
        mark.unlink()
        wait_until(lambda: "decode-1 serves again" in said(), said)
        assert running.children["decode-0"].pid == pid and running.children["decode-0"].is_running
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    lines = [line for line in said().splitlines() if line.startswith("decode-1 ") and "serves again" not in line]
    assert lines[0].startswith("decode-1 was killed by signal 9; next start in 0.02 s; decode-0 serves on. Log: ")
    assert lines[1].startswith("decode-1 exited with status 1, the 2nd time in a row; next start in 0.04 s; ")
    assert lines[1].endswith("decode-1.log: device lost")
    assert "next start in 0.2 s" in lines[7]
    assert len(lines) == running.children["decode-1"].num_starts - 1, "one line for each death"


def test_a_drained_node_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = listen(monkeypatch)
    monkeypatch.setattr(launcher, "LOOK_EVERY_S", 0.1)
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})

    def script() -> None:
        running.until_ready()
        running.drained.touch()
        for words in ("decode-0 rests", "all nodes take requests again"):
            wait_until(lambda: words in said(), said)  # noqa: B023
            time.sleep(0.5)  # several looks
            running.drained.unlink(missing_ok=True)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    lines = said().splitlines()
    assert lines.count("decode-0 rests") == lines.count("all nodes take requests again") == 1


def test_a_child_that_does_not_stop_is_killed_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": STUBBORN}, stop_timeout_s=0.2)

    def script() -> None:
        running.until_ready()
        interrupt()

    assert running.run(threading.Thread(target=script)) == 1
    assert "did not stop: decode-0" in capfd.readouterr().err


@pytest.mark.timing
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": STUBBORN}, stop_timeout_s=60.0)
    times: list[float] = []

    def script() -> None:
        running.until_ready()
        interrupt()
        time.sleep(0.5)
        times.append(time.monotonic())
        interrupt()

    assert running.run(threading.Thread(target=script)) == 1
    assert time.monotonic() - times[0] < 2


def test_the_router_is_asked_with_a_key_that_it_takes_now(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key-of-all\n")
    current = CurrentKey(RouterConfig(api_keys=str(keys)))
    assert current() == "first-key-of-all"
    keys.write_text("ann another-key-here team\n")
    assert current() == "another-key-here"
    keys.write_text("a mistake in the file, of many words\n")
    assert current() == "another-key-here"
