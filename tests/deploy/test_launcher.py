"""The launcher over small real child processes: start, progress, restart, stop, nothing left behind.

With the real router and nodes it is tested in tests/integration/test_up.py.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.decode_node.config import DecodeConfig
from baton.deploy import monitor, restarts
from baton.deploy.child import Child, Command
from baton.deploy.client import Client
from baton.deploy.launcher import CurrentKey, Launcher
from baton.deploy.plan import Plan, UpConfig, free_port
from baton.deploy.terminal import Signals
from baton.metadata.errors import Unavailable
from baton.prefill_node.config import PrefillConfig
from baton.router.config import RouterConfig

# Answers as a router that is ready, from 0.3 s after its start. While a file is there, decode-0 drains.
READY_SERVER = """
import http.server, json, pathlib, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "toy"}]}).encode()
        mark = pathlib.Path(sys.argv[2])
        if self.path == "/metrics":
            drains = {"decode-0": int(mark.exists()), "decode-1": 0}
            labels = 'baton_node_draining{model="toy",node="%s",role="decode"} %d.0\\n'
            body = "".join(labels % item for item in drains.items()).encode()
        elif self.path == "/ready" and mark.exists():
            item = {"node": "decode-0", "role": "decode", "state": "draining", "words": "decode-0 rests"}
            body = json.dumps({"status": "ready", "degraded": [item]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
time.sleep(0.3)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# The same; each time it is asked for its figures, five tokens and a round of five drafts have come, four accepted.
SPECULATING_SERVER = READY_SERVER.replace(
    "        self.send_response",
    """
        if self.path == "/metrics":
            num = Handler.num = getattr(Handler, "num", 0) + 1
            labels = 'model="toy",node="decode-0",role="decode"'
            body += "\\n".join([
                'baton_output_tokens_total{model="toy"} %d.0' % (5 * num),
                'baton_node_num_rounds_total{%s} %d.0' % (labels, num),
                'baton_node_num_drafted_total{%s} %d.0' % (labels, 5 * num),
                'baton_node_accepted_drafts_total{%s,position="1"} %d.0' % (labels, 4 * num),
            ]).encode()
        self.send_response""",
    1,
)
SLEEPER = "import time; print('loading', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\nwhile True: time.sleep(1)"


def plan(decode: DecodeConfig | None = None, **up: float) -> Plan:
    return Plan(UpConfig(**up), RouterConfig(), PrefillConfig(), decode or DecodeConfig())  # type: ignore[arg-type]


def command(name: str, code: str, *argv: str) -> Command:
    return Command(name, name.split("-")[0], [sys.executable, "-c", code, *argv], {})


class Running:
    """A launcher in this (the main) thread, and a script in another thread that acts on it."""

    def __init__(self, run_dir: Path, codes: dict[str, str], decode: DecodeConfig | None = None, **up: float) -> None:
        port = free_port()
        self.drained = run_dir / "drained"
        argv = str(port), str(self.drained)
        children = [Child(command(name, code, *argv), run_dir) for name, code in codes.items()]
        self.children = {child.name: child for child in children}
        self._client = Client.local("127.0.0.1", port, None)
        self._plan = plan(decode, **{"stop_timeout_s": 1.0, "ready_timeout_s": 20.0, **up})
        self._run_dir = run_dir

    def run(self, script: threading.Thread | None = None) -> int:
        with Signals() as signals:
            launcher = Launcher(self._plan, list(self.children.values()), self._client, self._run_dir, signals)
            if script is not None:
                script.start()
            try:
                return launcher.run()
            finally:
                if script is not None:
                    script.join()
                assert not any(child.is_running for child in self.children.values())

    def until_ready(self) -> None:
        while not self._client.is_ready():
            time.sleep(0.02)
        time.sleep(0.4)  # and the launcher has seen it too


def until(holds: Callable[[], bool], words: Callable[[], str]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, words()
        time.sleep(0.05)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_when_ready_a_request_to_try_is_printed_and_a_signal_stops_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})

    def script() -> None:
        running.until_ready()
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    out, err = capfd.readouterr()
    assert "curl http://127.0.0.1:" in out
    assert "toy" in out
    assert str(tmp_path) in out
    assert "decode-0: loading" in err


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


@pytest.mark.parametrize("algorithm", ["eagle", "none"])
def test_figures_of_speculation_are_printed_while_the_cluster_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, algorithm: Any
) -> None:
    monkeypatch.setattr(monitor, "SPECULATION_EVERY_S", 0.1)
    decode = DecodeConfig(speculative=algorithm)
    running = Running(tmp_path, {"router": SPECULATING_SERVER, "decode-0": SLEEPER}, decode)

    def script() -> None:
        running.until_ready()
        time.sleep(0.6)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    said = capfd.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("speculation")]
    expected = "speculation eagle: 5.0 tokens per round, 80 % of drafts accepted (last 0 s, 1 round)"
    assert set(lines) == ({expected} if algorithm == "eagle" else set())
    assert len(lines) >= 2 or algorithm == "none"


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
        deadline = time.monotonic() + 10
        while (child.pid == pids[0] or not child.is_running) and time.monotonic() < deadline:
            time.sleep(0.02)
        pids.append(child.pid)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    assert pids[0] != pids[1]
    assert "decode-0 was killed by signal 9" in capfd.readouterr().err


def test_a_role_that_cannot_start_any_more_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.02)
    # the second process lives only as long as it takes to be ready once
    code = f"import pathlib, time\nmark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
    code += "time.sleep(0 if mark.exists() else 1.5); mark.touch()"
    with pytest.raises(Unavailable, match=r"(?s)no decode process could start, 5 times in a row: decode-0 exited"):
        Running(tmp_path, {"router": READY_SERVER, "decode-0": code}).run()


def test_one_node_in_a_crash_loop_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is restarted after ever longer waits, until the cause of its end is gone."""
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
        until(lambda: "the 8th time in a row" in said(), said)
        mark.unlink()
        until(lambda: "decode-1 serves again" in said(), said)
        assert running.children["decode-0"].pid == pid and running.children["decode-0"].is_running
        interrupt()

    terminal = io.StringIO()  # capfd loses what is written while it reads
    monkeypatch.setattr(sys, "stderr", terminal)
    said = terminal.getvalue
    assert running.run(threading.Thread(target=script)) == 0
    lines = [line for line in said().splitlines() if line.startswith("decode-1 ") and "serves again" not in line]
    assert lines[0].startswith("decode-1 was killed by signal 9; next start in 0.02 s; decode-0 serves on. Log: ")
    assert lines[1].startswith("decode-1 exited with status 1, the 2nd time in a row; next start in 0.04 s; ")
    assert lines[1].endswith("decode-1.log: device lost")
    assert "next start in 0.2 s" in lines[7]
    assert len(lines) == running.children["decode-1"].num_starts - 1, "one line for each death"


def test_a_drained_node_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": SLEEPER})

    def script() -> None:
        running.until_ready()
        running.drained.touch()
        time.sleep(2.5)
        running.drained.unlink()
        time.sleep(1.5)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    said = capfd.readouterr().err.splitlines()
    assert said.count("decode-0 rests") == said.count("no node is draining any more") == 1


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
