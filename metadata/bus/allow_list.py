"""The allow-list: a file that lists each process that may connect, by name and public key. All processes have the same
file. A line is `NAME KEY`:

    router     rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7
    prefill-0  Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID   # host1, rack 7

The name is the process's node id. A router is called `router`, or `router-NAME` if several routers have keys of their
own. A process may connect only if its key is listed, and may speak only under the name beside that key. A node that
connects to a router expects one of the routers' keys. If a line is removed, its process is disconnected. A changed file
is read again at every handshake, for every message from an unknown key, and about once per second.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zmq.utils import z85

from ..errors import ConfigError, ProtocolError
from ..logs import Throttle

logger = logging.getLogger(__name__)

ROUTER = "router"
ROUTER_PREFIX = "router-"  # of the names of routers that have a key of their own
KEY_LEN = 40  # a 32-byte key in Z85
CHECK_S = 0.9  # a little less than a second, for callers that ask once per second
MAX_BYTES = 1 << 20
MAX_NAME = 128
RANK = "/rank-"  # in the node id of rank 1 or above of a group, between the name of the group and the rank

_HEADER = "# Baton allow-list, one line per process: NAME PUBLIC-KEY. No secrets. A removed process is shut out.\n"
_Seen = tuple[int, int, int]  # identity of a file's contents: mtime in ns, inode, size in bytes


def is_key(text: str) -> bool:
    """Return whether the text is a CURVE key: 32 bytes in Z85."""
    try:
        return len(text) == KEY_LEN and len(z85.decode(text)) == 32
    except (ValueError, KeyError, struct.error):
        return False


def is_router(name: str) -> bool:
    """Return whether a key of this name is a router's."""
    return name == ROUTER or name.startswith(ROUTER_PREFIX)


class AllowList:
    """The list in a file, as last read. Threads may share it.

    Raises ConfigError, naming file, line and fix, if the file cannot be used at first. If it becomes unusable later,
    the list read before stays in force, and the log says why.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._due = Throttle(CHECK_S, clock)
        self._lock = threading.Lock()
        self._complaint = ""
        self._seen, self._keys = _read(self.path)
        self._names = {key: name for name, key in self._keys.items()}

    def key_of(self, name: str) -> bytes | None:
        """Return the public key (40 bytes of Z85) with this name; None if there is none. The ranks of a group have the
        key of the group."""
        return self._keys.get(_holder(name))

    @property
    def router_names(self) -> tuple[str, ...]:
        """The names of all routers, sorted. There is at least one."""
        return tuple(sorted(filter(is_router, self._keys)))

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a public key; None if the key is not listed."""
        return self._names.get(key)

    def newest_name_of(self, key: bytes) -> str | None:
        """Return the name of a public key, as `name_of`, but read the file again before answering None."""
        name = self.name_of(key)
        if name is None:
            self.look()
            name = self.name_of(key)
        return name

    def server_key(self, name: str) -> bytes:
        """Return the key that a client must find at the server `name`. Raises ConfigError if the list has none."""
        key = self.key_of(name)
        if key is None:
            raise ConfigError(f"allow-list {self.path} names no key of {name!r}: add its line, `{name} KEY`")
        return key

    def require(self, name: str | None, node_id: str) -> None:
        """Raise ProtocolError unless the sender who calls itself `node_id` holds the key of that name. `name` is the
        name of the key that it proved at the handshake; None if that key is not listed (any more)."""
        if name is None:
            raise ProtocolError(f"the key of {node_id} is not in allow-list {self.path} any more")
        if name != _holder(node_id):
            raise ProtocolError(f"{node_id} has the key that allow-list {self.path} calls {name!r}")

    def is_due(self) -> bool:
        """About once per second, read the file again and return True: the caller may have to close connections."""
        if not self._due.is_due():
            return False
        self.look()
        return True

    def look(self) -> None:
        """Read the file again, if it has changed. An unusable file changes nothing and is logged."""
        with self._lock:
            try:
                if _seen(self.path.stat()) == self._seen:
                    return
                self._seen, keys = _read(self.path)
            except (ConfigError, OSError) as error:
                self._complain(str(error))
                return
            self._complaint = ""
            self._take(keys)

    def _take(self, keys: dict[str, bytes]) -> None:
        """Replace each table as a whole, so that other threads never see half of a change."""
        old, self._keys = self._keys, keys
        self._names = {key: name for name, key in keys.items()}
        gone = sorted(name for name, key in old.items() if keys.get(name) != key)
        new = sorted(name for name, key in keys.items() if old.get(name) != key)
        logger.warning("allow-list %s: shut out %s; let in %s", self.path, _words(gone), _words(new))

    def _complain(self, reason: str) -> None:
        if reason != self._complaint:
            self._complaint = reason
            logger.error("%s; what allow-list %s said before stays in force", reason, self.path)


