"""Processes of ranks: they get frames in order, and none is left when one has failed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked import forked_ranks
from patience import load_factor, wait_until
from rank_functions import echo, fail, hang, hang_in_group, load_without_end

from baton.engine.ranks.group import CpuGroup
from baton.engine.ranks.processes import RankProcesses
from baton.metadata.errors import ModelError, RankLost

SUPPORT = Path(__file__).parents[2] / "support/ranks"


def _are_gone(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@contextmanager
def ready(size: int, run: Callable[..., None], *args: Any) -> Iterator[RankProcesses]:
    """Start the processes of `size` ranks, and wait until each has said that it is ready."""
    with forked_ranks(), RankProcesses(size, run, *args, timeout_s=60.0) as processes:
        processes.wait_ready()
        yield processes


def test_the_loss_of_a_rank_is_told_at_once_and_ends_the_node() -> None:
    """Rank 0 may wait for it on its GPU, where nothing else ends the wait."""
    told = threading.Event()
    with ready(2, echo) as processes:
        [pid] = processes.pids
        processes.when_lost(told.set)
        processes.watch()
        assert not told.wait(0.5)
        os.kill(pid, signal.SIGKILL)
        assert told.wait(2.0)
        with pytest.raises(RankLost, match=r"rank 1 .*exit code -9"), processes.surviving():
            raise RuntimeError("rank 0 waited too long")


def test_a_start_that_is_interrupted_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the node while it starts its ranks, which ignore signals: the exit would wait for them."""
    begin = RankProcesses._start

    def start(processes: RankProcesses, run: Callable[..., None], rank: int, args: tuple[Any, ...]) -> Any:
        if rank == 2:
            raise SystemExit(0)
        return begin(processes, run, rank, args)

    monkeypatch.setattr(RankProcesses, "_start", start)
    with forked_ranks(), pytest.raises(SystemExit):
        RankProcesses(3, echo, timeout_s=5.0)
    assert not multiprocessing.active_children()


def test_ranks_get_frames_in_order_and_leave_with_the_pipe() -> None:
    with ready(3, echo) as processes:
        pids = processes.pids
        assert len({os.getpid(), *pids}) == 3
        for number in range(4):
            for rank in (1, 2):
                processes.send(rank, bytes([number]))
        for rank in (1, 2):
            assert [processes.report(rank) for _ in range(4)] == [bytes([rank, number]) for number in range(4)]
        processes.check()
    assert _are_gone(pids)


def test_a_rank_that_dies_ends_all_with_one_error() -> None:
    with ready(3, echo) as processes:
        pids = processes.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"rank 2 \(process {pids[1]}\) ended with exit code -9"):
            processes.report(2)
        assert _are_gone(pids)


def test_an_idle_node_learns_of_a_dead_rank() -> None:
    with ready(2, echo) as processes:
        pids = processes.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="ended with exit code -9"):
            wait_until(processes.check, "the rank's end is noticed")
        assert _are_gone(pids)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ModelError, "ModelError: rank 1 has no model"),
        (ValueError, r"ValueError at \S+rank_functions.py:\d+;"),  # of a defect: the message may quote a prompt
    ],
)
def test_a_rank_that_cannot_start_says_why(kind: type[Exception], words: str) -> None:
    with (
        forked_ranks(),
        RankProcesses(2, fail, kind, timeout_s=60.0) as processes,
        pytest.raises(RankLost, match=words),
    ):
        processes.wait_ready()


def test_a_rank_that_does_not_answer_is_ended() -> None:
    """Its start may take longer."""
    with forked_ranks(), RankProcesses(2, hang, timeout_s=0.2) as processes:
        processes.wait_ready()
        processes.watch()
        pids = processes.pids
        with pytest.raises(RankLost, match=r"rank 1 did not answer within 0\.2 s; all ranks were ended"):
            processes.report(1)
        assert _are_gone(pids)


def test_a_rank_that_does_not_become_ready_is_ended() -> None:
    with (
        forked_ranks(),
        RankProcesses(2, load_without_end, timeout_s=60.0, start_timeout_s=0.2) as processes,
        pytest.raises(RankLost, match=r"rank 1 did not answer within 0\.2 s"),
    ):
        processes.wait_ready()


@pytest.mark.timing
def test_a_stopped_rank_is_ended_while_rank_0_waits_for_it_in_an_operation(tmp_path: Path) -> None:
    """The timeout of the group is a minute; the silence of the rank is noticed long before."""
    with ready(2, hang_in_group, str(tmp_path / "meeting")) as processes:
        processes.watch()
        pids = processes.pids
        group = CpuGroup(0, 2, tmp_path / "meeting")
        os.kill(pids[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"ended with exit code -9: it was silent for 3 s"), processes.guarded():
            group.sum(torch.ones(1))
        assert time.monotonic() - began < 10
        group.close()
        assert _are_gone(pids)


def test_a_rank_that_runs_is_not_silent() -> None:
    with ready(2, echo) as processes:
        processes.watch()
        time.sleep(3.5)
        processes.send(1, b"x")
        assert processes.report(1) == b"\x01x"


def _rank_0(path: Path, num_others: int, then: str) -> list[str]:
    """Return the command of a process that starts other ranks, prints their ids, and then does `then`."""
    path.write_text(f"""
import sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from rank_functions import echo
from baton.engine.ranks.processes import RankProcesses
if __name__ == "__main__":
    processes = RankProcesses({1 + num_others}, echo, timeout_s=60.0)
    processes.wait_ready()
    print(*processes.pids, flush=True)
    {then}
""")
    return [sys.executable, str(path)]


def test_no_rank_outlives_rank_0_not_even_a_stopped_one(tmp_path: Path) -> None:
    """Signals of a service manager do not end a rank, but the end of rank 0 does, however it comes."""
    command = _rank_0(tmp_path / "rank_0.py", 1, "time.sleep(600)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            assert rank_0.stdout is not None
            pids = [int(word) for word in rank_0.stdout.readline().split()]
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.3)
            assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        finally:
            rank_0.kill()
    wait_until(lambda: _are_gone(pids), f"{pids} have ended")


def test_rank_0_that_ends_by_itself_does_not_wait_for_ranks(tmp_path: Path) -> None:
    """An error that nobody catches ends the process, although nobody has stopped the ranks."""
    command = _rank_0(tmp_path / "rank_0.py", 1, "raise ValueError")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30 * load_factor(), check=False)
    assert ended.returncode == 1 and "ValueError" in ended.stderr
    wait_until(lambda: _are_gone([int(word) for word in ended.stdout.split()]), "the ranks have ended")


def test_a_rank_that_misses_an_operation_is_ended_after_the_timeout_of_the_group(tmp_path: Path) -> None:
    with ready(2, hang_in_group, str(tmp_path / "meeting")) as processes:
        pids = processes.pids
        group = CpuGroup(0, 2, tmp_path / "meeting", timeout_s=5.0)
        with pytest.raises(RankLost, match="rank 0 could not finish its work"), processes.guarded():
            group.sum(torch.ones(1))
        group.close()
        assert _are_gone(pids)
