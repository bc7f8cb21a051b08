"""File descriptors reach the inbox of another process of the same user, and neither process waits for the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from network import reason_against

from baton.metadata.errors import ConfigError, TransferError
from baton.metadata.handoff import descriptor_inbox
from baton.metadata.handoff.descriptor_inbox import (
    MAX_DESCRIPTORS,
    MAX_KEPT,
    DescriptorInbox,
    inbox_in_reach,
    new_token,
    send_descriptors,
    user_directory,
)


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
from baton.metadata.handoff.descriptor_inbox import send_descriptors
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
    monkeypatch.setattr(descriptor_inbox.os, "getuid", lambda: uid + 1)
    with pytest.raises(TransferError, match=f"belongs to user id {uid}, not {uid + 1}"):
        send_text(inbox.address, token, b"")
    monkeypatch.undo()
    send_text(inbox.address, token, b"")
    monkeypatch.setattr(descriptor_inbox.os, "getuid", lambda: uid + 1)
    with pytest.raises(TransferError, match="did not arrive"):
        inbox.take(token)


# --- reach ---


def in_new_network(code: str) -> str:
    """Return what this code prints in a process of another network namespace. Skips where there can be none."""
    if reason := reason_against():
        pytest.skip(reason)
    begun = f"from namespaces import NEW_NETWORK, unshare\nunshare(NEW_NETWORK)\n{code}"
    environ = {**os.environ, "PYTHONPATH": str(Path(namespaces.__file__).parent)}
    return subprocess.run([sys.executable, "-c", begun], check=True, capture_output=True, text=True, env=environ).stdout


def reach_from_afar(inbox: DescriptorInbox, directory: Path | None) -> str:
    return in_new_network(f"""
from pathlib import Path
from baton.metadata.handoff.descriptor_inbox import inbox_in_reach, new_token, send_descriptors
place = inbox_in_reach({inbox.address!r}, {f"Path({str(directory)!r})" if directory else None})
print(place)
if place:
    send_descriptors(place, b"t" * 16, [0])
""").strip()


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def shared(parent: Path) -> Path:
    return user_directory(str(parent))


def test_an_inbox_is_in_reach_of_its_own_network_namespace(inbox: DescriptorInbox) -> None:
    assert inbox_in_reach(inbox.address, None) == inbox.address
    assert inbox_in_reach("baton-" + "0" * 32, None) == ""
    assert inbox_in_reach("", None) == ""
    assert reach_from_afar(inbox, None) == ""


def test_a_shared_directory_reaches_other_network_namespaces(shared: Path) -> None:
    inbox = DescriptorInbox(shared)
    try:
        assert reach_from_afar(inbox, None) == ""
        assert reach_from_afar(inbox, shared) == str(shared / inbox.address)
        os.close(*inbox.take(b"t" * 16))
    finally:
        inbox.close()
    assert list(shared.iterdir()) == []
    assert inbox_in_reach(inbox.address, shared) == ""


def test_an_inbox_of_another_user_is_not_in_reach(inbox: DescriptorInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    monkeypatch.setattr(descriptor_inbox.os, "getuid", lambda: own + 1)
    assert inbox_in_reach(inbox.address, None) == ""


def test_files_of_inboxes_whose_processes_have_ended_are_removed(parent: Path, shared: Path) -> None:
    ended = shared / f"baton-{'e' * 32}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(ended))
    inbox = DescriptorInbox(shared)
    assert user_directory(str(parent)) == shared
    assert [path.name for path in shared.iterdir()] == [inbox.address]
    inbox.close()


def test_a_shared_directory_lets_nobody_else_in(parent: Path) -> None:
    made = user_directory(str(parent))
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match=r"has mode 750 .* with mode 700: remove it"):
        user_directory(str(parent))
    made.rmdir()
    made.symlink_to(parent)
    with pytest.raises(ConfigError, match="it must be a directory of user id"):
        user_directory(str(parent))


@pytest.mark.parametrize(
    ("shared", "words"),
    [("/no/such/directory", "No such file or directory; name one"), ("/tmp/" + "x" * 70, "too long for a socket")],
)
def test_a_shared_directory_that_cannot_be_used_is_refused(shared: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        user_directory(shared)
