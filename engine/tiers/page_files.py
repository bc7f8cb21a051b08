"""Files of cached pages: their format, and a directory that nobody else reads or leads astray.

    DIR/<model>-<n>/   0700, locked by the node that uses it
        <name>.page    0600: magic | digest | length of header | header | bytes of the slot, rank by rank
        <name>.tail    the same of a tail page

`<model>` is a digest of the weights' fingerprints and of the schema. `<name>` is the page's name
(metadata/cache/names.py) under that digest as the key. The header holds all that the name follows from, so that a node
compares tokens and not names alone. The digest, BLAKE2b of 128 bits over all that follows, finds damage. It does not
find a foreign hand: who can write the files can make the digest, too.

Files are opened in the opened directory, without following links. A file that is no such file, or is damaged, is
removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ...metadata.cache.names import PageNames
from ...metadata.errors import ConfigError

MAGIC = b"BATONKV1"
_DIGEST_BYTES = 16
_FIXED = len(MAGIC) + _DIGEST_BYTES + 4
_MOST_HEADER = 1 << 20
_MOST_NODES = 1024  # that share a directory

Kind = Literal["page", "tail"]


class PageHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a file. `PageFiles.name_of` makes the page's name from it."""

    kind: Kind
    salt: str  # of a first page; "" for others
    parent: bytes  # name of the page before; b"": it is a first page
    key: bytes  # its tokens and the next ones that its KV depends on, int32


class FoundFile(NamedTuple):
    """A file that an earlier node has left."""

    name: bytes
    header: PageHeader
    num_bytes: int
    age_s: float  # since it was written or read


_decode_header = msgspec.msgpack.Decoder(PageHeader).decode


