"""CURVE encryption between processes: either one key pair per process and an allow-list, or one pair for the whole
cluster.

Without an allow-list a server accepts exactly the clients that prove to hold its own pair. libzmq asks a handler in the
socket's context about every handshake (ZAP, RFC 27), and passes it the ZAP domain, a string that each server socket
sets. Here the domain is the one accepted public key, or it names an allow-list of this process. Sockets set
ZAP_ENFORCE_DOMAIN, so nobody gets in without a handler. Every later message carries its sender's key (`sender_key` in
sockets.py), so a key can be shut out while its connection is still open; libzmq does not close such connections.

A socket whose messages are sealed otherwise has guests in place of keys (`admit_guests`): peers to whom this process
has given a name and a password over another connection (libzmq's mechanism PLAIN).
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import zmq
from zmq.utils import z85

from ..config import ProcessConfig
from ..errors import ConfigError
from ..logs import Throttle
from .allow_list import KEY_LEN, AllowList, is_key

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
# No status of RFC 27. After "300" libzmq closes the connection only if the answer was there when it first looked; else
# it keeps it open for HANDSHAKE_MS. After "400" the client never tries again. After an answer that breaks the protocol
# libzmq closes the connection at once, and the client tries again.
_CLOSE = b"close"
_REFUSAL_LOG_S = 5.0
_refusals = Throttle(_REFUSAL_LOG_S)
_lists: WeakValueDictionary[bytes, AllowList] = WeakValueDictionary()  # by ZAP domain


class Guests(Protocol):
    """The peers that may connect to a socket without keys."""

    def admits(self, name: bytes, password: bytes) -> bool:
        """Return whether the guest may connect. The handler's thread calls it, once per connection."""
        ...


