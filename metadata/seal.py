"""From a message to a frame: MessagePack, and a checksum at its end."""

from __future__ import annotations

from xxhash import xxh3_64_digest

_CHECKSUM_BYTES = 8


def seal(body: bytes) -> bytes:
    """The bytes, and then the xxh3_64 of them. TCP's 16 bits of checksum let a damaged segment through now and then,
    and a flipped bit in a column of token ids leaves a message that is as good as any."""
    return body + xxh3_64_digest(body)


def unseal(frame: bytes) -> bytes | None:
    """The inverse of `seal`; None where bytes and checksum do not fit."""
    body, checksum = frame[:-_CHECKSUM_BYTES], frame[-_CHECKSUM_BYTES:]
    return body if xxh3_64_digest(body) == checksum else None
