"""Names of cached pages. A node tells a router by them which pages its prefix cache holds.

A name is 128 bits of BLAKE2b, keyed, over the salt and all tokens up to the page's end. Names are chained page by page:

    name of page i = H(key; name of page i - 1, tokens of page i and the next `lookahead` tokens)

The name of page -1 is a hash of the salt. The KV of a shifted drafter depends on the next tokens (prefix_cache.py), so
a page has no name while its next tokens are unknown. Each router draws a key at its start and tells it to the nodes
that it welcomes. So names of one router mean nothing to another router, and no client can prepare two prompts whose
pages have one name. A name is a hint all the same: the node that gets a prompt compares its tokens with those of its
cache.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal

Place = Literal["pool", "host", "file"]  # where a cached page lies; it may lie in several of them
NAME_BYTES = 16
KEY_BYTES = 32
_SPAN = 64  # names of a prompt that are made at once


class PageNames:
    """Makes the names of pages of `page_size` tokens by a key of 0 to 64 bytes."""

    def __init__(self, key: bytes, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self._of_salt, self._of_page, self._of_tail = (
            blake2b(digest_size=NAME_BYTES, key=key, person=person) for person in (b"salt", b"page", b"tail")
        )

    @property
    def num_key_bytes(self) -> int:
        """Bytes of the tokens by which a page is keyed."""
        return 4 * (self.page_size + self.lookahead)

    def before_first(self, salt: str) -> bytes:
        """Return what stands for the name of the page before the first one."""
        hashed = self._of_salt.copy()
        hashed.update(salt.encode())
        return hashed.digest()

    def after(self, name: bytes, tokens: bytes) -> bytes:
        """Return the name of the page behind a page. `tokens`: int32, `num_key_bytes` bytes."""
        hashed = self._of_page.copy()
        hashed.update(name + tokens)
        return hashed.digest()

    def of_tail(self, name: bytes) -> bytes:
        """Return the name of the tail page of a page."""
        hashed = self._of_tail.copy()
        hashed.update(name)
        return hashed.digest()


class PromptNames:
    """Names of the leading whole pages of a prompt, shortened to 64 bits (`short_names`). They are made when they are
    first asked for. The page of the last token is left out, because a node always computes it."""

    def __init__(self, names: PageNames, token_ids: Sequence[int], salt: str) -> None:
        num_tokens = len(token_ids) - max(1, names.lookahead)
        self._num_pages = max(0, num_tokens) // names.page_size
        self._names, self._token_ids, self._salt = names, token_ids, salt
        self._whole: list[bytes] = []  # the names that are made
        self._made: list[int] = []  # the same, shortened
        self._tails: dict[int, int] = {}

    def __len__(self) -> int:
        return self._num_pages

    def __iter__(self) -> Iterator[int]:
        index = 0
        while index < self._num_pages:
            self[index]  # makes this one and those after it
            made = self._made[index:]
            yield from made
            index += len(made)

    def __getitem__(self, index: int) -> int:
        if index >= len(self._made):
            if not 0 <= index < self._num_pages:
                raise IndexError(index)
            self._make(index + 1)
        return self._made[index]

    def tail(self, index: int) -> int:
        """Return the short name of the tail page of a page."""
        if index not in self._tails:
            self[index]
            self._tails[index] = short_names(self._names.of_tail(self._whole[index]))[0]
        return self._tails[index]

    def _make(self, num_pages: int) -> None:
        """Make the names of at least the first `num_pages` pages."""
        names, start = self._names, len(self._made)
        stop = min(self._num_pages, max(num_pages, start + _SPAN))
        page_size, width = names.page_size, names.num_key_bytes
        data = array("i", self._token_ids[start * page_size : stop * page_size + names.lookahead]).tobytes()
        name = self._whole[-1] if self._whole else names.before_first(self._salt)
        for page in range(stop - start):
            first = 4 * page * page_size
            name = names.after(name, data[first : first + width])
            self._whole.append(name)
        self._made += short_names(b"".join(self._whole[start:]))


def short_names(names: bytes) -> array[int]:
    """Return the first 64 bits of each name in a column of names, which are enough for an index of hints."""
    words = array("Q", names)
    if sys.byteorder == "big":
        words.byteswap()
    return words[::2]
