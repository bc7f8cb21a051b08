"""The launcher over small real child processes: start, progress, restart, stop, nothing left behind.

With the real router and nodes it is tested in tests/integration/test_up.py.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.decode_node.config import DecodeConfig
from baton.deploy import acceptance, restarts
from baton.deploy.child import Child
from baton.deploy.client import Client
from baton.deploy.launcher import Launcher
from baton.deploy.plan import Command, Plan, UpConfig, check_model, check_port, commands, free_port, split_threads
from baton.deploy.rundir import make_run_dir
from baton.deploy.terminal import Signals
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError, Unavailable
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
    """A launcher in this (the main) thread, with a script that acts on it from another."""

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


def test_ready_says_what_to_do_and_a_signal_stops_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("algorithm", ["eagle", "none"])
def test_speculation_is_told_while_it_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, algorithm: Any
) -> None:
    monkeypatch.setattr(acceptance, "EVERY_S", 0.1)
    decode = DecodeConfig(speculative=algorithm)
    running = Running(tmp_path, {"router": SPECULATING_SERVER, "decode-0": SLEEPER}, decode)

    def script() -> None:
        running.until_ready()
        time.sleep(0.6)
        interrupt()

    assert running.run(threading.Thread(target=script)) == 0
    said = capfd.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("speculation")]
    expected = "speculation eagle: 5.0 tokens a round, 80 % of drafts accepted (last 0 s, 1 round)"
    assert set(lines) == ({expected} if algorithm == "eagle" else set())
    assert len(lines) >= 2 or algorithm == "none"


def test_a_child_that_dies_at_start_is_quoted(tmp_path: Path) -> None:
    code = "import sys; print('no such tensor', file=sys.stderr); sys.exit(3)"
    with pytest.raises(Unavailable) as error:
        Running(tmp_path, {"router": SLEEPER, "decode-0": code}).run()
    for word in ["decode-0", "status 3", "no such tensor", str(tmp_path / "decode-0.log")]:
        assert word in str(error.value)


def test_never_ready_is_an_error_after_its_time(tmp_path: Path) -> None:
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


def test_one_node_in_a_crash_loop_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again, each time later, until the cause is gone."""
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


