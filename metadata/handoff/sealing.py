"""Messages of pages that travel outside CURVE, sealed by AES-256-GCM with a key for each link and direction.

libzmq's CURVE uses no AES instructions, so it is several times slower than the network between hosts. The prefill node
draws the keys when it welcomes a link, and sends them inside CURVE.

    first frame    number, uint64 | header, encrypted, with its tag
    second frame   data, encrypted with the header as associated data, with its tag

The header of pages names the unit, the indices and the generations, so pages cannot be moved to another place. Each
number is used once per key and makes two nonces, 2 * number for the header and 2 * number + 1 for the data. A reader
takes rising numbers only, so no message counts twice. After 2^32 messages of 1 MiB the bound on telling ciphertext from
noise is still below 2^-32 (NIST SP 800-38D has the mode).

With `is_plain` the data is readable: the second frame is the data itself, and its tag stands behind the header's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import ProtocolError

KEY_BYTES = 32
_NUMBER_BYTES = 8
_TAG_BYTES = 16
_NONCE_BYTES = 12


class Sealer:
    """Seals the messages of one direction. `key` has KEY_BYTES bytes and is used by no other sealer."""

    def __init__(self, key: bytes, *, is_plain: bool = False) -> None:
        self._cipher, self._is_plain = AESGCM(key), is_plain
        self._number = 0

    def seal(self, header: bytes, data: Any = None) -> list[Any]:
        """Return the frames of a message, one without `data`, which is a buffer of bytes."""
        number, self._number = self._number, self._number + 1
        first = number.to_bytes(_NUMBER_BYTES, "little") + self._cipher.encrypt(_nonce(number, 0), header, None)
        if data is None:
            return [first]
        if self._is_plain:
            return [first + self._cipher.encrypt(_nonce(number, 1), b"", data), data]
        return [first, self._cipher.encrypt(_nonce(number, 1), data, header)]


class Opened(NamedTuple):
    """The header of a message, its number, and the tag of readable data."""

    header: bytes
    number: int
    tag: bytes


class Opener:
    """Opens the messages that a Sealer with the same key and the same `is_plain` has sealed."""

    def __init__(self, key: bytes, *, is_plain: bool = False) -> None:
        self._cipher, self._is_plain = AESGCM(key), is_plain
        self._next = 0

    def open(self, frame: bytes, *, has_data: bool = False) -> Opened:
        """Return what the first frame of a message holds. `has_data`: a second frame came with it. Raises ProtocolError
        if the frame is damaged, not from the peer, or older than one that was opened before."""
        number = int.from_bytes(frame[:_NUMBER_BYTES], "little")
        end = len(frame) - (_TAG_BYTES if self._is_plain and has_data else 0)
        try:
            header = self._cipher.decrypt(_nonce(number, 0), frame[_NUMBER_BYTES:end], None)
        except (InvalidTag, ValueError, OverflowError):
            raise ProtocolError(f"a sealed frame of {len(frame)} bytes is damaged, or not from the peer") from None
        if number < self._next:
            raise ProtocolError(f"sealed message {number} after message {self._next - 1}: it was repeated or reordered")
        self._next = number + 1
        return Opened(header, number, frame[end:])

    def open_data(self, opened: Opened, frame: Any) -> Any:
        """Return the data of a message as a buffer; None if it is damaged, or belongs to another header. `frame` is the
        second frame, a buffer."""
        nonce = _nonce(opened.number, 1)
        try:
            if self._is_plain:
                self._cipher.decrypt(nonce, opened.tag, frame)
                return frame
            return self._cipher.decrypt(nonce, frame, opened.header)
        except (InvalidTag, ValueError):
            return None


def _nonce(number: int, part: int) -> bytes:
    return (2 * number + part).to_bytes(_NONCE_BYTES, "little")
