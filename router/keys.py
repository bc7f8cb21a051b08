"""API keys of clients: the lines of --api-keys, and the file as last read.

    KEY                        # a remark
    NAME KEY
    NAME KEY TENANT
    NAME KEY TENANT WEIGHT

NAME is what logs call the key. Keys may share a name, so that an old and a new one are valid together. Without TENANT
the key belongs to the tenant `default`. A tenant of WEIGHT 2 gets twice the tokens of one of weight 1 (fair_share.py);
it is enough to give the weight in one line of the tenant. No message ever holds a word of a line: it may be a key.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

from ..metadata.errors import ConfigError
from .tenants.fair_share import DEFAULT, Tenant

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
MAX_NAME = 128  # characters of a name or a tenant
WEIGHTS = (0.001, 1000.0)  # range

_FORMS = "write `KEY`, `NAME KEY`, `NAME KEY TENANT` or `NAME KEY TENANT WEIGHT`"
_Seen = tuple[int, int, int]  # identity of a file's contents: mtime in ns, inode, size in bytes


class ApiKey(NamedTuple):
    """A key that clients may send."""

    key: str
    name: str = ""
    tenant: Tenant = DEFAULT

    @property
    def digest(self) -> bytes:
        """The digest by which the key is looked up."""
        return digest_of(self.key)


def digest_of(key: str) -> bytes:
    """Return the digest of a key. Keys are looked up by it, so the time of a look-up reveals nothing about a key."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def is_name(text: str) -> bool:
    """Return whether the text can be the name of a key or a tenant."""
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def read_keys(path: str | Path) -> list[ApiKey]:
    """Return the keys in a file. Raises ConfigError, with the number of the line, if it cannot be used."""
    return KeysFile(path).keys


class KeysFile:
    """The keys in a file, as last read. If the file becomes unusable, the keys read before stay in force.

    A changed file whose last line has no newline may still be being written. Its keys count from the next look on, if
    it is the same then.

    Raises ConfigError if the file cannot be used at first.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.complaint = ""  # why the file is not used as it is now
        self._seen: _Seen | None = None  # the contents last read; None: the file was away
        self._unended: _Seen | None = None  # the contents last read, if they may still be being written
        try:
            self.keys = self._read(at_once=True) or []
        except OSError as error:
            raise ConfigError(self._unreadable(error)) from None

    def look(self, *, force: bool = False) -> bool:
        """Read the file again if it has changed, or in any case with `force`. Return whether its keys were taken."""
        if force:
            self.complaint = ""  # a mistake that is still there is logged again
        try:
            if _identity(self._path.stat()) == self._seen != self._unended and not force:
                return False
            keys = self._read(at_once=force)
        except OSError as error:
            self._seen = None
            self.complain(self._unreadable(error))
            return False
        except ConfigError as error:
            self.complain(str(error))
            return False
        if keys is None:
            return False
        self.keys, self.complaint = keys, ""
        logger.info("api_keys %s: read again, %d keys", self._path, len(self.keys))
        return True

    def complain(self, words: str) -> None:
        """Log once why the file is not used."""
        if words != self.complaint:
            self.complaint = words
            logger.error("%s; the keys read before stay in force", words)

    def _read(self, *, at_once: bool) -> list[ApiKey] | None:
        """Return the keys in the file; None, unless `at_once`, if it may still be being written. Raises OSError, and
        ConfigError for a mistake, which is read only once."""
        with self._path.open("rb") as file:
            self._seen, data = _identity(os.fstat(file.fileno())), file.read(MAX_BYTES + 1)
        unended, self._unended = self._unended, None
        if len(data) > MAX_BYTES:
            raise ConfigError(f"api_keys {self._path}: is longer than {MAX_BYTES} bytes")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = f"at byte {error.start}"
            raise ConfigError(f"api_keys {self._path}: cannot be read: it is not UTF-8 text {where}") from None
        if text and not text.endswith("\n") and not at_once and self._seen != unended:
            self._unended = self._seen
            return None
        return parse_keys(self._path, text)

    def _unreadable(self, error: OSError) -> str:
        return f"api_keys {self._path}: cannot be read: {error.strerror}"


def parse_keys(path: str | Path, text: str) -> list[ApiKey]:
    """Return the keys in a text of lines. Raises ConfigError with the number of the line at fault."""
    keys: list[ApiKey] = []
    lines: dict[str, int] = {}  # of each key
    weights: dict[str, tuple[float, int]] = {}  # of each tenant that has one: the weight and its line
    for number, line in enumerate(text.splitlines(), 1):
        words = _words(line)
        if not words:
            continue
        where = f"api_keys {path}, line {number}: "
        if len(words) > 4:
            raise ConfigError(f"{where}it has {len(words)} words; {_FORMS}")
        name, key = words[:2] if len(words) > 1 else ("", words[0])
        tenant = words[2] if len(words) > 2 else DEFAULT.name
        if not is_name(tenant) or (name and not is_name(name)):
            raise ConfigError(f"{where}a name is longer than {MAX_NAME} characters or cannot be printed")
        if key in lines:
            raise ConfigError(f"{where}its key stands in line {lines[key]} already; take one out")
        lines[key] = number
        if len(words) == 4:
            weight, first = weights.setdefault(tenant, (_weight(where, words[3]), number))
            if _weight(where, words[3]) != weight:
                raise ConfigError(f"{where}its tenant has another weight in line {first}; give it once")
        keys.append(ApiKey(key, name, Tenant(tenant)))
    if not keys:
        raise ConfigError(f"api_keys {path}: holds no key; write one per line")
    weight_of = {tenant: weight for tenant, (weight, _) in weights.items()}
    return [key._replace(tenant=Tenant(key.tenant.name, weight_of.get(key.tenant.name, 1.0))) for key in keys]


def _words(line: str) -> list[str]:
    """Return the words of a line before its remark, which begins with a word that begins with #."""
    words = line.split()
    remark = next((place for place, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:remark]


def _weight(where: str, word: str) -> float:
    least, most = WEIGHTS
    try:
        weight = float(word)
    except ValueError:
        weight = 0.0
    if not least <= weight <= most:
        raise ConfigError(f"{where}the fourth word is the tenant's weight; it must be a number in {least:g}..{most:g}")
    return weight


def _identity(status: os.stat_result) -> _Seen:
    return status.st_mtime_ns, status.st_ino, status.st_size
