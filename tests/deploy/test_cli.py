"""The `baton` command as a user runs it: a real process in each test."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from baton.deploy import cli
from baton.deploy.cli import SUMMARIES
from baton.metadata.bus.curve import KeyPair

COMMAND = [sys.executable, "-P", "-m", "baton.deploy.cli"]


def baton(*argv: str, timeout: float = 200, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv], capture_output=True, text=True, timeout=timeout, env={**os.environ, **environ}, check=False
    )


def test_version_and_help() -> None:
    assert baton("--version").stdout.startswith("baton 0.")
    text = baton("--help").stdout
    for word in [*SUMMARIES, "baton up", "--router tcp://", "/debug/ledger", "--print-config"]:
        assert word in text


def test_the_installed_command_is_this_one() -> None:
    installed = Path(sys.executable).with_name("baton")
    assert subprocess.run([installed, "--version"], capture_output=True, check=True).stdout.startswith(b"baton 0.")


@pytest.mark.timing
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_in_under_0_3_s(flag: str) -> None:
    def once() -> float:
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert baton(flag).returncode == 0
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    assert min(once() for _ in range(5)) < 0.3  # CPU time: other work on the machine is not the command's


@pytest.mark.parametrize("command", list(SUMMARIES))
def test_each_command_has_help(command: str) -> None:
    result = baton(command, "--help")
    assert result.returncode == 0
    assert f"baton {command}" in result.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["decode", "--pge-size", "3"], ["--pge-size", "did you mean '--page-size'"]),
        (["router", "--allow-origins", "https://x"], ["--allow-origins", "did you mean '--allow-origin'"]),
        (["up", "--allow-origin", "https://x.example/"], ["--allow-origin https://x.example/:", "https://x.example"]),
        (["router", "--allow-host", "http://x:80"], ["--allow-host http://x:80:", "write x"]),
        (["decode", "--page-size", "x"], ["--page-size", "'x'"]),
        (["router", "--port", "99999"], ["99999"]),
        (["router", "--config", "/no/such/file.toml"], ["/no/such/file.toml"]),
        (["up", "--model", "/no/such/model"], ["--model /no/such/model", "no such directory"]),
        (["up", "--prefill", "0", "--decode", "0"], ["--decode 0", "only decode nodes generate"]),
        (["upp"], ["no command 'upp'", "did you mean 'up'"]),
        (["chat", "--url", "ftp://x"], ["ftp://x"]),
        (["keys", "/no/such/directory/cluster.key"], ["/no/such/directory/cluster.key"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(argv: list[str], words: list[str]) -> None:
    result = baton(*argv)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("baton: error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_log_level_debug_prints_the_traceback_of_an_error() -> None:
    result = baton("up", "--model", "/no/such/model", "--log-level", "debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_no_command_prints_the_help() -> None:
    result = baton()
    assert result.returncode == 2
    assert "commands:" in result.stdout


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    process = subprocess.run(
        f"{sys.executable} -P -m baton.deploy.cli up --help | true", shell=True, capture_output=True
    )
    assert b"Traceback" not in process.stderr


def test_keys_writes_a_private_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decode-0.key"
    assert cli.main(["keys", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    line = capsys.readouterr().out
    assert line == f"decode-0 {KeyPair.load(path).public.decode()}\n"  # for `ssh HOST baton keys ... >> LIST`
    before = path.read_bytes()
    assert cli.main(["keys", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_keys_adds_to_an_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "allow-list"
    for name in ("router", "p0"):
        assert cli.main(["keys", str(tmp_path / f"{name}.key"), "--allow-list", str(path)]) == 0
    assert cli.main(["keys", str(tmp_path / "x.key"), "--allow-list", str(path), "--name", "d0"]) == 0
    for file, name in (("router", "router"), ("p0", "p0"), ("x", "d0")):
        assert KeyPair.load(tmp_path / f"{file}.key", path).name == name
    capsys.readouterr()
    for name, words in (("d0", "'d0' or its key stands in line 4"), ("two words", "'two words")):
        assert cli.main(["keys", str(tmp_path / "y.key"), "--allow-list", str(path), "--name", name]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "y.key").exists()


def test_print_config_reads_back_and_holds_no_secret(tmp_path: Path) -> None:
    argv = ["up", "--print-config", "--prefill", "2", "--page-size", "8", "--no-checksums", "--max-body-bytes", "9999"]
    first = baton(*argv, BATON_API_KEY="hunter2")
    assert first.returncode == 0, first.stderr
    assert "hunter2" not in first.stdout
    for line in ["prefill = 2", "page_size = 8", "checksums = false", "max_body_bytes = 9999", "api_key is set"]:
        assert line in first.stdout
    path = tmp_path / "baton.toml"
    path.write_text(first.stdout)
    second = baton("up", "--print-config", "--config", str(path), BATON_API_KEY="hunter2")
    assert second.stdout == first.stdout


def test_one_file_sets_all_commands(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('[up]\npage_size = 8\nmodel = "m"\n[decode]\nmax_running = 3\n[router]\nport = 81\n')
    up = baton("up", "--print-config", "--config", str(path), "--max-running", "5").stdout
    assert up.count("page_size = 8") == 2
    assert up.count('model = "m"') == 2
    assert up.count("max_running = 5") == 2
    assert "port = 81" in up
    decode = baton("decode", "--print-config", "--config", str(path)).stdout
    assert "max_running = 3" in decode
    assert "# page_size is not set" in decode, "[up] is for `baton up`"


def test_the_router_command_imports_no_torch() -> None:
    code = (
        "import sys; from baton.deploy import cli; cli.main(['router', '--print-config']);"
        "bad = {'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_baton_up_finds_the_drafter_without_torch() -> None:
    code = (
        "import argparse, sys; from baton.deploy import launcher; from baton.deploy.up import make_plan;"
        "assert make_plan(argparse.Namespace(), {}, {}).settled().speculation.startswith('eagle');"
        "bad = {'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_main_takes_arguments_and_returns_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")
    assert cli.main(["up", "--no-such"]) == 2


@pytest.mark.parametrize(
    ("role", "is_caught"), [("router", False), ("prefill", False), ("decode", False), ("decode", True)]
)
def test_sigterm_before_it_serves_ends_a_process_with_status_0(
    role: str, is_caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that stops a node while it loads sees a normal end. What was opened is closed, though that takes
    time. A library that catches the exception while it is imported does not keep the node."""
    monkeypatch.setattr(cli, "_LEAVE_AGAIN_S", 0.02)
    closed: list[str] = []

    def load(_: list[str]) -> int:
        try:
            with suppress(SystemExit if is_caught else ()):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            time.sleep(10)
        finally:
            time.sleep(0.1)
            closed.append(role)
        return 1

    monkeypatch.setattr(cli, "_run", load)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main([role])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 0 and closed == [role]
