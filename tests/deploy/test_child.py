"""A child process: its log is read line by line, and it dies with its parent."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from patience import wait_until

from baton.deploy.child import Child, Command

SLEEPER = "import time; print('loading', flush=True); time.sleep(600)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = f"from baton.deploy.child import die_with_parent; die_with_parent(); {SLEEPER}"
    parent = textwrap.dedent(f"""
        import pathlib, sys, time
        from baton.deploy.child import Child, Command
        from baton.deploy.up import Command
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
    wait_until(lambda: not _is_alive(pid), "the child has ended")


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # in a container orphans may never be reaped
    except psutil.NoSuchProcess:
        return False


def test_the_log_is_read_line_by_line(tmp_path: Path) -> None:
    child = Child(Command("decode-0", "decode", [], {}), tmp_path)
    child.log_path.write_bytes("one\ntwö".encode()[:-1])
    assert child.new_lines() == ["one"]
    with child.log_path.open("ab") as log:
        log.write("ö".encode()[1:] + b"\n")
    assert child.new_lines() == ["twö"]
    assert child.new_lines() == []


def test_the_lines_of_a_log_that_was_cut_are_read_from_its_start(tmp_path: Path) -> None:
    child = Child(Command("decode-0", "decode", [], {}), tmp_path)
    for cut in ("1 one\n", "2\n", "3 is longer than before\n4\n"):
        child.log_path.write_text(cut)
        assert child.new_lines() == cut.splitlines()
    assert child.new_lines() == []


def test_a_flag_is_left_out_at_the_next_start(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--expect=a=1", "--expected=2"]
    child = Child(Command("router", "router", argv, {}), tmp_path)
    for shown in ("['--expect=a=1', '--expected=2']", "['--expected=2']"):
        child.start()
        wait_until(lambda: not child.is_running, "the child has ended")
        assert child.tail()[-1].strip() == shown
        child.forget("--expect")


def test_a_log_may_be_cut_while_its_process_writes(tmp_path: Path) -> None:
    """logrotate does so with `copytruncate`."""
    # each line is one write, so that the cut divides none
    writer = "import time, sys; sys.stdout.write('a long first line\\n'); time.sleep(0.01)\n"
    writer += "while True: sys.stdout.write('x\\n'); time.sleep(0.01)"
    child = Child(Command("router", "router", [sys.executable, "-c", writer], {}), tmp_path)
    child.start()
    try:
        wait_until(lambda: "x" in child.new_lines())
        child.log_path.write_bytes(b"")
        wait_until(lambda: "x" in child.new_lines())
        assert set(child.tail()) == {"x"}, "no hole stands before what is written after"
    finally:
        child.kill()
