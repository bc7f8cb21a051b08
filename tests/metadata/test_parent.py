"""A process ends with its parent, also if it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
from patience import wait_until

CHILD = """
import os, time
from baton.metadata.parent import die_with
die_with({parent})
print("on", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}.format(parent=os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_stopped_child_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.send_signal(signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: _has_ended(child), "the child has ended")


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    program = CHILD.format(parent=os.getpid() + 1)
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=100).returncode == 1
