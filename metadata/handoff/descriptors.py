"""File descriptors sent between processes of one user on one host.

A ZeroMQ message cannot carry a descriptor, but a Unix socket can (SCM_RIGHTS, unix(7)). The receiver owns an inbox. The
sender puts descriptors into the inbox under a token of its choice, and then tells the token by a message over the data
link:

    prefill: send_descriptors(inbox, token, fds)  -- Unix socket -->  the inbox keeps them
    prefill: CudaWelcome(token)                   -- data link ----->  decode: inbox.take(token)

Neither side waits for the other: connecting and sending succeed before the receiver looks. Both ends check that the
other process belongs to the same user. The token proves that the descriptors come from the peer of the link.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections import deque

from ..errors import TransferError

TOKEN_LEN = 16
MAX_DESCRIPTORS = 32  # one per pool of each rank
MAX_KEPT = 64  # deliveries that were not taken; beyond this the oldest are closed
_BACKLOG = 64
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def new_token() -> bytes:
    """Return a token that nobody can guess."""
    return secrets.token_bytes(TOKEN_LEN)


class DescriptorInbox:
    """Receives descriptors for this process at `address`, an abstract socket name that vanishes with the process.
    Raises OSError if the system has no such sockets. The owner calls `close`."""

    def __init__(self) -> None:
        self.address = f"baton-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind("\0" + self.address)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
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
        self._socket.close()
        for connection in self._silent:
            connection.close()
        self._silent.clear()
        self._discard_kept()

    def _discard_kept(self) -> None:
        while self._kept:
            self._discard(next(iter(self._kept)))

    def _look(self) -> None:
        """Receive deliveries that have arrived. The number of kept deliveries and silent connections is bounded."""
        with contextlib.suppress(OSError):  # the sender is gone, or this process has no descriptor left
            for _ in range(2 * _BACKLOG):
                connection, _ = self._socket.accept()
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


def send_descriptors(inbox: str, token: bytes, descriptors: list[int]) -> None:
    """Put descriptors into the inbox of another process. They stay open here. Does not wait.

    Raises TransferError if there is no such inbox, if it is full, or if it belongs to another user.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            connection.connect("\0" + inbox)
            uid = _uid(connection)
            if uid != os.getuid():
                raise TransferError(f"the peer's inbox belongs to user id {uid}, not {os.getuid()}")
            socket.send_fds(connection, [token], descriptors)
    except OSError as error:
        raise TransferError(f"cannot send descriptors to the peer's inbox: {error.strerror}") from error


def _uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