def test_a_drained_node_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_child_that_will_not_stop_is_killed_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = Running(tmp_path, {"router": READY_SERVER, "decode-0": STUBBORN}, stop_timeout_s=0.2)

    def script() -> None:
        running.until_ready()
        interrupt()

    assert running.run(threading.Thread(target=script)) == 1
    assert "did not stop: decode-0" in capfd.readouterr().err


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = f"from baton.deploy.lifeline import die_with_parent; die_with_parent(); {SLEEPER}"
    parent = textwrap.dedent(f"""
        import pathlib, sys, time
        from baton.deploy.child import Child
        from baton.deploy.plan import Command
        child = Child(Command("decode-0", "decode", [sys.executable, "-c", {child!r}], {{}}),
                      pathlib.Path({str(tmp_path)!r}))
        child.start()
        while "loading" not in "".join(child.tail()): time.sleep(0.02)
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    deadline = time.monotonic() + 5
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # in a container nobody may reap orphans
    except psutil.NoSuchProcess:
        return False


def test_the_log_is_read_line_by_line(tmp_path: Path) -> None:
    child = Child(command("decode-0", ""), tmp_path)
    child.log_path.write_bytes("one\ntwö".encode()[:-1])
    assert child.new_lines() == ["one"]
    with child.log_path.open("ab") as log:
        log.write("ö".encode()[1:] + b"\n")
    assert child.new_lines() == ["twö"]
    assert child.new_lines() == []


def test_the_commands_of_a_plan() -> None:
    given = RouterConfig(api_key="hunter2", allow_origin=("https://a.example", "http://b:1"), allow_host=("c",))
    made = commands(
        Plan(UpConfig(prefill=2, decode=1), given, PrefillConfig(), DecodeConfig(threads=3)),
        node_port=5701,
        http_port=8001,
    )
    assert [item.name for item in made] == ["router", "prefill-0", "prefill-1", "decode-0"]
    router, *nodes = made
    assert "--port=8001" in router.argv
    assert "--node-address=tcp://127.0.0.1:5701" in router.argv
    allowed = ["--allow-origin=https://a.example", "--allow-origin=http://b:1", "--allow-host=c"]
    assert [word for word in router.argv if word.startswith("--allow")] == allowed
    assert router.environ["BATON_API_KEY"] == "hunter2"
    for node in nodes:
        assert "--router=tcp://127.0.0.1:5701" in node.argv
        assert f"--node-id={node.name}" in node.argv
        assert "BATON_API_KEY" not in node.environ
    assert nodes[-1].environ["OMP_NUM_THREADS"] == "3"
    assert not any("hunter2" in word for item in made for word in item.argv)


def test_processes_get_fresh_keys_of_their_own(tmp_path: Path) -> None:
    """Nobody on this host can join without reading a file that is the user's alone; each run has other keys."""
    seen: set[bytes] = set()
    for _ in range(2):
        made = plan().secured(tmp_path)
        (keys_dir,) = tmp_path.iterdir()
        assert keys_dir.stat().st_mode & 0o777 == 0o700
        for command in commands(made, node_port=5701, http_port=8001):
            path, allow_list = keys_dir / f"{command.name}.key", keys_dir / "allow-list"
            assert {f"--keys={path}", f"--allow-list={allow_list}"} < set(command.argv)
            keys = KeyPair.load(path, allow_list)
            assert keys.name == command.name
            seen.add(keys.public)
    assert len(seen) == 2 * len(commands(made, node_port=5701, http_port=8001))


def test_configured_keys_are_used_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    KeyPair.create(path)
    given = Plan(UpConfig(), RouterConfig(keys=str(path)), PrefillConfig(), DecodeConfig())
    assert given.secured(tmp_path) is given
    assert list(tmp_path.iterdir()) == [path]


def flags_of(made: Plan) -> set[str]:
    """What the nodes' command lines say of speculation."""
    nodes = commands(made, node_port=5701, http_port=8001)[1:]
    says = [{word for word in node.argv if word.startswith(("--speculative", "--draft"))} for node in nodes]
    assert says[0] == says[1]
    return says[0]


def test_the_demo_model_speculates_unless_told_otherwise() -> None:
    assert plan().settled().speculation == "eagle, 5 steps, drafter eagle/"
    assert flags_of(plan().settled()) == {"--speculative=eagle", "--draft-steps=5"}
    off = Plan(UpConfig(), RouterConfig(), PrefillConfig(speculative="none"), DecodeConfig(speculative="none"))
    assert off.settled() == off
    assert off.speculation == "none"


def test_a_model_that_recommends_no_drafter_is_not_speculated(tmp_path: Path) -> None:
    model = str(tmp_path)
    made = Plan(UpConfig(), RouterConfig(), PrefillConfig(model=model), DecodeConfig(model=model)).settled()
    assert made.speculation == "none"
    assert flags_of(made) == {"--speculative=none"}


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (1, 3), (4, 1)])
def test_threads_are_divided(cores: int, prefill: int, decode: int) -> None:
    threads = split_threads(cores, prefill, decode)
    assert min(threads.values()) >= 1
    assert threads["decode"] >= threads["prefill"]
    total = threads["prefill"] * prefill + threads["decode"] * decode
    assert total <= max(cores, prefill + decode)
    assert cores < 4 or total < cores or cores <= prefill + decode, "the router has a core where there are enough"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*taken.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host no-such-host\.invalid"):
        check_port("no-such-host.invalid", 80)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    config = PrefillConfig(model=str(tmp_path))
    for name, content in [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "")]:
        with pytest.raises(ConfigError, match=name.replace("model", r"\*")):
            check_model(config)
        (tmp_path / name).write_text(content)
    check_model(config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        check_model(config)


def test_old_run_directories_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = tmp_path / "baton" / "runs"
    for index in range(15):
        (runs / f"20200101-0000{index:02d}-1").mkdir(parents=True)
    (runs / "20200101-000000-1" / "launcher.pid").write_text(str(os.getpid()))  # this one is in use
    path = make_run_dir(None)
    kept = sorted(item.name for item in runs.iterdir())
    assert path.name in kept
    assert "20200101-000000-1" in kept
    assert len(kept) == 11
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="--run-dir"):
        make_run_dir("/proc/no")