class PageFiles:
    """The files of one node. All methods but the constructor are for one thread, and raise OSError if the disk
    fails."""

    def __init__(self, directory: str, model: bytes, names: PageNames, slot_bytes: dict[Kind, int]) -> None:
        """`model`: the digest in the name of the directory. `slot_bytes`: of each kind of page. Raises ConfigError if
        there is no such directory that is this user's alone."""
        self._names, self._slot_bytes = names, slot_bytes
        root = _opened(Path(directory).absolute(), None)
        try:
            self.path, self._fd, self._lock = _own_directory(Path(directory).absolute(), root, model.hex())
        finally:
            os.close(root)

    def close(self) -> None:
        """Let another node have the directory."""
        os.close(self._fd)
        os.close(self._lock)

    def name_of(self, header: PageHeader) -> bytes:
        """Return the name of the page that has this header."""
        return self._names.after(header.parent or self._names.before_first(header.salt), header.key)

    def write(self, name: bytes, header: PageHeader, slot: Sequence[np.ndarray]) -> int:
        """Write a file, which is whole or not there. `slot`: its bytes in parts, uint8, `slot_bytes` of them together.
        Return the file's size, bytes."""
        packed = msgspec.msgpack.encode(header)
        rest = [len(packed).to_bytes(4, "big"), packed, *(part.data for part in slot)]
        unfinished = f"{name.hex()}.new"
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFELY, 0o600, dir_fd=self._fd)
        try:
            try:
                size = sum(_write_all(handle, part) for part in (MAGIC, _digest(rest), *rest))
            finally:
                os.close(handle)
            os.rename(unfinished, _file_name(name, header.kind), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            self._unlink(unfinished)
            raise
        return size

    def read(self, name: bytes, header: PageHeader, slot: Sequence[np.ndarray]) -> bool:
        """Read a file into the parts of `slot`, as of `write`, and note that it was used. False: it is gone, damaged,
        or another page's; then it is removed, and the slot may hold anything."""
        file_name = _file_name(name, header.kind)
        try:
            with self._open(file_name) as handle:
                if _is_ours(handle) and _read_page(handle, header, slot):
                    os.utime(handle)
                    return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link, which is not followed
                raise
        self._unlink(file_name)
        return False

    def remove(self, name: bytes, kind: Kind) -> None:
        """Remove a file, if it is there."""
        self._unlink(_file_name(name, kind))

    def clear(self) -> None:
        """Remove all files."""
        for name in self._names_of_files():
            self._unlink(name)

    def find(self) -> list[FoundFile]:
        """Return the files that have a whole header of this model, each page behind the one before it. All others are
        removed."""
        found: dict[tuple[bytes, Kind], FoundFile] = {}
        os.utime(self._lock)
        now = os.fstat(self._lock).st_mtime
        for file_name in self._names_of_files():
            file = self._look(file_name, now)
            if file is None:
                self._unlink(file_name)
            else:
                found[file.name, file.header.kind] = file
        ordered = list(_parents_first(found))
        for name, kind in found.keys() - {(each.name, each.header.kind) for each in ordered}:
            self.remove(name, kind)
        return ordered

    def _look(self, file_name: str, now: float) -> FoundFile | None:
        """Read the header of a file. `now`: by the clock of the file system, seconds. None: it is no file of a page of
        this model."""
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError), self._open(file_name) as handle:
            status = os.fstat(handle)
            begin = os.read(handle, _FIXED)
            length = int.from_bytes(begin[-4:], "big")
            if not _is_ours(handle) or not begin.startswith(MAGIC) or length > _MOST_HEADER:
                return None
            header = _decode_header(os.read(handle, length))
            name = self.name_of(header)
            is_right = (
                len(header.key) == self._names.num_key_bytes
                and file_name == _file_name(name, header.kind)
                and status.st_size == _FIXED + length + self._slot_bytes.get(header.kind, -1)
            )
            return FoundFile(name, header, status.st_size, max(0.0, now - status.st_mtime)) if is_right else None
        return None

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFELY, dir_fd=self._fd)
        try:
            yield handle
        finally:
            os.close(handle)

    def _names_of_files(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return [entry.name for entry in entries]

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(name, dir_fd=self._fd)


_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC


def _file_name(name: bytes, kind: Kind) -> str:
    return f"{name.hex()}.{kind}"


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _write_all(handle: int, data: bytes | memoryview) -> int:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(handle, view[done:])
    return done


def _read_page(handle: int, header: PageHeader, slot: Sequence[np.ndarray]) -> bool:
    """Read a file with this header into `slot`. Return whether it is whole."""
    packed = msgspec.msgpack.encode(header)
    begin = os.read(handle, _FIXED + len(packed))
    if not begin.startswith(MAGIC) or begin[_FIXED:] != packed:
        return False
    parts = [part.data for part in slot]
    for part in parts:
        left = part
        while left and (num_read := os.readv(handle, [left])):
            left = left[num_read:]
        if left:
            return False
    is_end = not os.read(handle, 1)
    return is_end and begin[len(MAGIC) : _FIXED - 4] == _digest([begin[_FIXED - 4 : _FIXED], packed, *parts])


def _is_ours(handle: int) -> bool:
    """Return whether an opened file is a plain file of this user, which nobody else can read or write."""
    status = os.fstat(handle)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _opened(path: Path, parent: int | None) -> int:
    """Make a directory if need be, and open it. Raises ConfigError unless it is this user's alone."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=parent)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY, dir_fd=parent)
    except OSError as error:
        raise ConfigError(f"--disk-cache {path}: {error.strerror}; name a directory that this user can write") from None
    status = os.fstat(handle)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(handle)
        raise ConfigError(
            f"--disk-cache {path} has mode {stat.S_IMODE(status.st_mode):03o} and belongs to user id {status.st_uid}; "
            f"it holds prompts, so it must be a directory of user id {os.getuid()} with mode 700"
        )
    return handle


def _own_directory(path: Path, root: int, model: str) -> tuple[Path, int, int]:
    """Return the first directory of a model that no other node uses, opened, and its lock. A lock file lies beside
    each."""
    for number in range(_MOST_NODES):
        name = f"{model}-{number}"
        try:
            lock = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT | _SAFELY, 0o600, dir_fd=root)
        except OSError as error:
            raise ConfigError(f"--disk-cache {path}: {name}.lock: {error.strerror}; remove it") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        return path / name, _opened(Path(name), root), lock
    raise ConfigError(f"--disk-cache {path}: {_MOST_NODES} nodes of this model use it")


def _parents_first(found: dict[tuple[bytes, Kind], FoundFile]) -> Iterator[FoundFile]:
    """Yield the files whose page has all pages before it, each behind the one before, and its tail page behind it."""
    children: dict[bytes, list[FoundFile]] = {}
    for (_, kind), file in found.items():
        if kind == "page":
            children.setdefault(file.header.parent, []).append(file)
    left = children.get(b"", [])[::-1]
    while left:
        file = left.pop()
        yield file
        if (tail := found.get((file.name, "tail"))) is not None:
            yield tail
        left += children.get(file.name, ())
