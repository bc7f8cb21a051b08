"""File descriptors sent between processes of one user on one host.

A ZeroMQ message cannot carry a descriptor, but a Unix socket can (SCM_RIGHTS, unix(7)). The receiver owns an inbox. The
sender puts descriptors into the inbox under a token of its choice, and then tells the token by a message over the data
link:

    prefill: send_descriptors(inbox, token, fds)  -- Unix socket -->  the inbox keeps them
    prefill: CudaWelcome(token)                   -- data link ----->  decode: inbox.take(token)

    prefill: LinkWelcome(token)                   -- data link ----->  decode: inbox.take(token)

Neither side waits for the other: connecting and sending succeed before the receiver looks. Both ends check that the
other process belongs to the same user. The token proves that the descriptors come from the peer of the link.

An inbox has a random name, which the hello of the data link tells. It is an abstract socket, which all processes of a
network namespace reach, such as the containers of a pod. If there is a shared directory, it is also a socket file
there, which containers of other pods reach if they mount the directory. So whether two nodes can share memory is tried,
not derived from what they say about their hosts: `inbox_in_reach`. That proves that the other end is a process of this
user. Only the peer of the link knows the name and the token.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Generator
from pathlib import Path

from ..errors import ConfigError, TransferError

TOKEN_LEN = 16
MAX_DESCRIPTORS = 32  # one per pool of each rank
MAX_KEPT = 64  # deliveries that were not taken; beyond this the oldest are closed
_BACKLOG = 64
_MOST_PATH = 107  # bytes of a socket's path, unix(7)
_NAME_LEN = len("baton-") + 32
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def new_token() -> bytes:
    """Return a token that nobody can guess."""
    return secrets.token_bytes(TOKEN_LEN)


def user_directory(shared: str) -> Path:
    """Return the directory of this user in a directory that containers share, made if need be. It lets nobody else in.
    Files of inboxes whose processes have ended are removed.

    Raises ConfigError if it cannot be made, is another user's, or lets others in.
    """
    path = Path(shared).absolute() / f"baton-{os.getuid()}"
    too_long = len(os.fsencode(path / ("x" * _NAME_LEN))) - _MOST_PATH
    if too_long > 0:
        raise ConfigError(f"--shared-dir {shared} is too long for a socket: name one that is {too_long} bytes shorter")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"--shared-dir {shared}: {error.strerror}; name one that this user can write") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"--shared-dir {shared}: {path.name} in it has mode {stat.S_IMODE(status.st_mode):03o} and belongs to user "
            f"id {status.st_uid}; it must be a directory of user id {os.getuid()} with mode 700: remove it"
        )
    for left in path.glob("baton-*"):
        _remove_if_left(left)
    return path


class DescriptorInbox:
    """Receives descriptors for this process at the name `address`: an abstract socket that vanishes with the process,
    and a socket file of that name in the `directory` of this user, if there is one. Raises OSError if the system has no
    such sockets. The owner calls `close`."""

    def __init__(self, directory: Path | None = None) -> None:
        self.address = f"baton-{secrets.token_hex(16)}"
        self._file = None if directory is None else directory / self.address
        self._sockets: list[socket.socket] = []
        try:
            self._listen("\0" + self.address)
            if self._file is not None:
                begun = self._file.with_name(f".{self._file.name[:-1]}")
                self._listen(str(begun))
                begun.rename(self._file)  # whoever finds the name can connect
        except OSError:
            self._close_sockets()
            raise
        self._silent: deque[socket.socket] = deque()  # connected, but nothing has arrived yet
        self._kept: dict[bytes, list[int]] = {}

    def take(self, token: bytes) -> list[int]:
        """Return the descriptors that came with the token. The caller closes them.

        Raises TransferError if none came. Does not wait, because the sender sends them before it tells the token.
        """
        self._look()
        descriptors = self._kept.pop(token, None)
        if descriptors is None:
            raise TransferError("the peer's file descriptors did not arrive in this node's inbox")
        return descriptors

    def discard(self) -> None:
        """Close descriptors that arrived and were not taken. The caller makes sure that no link waits for any: a
        descriptor keeps its owner's memory allocated, even after the owner has ended."""
        self._look()
        self._discard_kept()

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken. May be called twice."""
        self._close_sockets()
        for connection in self._silent:
            connection.close()
        self._silent.clear()
        self._discard_kept()

    def _listen(self, name: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(listener)
        listener.setblocking(False)
        listener.bind(name)
        listener.listen(_BACKLOG)

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _discard_kept(self) -> None:
        while self._kept:
            self._discard(next(iter(self._kept)))

    def _look(self) -> None:
        """Receive deliveries that have arrived. The number of kept deliveries and silent connections is bounded."""
        for listener in self._sockets:
            with contextlib.suppress(OSError):  # the sender is gone, or this process has no descriptor left
                for _ in range(2 * _BACKLOG):
                    connection, _ = listener.accept()
                    if _uid(connection) == os.getuid():
                        self._silent.append(connection)
                    else:
                        connection.close()
        for _ in range(len(self._silent)):
            connection = self._silent.popleft()
            if not self._receive(connection):
                self._silent.append(connection)
        while len(self._silent) > MAX_KEPT:
            self._silent.popleft().close()
        while len(self._kept) > MAX_KEPT:
            self._discard(next(iter(self._kept)))

    def _receive(self, connection: socket.socket) -> bool:
        """Read one delivery and close the connection. Return False if nothing has arrived yet."""
        try:
            token, parts, flags, _ = connection.recvmsg(  # socket.recv_fds forgets the flags
                TOKEN_LEN + 1,
                socket.CMSG_LEN(MAX_DESCRIPTORS * _INT.size),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return False
        except OSError:
            connection.close()
            return True
        connection.close()
        descriptors = [number for *_, data in parts for (number,) in _INT.iter_unpack(data[: len(data) // 4 * 4])]
        if len(token) == TOKEN_LEN and not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) and token not in self._kept:
            self._kept[token] = descriptors
        else:
            _close_all(descriptors)
        return True

    def _discard(self, token: bytes) -> None:
        _close_all(self._kept.pop(token))


def inbox_in_reach(name: str, directory: Path | None) -> str:
    """Return where this process reaches the inbox of this name: the file in the user's `directory`, or the name of the
    abstract socket; "" if it reaches neither, so that the two processes can share no memory. Does not wait."""
    for place in () if not name else (name,) if directory is None else (str(directory / name), name):
        with contextlib.suppress(TransferError), _connected(place):
            return place
    return ""


def send_descriptors(inbox: str, token: bytes, descriptors: list[int]) -> None:
    """Put descriptors into the inbox of another process, which is where `inbox_in_reach` says. They stay open here.
    Does not wait.

    Raises TransferError if there is no such inbox, if it is full, or if it belongs to another user.
    """
    with _connected(inbox) as connection:
        socket.send_fds(connection, [token], descriptors)


@contextlib.contextmanager
def _connected(inbox: str) -> Generator[socket.socket]:
    """Return a connection to an inbox of this user. OSErrors of the block, too, are raised as TransferError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            connection.connect(inbox if inbox.startswith("/") else "\0" + inbox)
            uid = _uid(connection)
            if uid != os.getuid():
                raise TransferError(f"the peer's inbox belongs to user id {uid}, not {os.getuid()}")
            yield connection
    except OSError as error:
        raise TransferError(f"cannot send descriptors to the peer's inbox: {error.strerror}") from error


def _remove_if_left(path: Path) -> None:
    """Remove the file of an inbox if nobody listens there any more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        if connection.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()


def _uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