_guests: WeakValueDictionary[bytes, Guests] = WeakValueDictionary()  # by ZAP domain


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's CURVE key pair, each key 40 bytes of Z85 text. Without an allow-list it is the whole cluster's."""

    public: bytes
    secret: bytes = field(repr=False)
    allow_list: AllowList | None = field(default=None, repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """Return a new pair, in memory only."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    @classmethod
    def create(cls, path: str | Path) -> KeyPair:
        """Write a new pair to `path`, readable only by its owner, and return it. Raises ConfigError as `write` does."""
        keys = cls.generate()
        keys.write(path)
        return keys

    def write(self, path: str | Path) -> None:
        """Write this pair to `path`, readable only by its owner. Raises ConfigError if the file exists or cannot be
        written."""
        text = (
            "# Key pair of a Baton process, or of a whole cluster: whoever holds this file can join as it.\n"
            f'public = "{self.public.decode()}"\nsecret = "{self.secret.decode()}"\n'
        )
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"key file {path} exists already; remove it first, or use it") from None
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be written: {error.strerror}") from error
        with os.fdopen(handle, "w") as file:
            file.write(text)

    @classmethod
    def load(cls, path: str | Path, allow_list: str | Path | None = None) -> KeyPair:
        """Read a pair written by `write`, and the allow-list, which must name it. Raises ConfigError if a file is
        missing, unreadable or malformed, if others may read the pair, or if the two keys do not belong together."""
        try:
            with Path(path).open("rb") as file:
                status = os.fstat(file.fileno())
                data: dict[str, Any] = tomllib.load(file)
        except OSError as error:
            raise ConfigError(
                f"key file {path} cannot be read: {error.strerror}; `baton keys {path}` makes one"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {path} is malformed: {error}; it is no file of `baton keys`") from error
        if not {"public", "secret"} & data.keys():
            raise ConfigError(
                f"key file {path} is malformed: it is no file of `baton keys`, which has public and secret"
            )
        _require_private(path, status)
        public, secret = _key(path, data, "public"), _key(path, data, "secret")
        if zmq.curve_public(secret) != public:
            raise ConfigError(f"key file {path} is malformed: public is not the public key of secret")
        keys = cls(public, secret)
        return keys if allow_list is None else keys.listed(AllowList(allow_list), path)

    @classmethod
    def configured(cls, config: ProcessConfig) -> KeyPair | None:
        """Return the pair that a process is configured with; None if it has none. Raises ConfigError as `load` does."""
        if config.keys is None and config.allow_list is not None:
            raise ConfigError(f"--allow-list {config.allow_list} needs a key of this process: give --keys FILE")
        return None if config.keys is None else cls.load(config.keys, config.allow_list)

    def listed(self, allow_list: AllowList, path: str | Path = "") -> KeyPair:
        """Return the pair with an allow-list. Raises ConfigError if the list does not name it. `path` is for the
        message."""
        if allow_list.name_of(self.public) is None:
            line = f"NAME {self.public.decode()}"
            raise ConfigError(f"the key of {path} is not in allow-list {allow_list.path}: add its line, `{line}`")
        return replace(self, allow_list=allow_list)

    @property
    def name(self) -> str | None:
        """This process's name in the allow-list; None if there is no list."""
        return None if self.allow_list is None else self.allow_list.name_of(self.public)

    def server_key(self, name: str) -> bytes:
        """Return the public key of the server `name`. Raises ConfigError if the allow-list has none."""
        return self.public if self.allow_list is None else self.allow_list.server_key(name)


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Make a socket, before it binds, accept only clients that hold `keys`, or a key in their allow-list. Start the
    handler of its context: one thread, which ends when the context is terminated. The caller must keep the allow-list
    alive; without it nobody gets in."""
    _start_handler(cast("zmq.Context[zmq.Socket[bytes]]", socket.context))
    domain = keys.public
    if keys.allow_list is not None:
        domain = secrets.token_hex(8).encode()
        _lists[domain] = keys.allow_list
    socket.curve_server = 1
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = domain
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def admit_guests(socket: zmq.Socket[bytes], guests: Guests) -> None:
    """Make a socket, before it binds, accept only these guests, without encryption. Messages carry the guest's name as
    `sender_key` in sockets.py says. The caller must keep `guests` alive; without it nobody gets in."""
    _start_handler(cast("zmq.Context[zmq.Socket[bytes]]", socket.context))
    domain = secrets.token_hex(8).encode()
    _guests[domain] = guests
    socket.plain_server = 1
    socket.zap_domain = domain
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], keys: KeyPair, server_key: bytes) -> None:
    """Make a socket, before it connects, speak only to the server with this public key."""
    socket.curve_serverkey = server_key
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret


def _require_private(path: str | Path, status: os.stat_result) -> None:
    """Raise ConfigError unless only the owner may read a secret. If the owner is root, the group may read it too,
    because Kubernetes mounts secrets so."""
    others = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid == 0 and os.geteuid() != 0:
        others &= ~stat.S_IRGRP
    if status.st_mode & others:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"key file {path} may be read by others than its owner (mode {mode:o}): `chmod 600 {path}`")


def _key(path: str | Path, data: dict[str, Any], name: str) -> bytes:
    value = data.get(name)
    if isinstance(value, str) and is_key(value):
        return value.encode("ascii")
    raise ConfigError(f"key file {path} is malformed: {name} is not a key of {KEY_LEN} Z85 characters")


def _start_handler(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    # A shadow context, because Context.destroy() would close this socket while its thread uses it.
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
    socket = shadow.socket(zmq.REP)
    socket.linger = 0
    try:
        socket.bind(_ZAP_ENDPOINT)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == zmq.EADDRINUSE:  # this context has a handler already
            return
        raise
    threading.Thread(target=_serve_handler, args=(socket,), name="baton-zap", daemon=True).start()


def _serve_handler(socket: zmq.Socket[bytes]) -> None:
    try:
        while True:
            socket.send_multipart(_answer(socket.recv_multipart()))
    except zmq.ContextTerminated:
        pass
    finally:
        socket.close()


def _answer(request: list[bytes]) -> list[bytes]:
    # request: version, request id, domain, address, identity, mechanism, credentials
    is_accepted, who = False, b""
    match request:
        case [b"1.0", _, domain, address, _, b"CURVE", key] if len(key) == 32:
            who = z85.encode(key)
            is_accepted = _is_accepted(who, domain, address)
        case [b"1.0", _, domain, _, _, b"PLAIN", who, password]:
            is_accepted = _is_guest(domain, who, password)
        case _:
            pass
    request_id = request[1] if len(request) > 1 else b""
    if not is_accepted:
        return [_ZAP_VERSION, request_id, _CLOSE, b"not an accepted key or guest", b"", b""]
    return [_ZAP_VERSION, request_id, b"200", b"OK", who, b""]


def _is_guest(domain: bytes, name: bytes, password: bytes) -> bool:
    guests = _guests.get(domain)
    return guests is not None and guests.admits(name, password)


def _is_accepted(key: bytes, domain: bytes, address: bytes) -> bool:
    allow_list = _lists.get(domain)
    if allow_list is None:
        is_accepted, where = key == domain, "the cluster's own"
    else:
        allow_list.look()
        is_accepted, where = allow_list.name_of(key) is not None, f"in allow-list {allow_list.path}"
    if not is_accepted and _refusals.is_due():
        peer = address.decode(errors="replace")
        logger.warning(
            "refused a peer at the handshake, from %s: its public key %s is not %s", peer, key.decode(), where
        )
    return is_accepted
