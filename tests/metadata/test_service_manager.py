"""What a process writes to the socket of its service manager."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from baton.metadata import service_manager
from baton.metadata.logs import Throttle
from baton.metadata.service_manager import forget, notify


def test_states_and_words_reach_the_socket_and_nothing_fails_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify("ready", "nobody listens yet")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(10)
        notify("ready", "serves\non 1")
        assert manager.recv(999) == b"READY=1\nSTATUS=serves on 1"
        notify("stopping", limit_s=30.0)
        assert manager.recv(999) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=40000000"
        notify("starting", "loading weights")
        assert manager.recv(999) == b"EXTEND_TIMEOUT_USEC=300000000\nSTATUS=loading weights"
        notify("alive")
        notify("alive")  # not twice in a second
        forget()
        notify("ready", "a child")
        assert manager.recv(999) == b"WATCHDOG=1"
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(999)


def test_a_process_without_a_free_descriptor_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr(service_manager.socket, "socket", no_socket)
    notify("ready")


def test_probes_read_files_that_follow_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that starts again finds what its last start has left."""
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path))
    ready, alive = tmp_path / "ready", tmp_path / "alive"
    ready.touch()
    notify("starting", "loading weights")
    assert not ready.exists()
    notify("ready")
    assert ready.exists()
    os.utime(alive, (0, 0))
    monkeypatch.setattr(service_manager, "_alive", Throttle(1.0))
    notify("alive")
    assert alive.stat().st_mtime > 0
    notify(words="has lost the router")
    assert ready.exists()
    notify("stopping", limit_s=30.0)
    assert not ready.exists()
    forget()
    notify("ready", "a child")
    assert not ready.exists()


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path / "missing"))
    notify("ready")
