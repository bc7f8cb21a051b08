"""Content encodings of request bodies: gzip, bounded by the limit of all bodies. aiohttp itself decodes nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ....metadata.errors import RequestError
from ..server.errors import HttpRefusal

GZIP = "gzip"
MAX_MEMBERS = 16  # of one body; an empty member costs its sender only 20 bytes

_GZIP_NAMES = (GZIP, "x-gzip")
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


def encoding_of(values: Iterable[str]) -> str | None:
    """Return the encoding that the Content-Encoding headers name, None for an unencoded body.

    Raises HttpRefusal (415) for an unknown encoding, and for several encodings.
    """
    given = ", ".join(values).strip()
    name = given.lower()
    if name in ("", "identity"):
        return None
    if name not in _GZIP_NAMES:
        words = f"a body with Content-Encoding {given!r} is not served; send it with {GZIP}, or as it is"
        raise HttpRefusal(415, words, {"Accept-Encoding": GZIP})
    return GZIP


def decoded(data: bytes, encoding: str | None, limit: int) -> bytes:
    """Return the body without its encoding. No more than `limit` + 1 bytes are unpacked.

    A gzip stream may have several members, whose contents follow each other (RFC 1952). Raises HttpRefusal (413) for
    more than the limit, RequestError for a stream that is broken, cut, or followed by other bytes.
    """
    if encoding is None:
        return data
    parts: list[bytes] = []
    left = limit + 1
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(_GZIP_FORMAT)
        try:
            part = member.decompress(data, left)
        except zlib.error:
            raise RequestError("the body is not the gzip stream that its Content-Encoding says") from None
        parts.append(part)
        left -= len(part)
        if left == 0:
            raise too_large(limit)
        if not member.eof:
            raise RequestError("the body is a gzip stream that ends too early")
        data = member.unused_data
        if not data:
            return b"".join(parts)
    raise RequestError(f"the body is a gzip stream of more than {MAX_MEMBERS} members; send one")


def too_large(limit: int) -> HttpRefusal:
    """Return the refusal of a body of more than `limit` bytes."""
    return HttpRefusal(413, f"the body is larger than {limit} bytes; send less, or raise the router's --max-body-bytes")
