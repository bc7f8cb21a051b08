"""File descriptors reach the inbox of another process of the same user, and neither process waits for the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.metadata.errors import TransferError
from baton.metadata.handoff import descriptors
from baton.metadata.handoff.descriptors import MAX_DESCRIPTORS, MAX_KEPT, DescriptorInbox, new_token, send_descriptors


@pytest.fixture
def inbox() -> Iterator[DescriptorInbox]:
    inbox = DescriptorInbox()
    yield inbox
    inbox.close()


def num_open(path: str = "") -> int:
    """Return how many descriptors this process has open; if `path` is given, only those of that file."""
    links = Path("/proc/self/fd").iterdir()
    return sum(not path or os.path.realpath(link) == path for link in links)


def send_text(inbox: str, token: bytes, text: bytes) -> None:
    read, write = os.pipe()
    os.write(write, text)
    os.close(write)
    try:
        send_descriptors(inbox, token, [read])
    finally:
        os.close(read)


def take_text(inbox: DescriptorInbox, token: bytes) -> bytes:
    [descriptor] = inbox.take(token)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_descriptors_are_taken_in_any_order(inbox: DescriptorInbox) -> None:
    tokens = [new_token() for _ in range(3)]
    for number, token in enumerate(tokens):
        send_text(inbox.address, token, b"%d" % number)
    assert [take_text(inbox, token) for token in reversed(tokens)] == [b"2", b"1", b"0"]
    with pytest.raises(TransferError, match="did not arrive"):
        inbox.take(tokens[0])


def test_another_process_can_send(inbox: DescriptorInbox) -> None:
    token = new_token()
    code = f"""
import os
from baton.metadata.handoff.descriptors import send_descriptors
fd = os.memfd_create("x")
os.write(fd, b"from afar")
send_descriptors({inbox.address!r}, {token!r}, [fd])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    [descriptor] = inbox.take(token)
    assert os.pread(descriptor, 99, 0) == b"from afar" and not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_a_sender_that_is_slow_is_heard_later(inbox: DescriptorInbox) -> None:
    """It has connected, and the descriptors of another sender come first."""
    token, other = new_token(), new_token()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as slow:
        slow.connect("\0" + inbox.address)
        send_text(inbox.address, other, b"other")
        assert take_text(inbox, other) == b"other"
        with Path("/dev/null").open("rb") as file:
            socket.send_fds(slow, [token], [file.fileno()])
    [descriptor] = inbox.take(token)
    os.close(descriptor)


@pytest.mark.parametrize("bytes_sent", [b"", b"short", bytes(17)])
@pytest.mark.parametrize("num_sent", [0, 1, 2, 5])
def test_nonsense_leaves_nothing_open(inbox: DescriptorInbox, bytes_sent: bytes, num_sent: int) -> None:
    before = num_open(os.devnull)  # other files of this process come and go
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, Path("/dev/null").open("rb") as file:
        peer.connect("\0" + inbox.address)
        socket.send_fds(peer, [bytes_sent], [file.fileno()] * num_sent)
    with pytest.raises(TransferError):
        inbox.take(bytes_sent)
    assert num_open(os.devnull) == before


def test_a_message_with_too_many_descriptors_is_dropped(inbox: DescriptorInbox) -> None:
    before, token = num_open(), new_token()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, Path("/dev/null").open("rb") as file:
        peer.connect("\0" + inbox.address)
        socket.send_fds(peer, [token], [file.fileno()] * (MAX_DESCRIPTORS + 1))
    with pytest.raises(TransferError):
        inbox.take(token)
    assert num_open() == before


def test_a_token_that_comes_twice_keeps_the_first(inbox: DescriptorInbox) -> None:
    token = new_token()
    send_text(inbox.address, token, b"first")
    send_text(inbox.address, token, b"second")
    assert take_text(inbox, token) == b"first"


def test_descriptors_that_are_never_taken_do_not_pile_up(inbox: DescriptorInbox) -> None:
    before = num_open()
    for _ in range(5):
        for _ in range(MAX_KEPT):
            send_text(inbox.address, new_token(), b"")
        with pytest.raises(TransferError):
            inbox.take(new_token())
    assert num_open() - before <= MAX_KEPT
    inbox.close()
    assert num_open() < before


def test_a_full_inbox_is_an_error_not_a_wait(inbox: DescriptorInbox) -> None:
    with pytest.raises(TransferError, match="cannot send descriptors"):
        for _ in range(1000):
            send_text(inbox.address, new_token(), b"")


def test_an_inbox_that_is_gone_is_an_error(inbox: DescriptorInbox) -> None:
    inbox.close()
    inbox.close()
    with pytest.raises(TransferError, match="Connection refused"):
        send_text(inbox.address, new_token(), b"")


def test_both_ends_refuse_another_user(inbox: DescriptorInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    uid, token = os.getuid(), new_token()
    monkeypatch.setattr(descriptors.os, "getuid", lambda: uid + 1)
    with pytest.raises(TransferError, match=f"belongs to user id {uid}, not {uid + 1}"):
        send_text(inbox.address, token, b"")
    monkeypatch.undo()
    send_text(inbox.address, token, b"")
    monkeypatch.setattr(descriptors.os, "getuid", lambda: uid + 1)
    with pytest.raises(TransferError, match="did not arrive"):
        inbox.take(token)
