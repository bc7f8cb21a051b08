"""What a process writes to the socket of its service manager."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from baton.metadata import service_manager
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