def _holder(node_id: str) -> str:
    """Return the name of the key that a node has: its id, or the name of its group."""
    return node_id.partition(RANK)[0]


def with_line(path: str | Path, line: str) -> str:
    """Return the text of the list in `path`, or of a new one if the file is missing, with one more line. Raises
    ConfigError as AllowList does, and if the name or the key is listed already."""
    path = Path(path)
    text = _text(path)[1] if path.exists() else _HEADER
    text = (text if not text or text.endswith("\n") else text + "\n") + line
    _parse(path, text)
    return text


def add_line(path: str | Path, line: str) -> None:
    """Add a line (`line_of`) to the list in `path`. Raises ConfigError as `with_line` does, and if the file cannot be
    written."""
    text = with_line(path, line)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"allow-list {path} cannot be written: {error.strerror}") from error


def line_of(name: str, public: bytes) -> str:
    """Return the line of a key in a list."""
    return f"{name} {public.decode()}\n"


def _read(path: Path) -> tuple[_Seen, dict[str, bytes]]:
    seen, text = _text(path)
    keys = _parse(path, text)
    if not any(map(is_router, keys)):
        raise ConfigError(
            f"allow-list {path} has no line of a router's key, which every node needs: `{ROUTER} KEY`, or "
            f"`{ROUTER_PREFIX}NAME KEY` for each of several"
        )
    return seen, keys


def _text(path: Path) -> tuple[_Seen, str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"allow-list {path} cannot be read: {error.strerror}; `baton keys` makes one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"allow-list {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"allow-list {path} is longer than {MAX_BYTES} bytes")
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"allow-list {path} may be written by anybody: `chmod o-w {path}`")
    return _seen(status), text


def _parse(path: Path, text: str) -> dict[str, bytes]:
    """Return the keys by name."""
    keys: dict[str, bytes] = {}
    lines: dict[str | bytes, int] = {}  # line numbers by name and by key
    for number, line in enumerate(text.splitlines(), 1):
        name, *rest = line.split() or ("#",)
        if name.startswith("#"):
            continue
        where = f"allow-list {path}, line {number}: "
        key = rest[0] if rest else ""
        if not is_key(key) or (len(rest) > 1 and not rest[1].startswith("#")):  # a key itself may hold #
            raise ConfigError(
                f"{where}{line.strip()!r} is not `NAME KEY # remark` with a KEY of {KEY_LEN} Z85 characters"
            )
        if len(name) > MAX_NAME:
            raise ConfigError(f"{where}the name {name[:32]!r}... is longer than {MAX_NAME} characters")
        for word in (name, key.encode()):
            if word in lines:
                raise ConfigError(f"{where}{name!r} or its key stands in line {lines[word]} already: take one out")
            lines[word] = number
        keys[name] = key.encode()
    return keys


def _seen(status: os.stat_result) -> _Seen:
    return status.st_mtime_ns, status.st_ino, status.st_size


def _words(names: list[str]) -> str:
    return ", ".join(names) or "nobody"
