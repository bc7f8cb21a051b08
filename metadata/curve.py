"""CURVE between processes: one key pair file per cluster, used by every process both as server and as client.

A server accepts exactly the clients that prove to hold the cluster's own key. libzmq asks a handler in the socket's
context (ZAP, RFC 27) about every handshake; ours keeps no state: the ZAP domain of a server socket *is* the one
public key it accepts. Sockets set ZAP_ENFORCE_DOMAIN, so that without a handler nobody gets in.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import zmq
from zmq.utils import z85

from .errors import ConfigError

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_KEY_LEN = 40  # a 32-byte key in Z85


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both keys as 40 bytes of Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """A new pair, in memory only."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    @classmethod
    def create(cls, path: str | Path) -> KeyPair:
        """Writes a new pair to `path`, readable by its owner only. Raises ConfigError when the file exists already
        or cannot be written."""
        keys = cls.generate()
        text = (
            "# Key pair of one Baton cluster: whoever holds this file can join it.\n"
            f'public = "{keys.public.decode()}"\nsecret = "{keys.secret.decode()}"\n'
        )
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"key file {path} exists already; remove it first, or use it") from None
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be written: {error.strerror}") from error
        with os.fdopen(handle, "w") as file:
            file.write(text)
        return keys

    @classmethod
    def load(cls, path: str | Path) -> KeyPair:
        """Reads a pair written by `create`. Warns when others may read the file. Raises ConfigError when it is
        missing, unreadable or malformed, or when the keys are not a pair."""
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data: dict[str, Any] = tomllib.load(file)
        except OSError as error:
            raise ConfigError(
                f"key file {path} cannot be read: {error.strerror}; `baton keys {path}` makes one"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {path} is malformed: {error}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("key file %s may be read by others (mode %o); chmod 600 it", path, stat.S_IMODE(mode))
        public, secret = _key(path, data, "public"), _key(path, data, "secret")
        if zmq.curve_public(secret) != public:
            raise ConfigError(f"key file {path} is malformed: public is not the public key of secret")
        return cls(public, secret)


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Makes a socket, before it binds, accept only clients that hold `keys`, and starts the handler of its context
    (one thread, which ends when the context is terminated)."""
    _start_handler(cast("zmq.Context[zmq.Socket[bytes]]", socket.context))
    socket.curve_server = 1
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = keys.public
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Makes a socket, before it connects, speak only to servers that hold `keys`."""
    socket.curve_serverkey = keys.public
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret


def _key(path: str | Path, data: dict[str, Any], name: str) -> bytes:
    value = data.get(name)
    try:
        if isinstance(value, str) and len(value) == _KEY_LEN and len(z85.decode(value)) == 32:
            return value.encode("ascii")
    except (ValueError, KeyError):
        pass
    raise ConfigError(f"key file {path} is malformed: {name} is not a key of {_KEY_LEN} Z85 characters")


def _start_handler(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    # A shadow context, because Context.destroy() would close this socket under its thread's feet.
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
    socket = shadow.socket(zmq.REP)
    socket.linger = 0
    try:
        socket.bind(_ZAP_ENDPOINT)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == zmq.EADDRINUSE:  # this context has its handler already
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
    # request: version, request id, domain, address, identity, mechanism, credentials (CURVE: one key of 32 bytes)
    request_id = request[1] if len(request) > 1 else b""
    accepted = (
        len(request) == 7
        and request[0] == _ZAP_VERSION
        and request[5] == b"CURVE"
        and len(request[6]) == 32
        and z85.encode(request[6]) == request[2]
    )
    if not accepted:
        logger.debug("handshake refused: the peer's key is not the cluster's")
    code, text = (b"200", b"OK") if accepted else (b"400", b"not the cluster's key")
    return [_ZAP_VERSION, request_id, code, text, b"", b""]
