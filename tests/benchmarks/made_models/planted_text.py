"""A text known in advance: the rule by which a planted model (planted.py) continues any prompt, in plain integers.

A token id stands for a code, and a code is (high, low): code = high * base + low. The next token has

    low digit    the current token's low digit plus one, modulo `base`
    high digit   `num_bits` bits; bit i is a bit of an earlier token, the source of read i. There are kinds of read:
                 by position   the source is the token `offset` back, or the first token if there are fewer
                 by content    the source is the token whose key is nearest to a target, which the current token
                               determines; the distance is key XOR target, as a number
                 by state      in a text with recurrent states: of the tokens that write, the last one at an address
                               that the current token determines. A token writes if the first bits of its key are all
                               1, and the low bits are its address. It is mostly more than 1,000 tokens back, or there
                               is none, and the bit is 0

Every code has a key, a hash of `key_bits` bits. A read takes a bit of a hash of the source's key. Tokens with the same
key have the same distance and the same bits, so every prompt has exactly one continuation. A prompt may contain any id;
ids are scattered over the vocabulary, and only the first `num_codes` codes are ever generated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_CODES = 32_000  # no more than a published EAGLE-3 head's vocabulary
MAX_KEY_BITS = 13
OFFSETS = (1, 4)  # of the reads by position
_MIN_BASE = 16
_WRITTEN_BITS = 10  # that a token's key must have to write at an address: one of 1,024 tokens has them


class Read(NamedTuple):
    """The source of one bit."""

    offset: int | None  # tokens back; None: by content
    rotation: int = 0  # target = (key of the current token, its bits rotated up) ^ mask
    mask: int = 0
    address_bits: int = 0  # of a read by state, whose address is in the key's bits from `rotation` on, ^ mask; else 0


class PlantedText:
    """The rule for one size of vocabulary."""

    def __init__(self, vocab_size: int, key_dim: int | None = None) -> None:
        """`key_dim`: rows of a recurrent state, if the text has a read by state. Raises ValueError if the vocabulary is
        too small."""
        self.vocab_size = vocab_size
        # the ids of the first codes: only these are ever generated
        self.draft_vocab_size = most = min(MAX_CODES, vocab_size // 2)
        self.num_bits = int(math.log2(max(1, most // _MIN_BASE)))
        if self.num_bits < len(OFFSETS) + 2:
            raise ValueError(f"a vocabulary of {vocab_size} is too small to plant a text in; take 512 or more")
        self.base = most >> self.num_bits
        self.num_codes = self.base << self.num_bits
        self.key_bits = min(MAX_KEY_BITS, (self.num_codes - 1).bit_length())
        self._address_bits = 0 if key_dim is None else min(6, key_dim.bit_length() - 1)
        self.num_write_bits = _WRITTEN_BITS - self._address_bits
        if key_dim is not None and self.key_bits < _WRITTEN_BITS:
            raise ValueError(f"a vocabulary of {vocab_size} is too small for a read by state; take 2048 or more")
        self.reads = self._reads()
        step = next(n for n in range(int(vocab_size * 0.618), vocab_size) if math.gcd(n, vocab_size) == 1)
        self.ids = np.arange(vocab_size, dtype=np.int64) * step % vocab_size  # [vocab_size] by code, aliases included
        self.raw_codes = np.empty_like(self.ids)  # [vocab_size] by id; those from num_codes on are aliases
        self.raw_codes[self.ids] = np.arange(vocab_size)
        codes = self.raw_codes % self.num_codes
        self.low, self.high = codes % self.base, codes // self.base  # each [vocab_size] by id
        self.keys = hashed(codes + 1) & ((1 << self.key_bits) - 1)  # [vocab_size] by id
        salts = np.arange(1, self.num_bits + 1) * 0x9E3779B1
        self.values = hashed(self.keys[:, None] ^ salts) >> 9 & 1  # [vocab_size, num_bits] by id

    def successor(self, token_ids: Sequence[int]) -> int:
        """Return the token after `token_ids`, which must not be empty."""
        ids = np.asarray(token_ids, dtype=np.int64)
        return self._after(ids, self.keys[ids])

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` tokens after a prompt."""
        num_prompt = len(prompt)
        ids = np.empty(num_prompt + num_tokens, dtype=np.int64)
        ids[:num_prompt] = prompt
        keys = self.keys[ids[:num_prompt]]
        keys = np.concatenate([keys, np.empty(num_tokens, dtype=np.int64)])
        for end in range(num_prompt, len(ids)):
            ids[end] = self._after(ids[:end], keys[:end])
            keys[end] = self.keys[ids[end]]
        return ids[num_prompt:].tolist()

    def sources(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return for each read the positions that it may use: one for a read by position, all of the nearest key
        otherwise.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        keys, found = self.keys[ids], []
        for read in self.reads:
            if read.address_bits:
                found.append(self._written(keys, read)[-1:].tolist())
            elif read.offset is not None:
                found.append([max(0, len(ids) - 1 - read.offset)])
            else:
                distances = keys ^ self.target(int(keys[-1]), read)
                found.append(np.flatnonzero(distances == distances.min()).tolist())
        return found

    def target(self, key: int, read: Read) -> int:
        """Return the key that a read by content looks for after a token with this key."""
        full = (1 << self.key_bits) - 1
        return ((key << read.rotation | key >> self.key_bits - read.rotation) & full) ^ read.mask

    def _written(self, keys: np.ndarray, read: Read) -> np.ndarray:
        """Return the positions of the tokens that wrote where the last token reads."""
        address = (int(keys[-1]) >> read.rotation ^ read.mask) & ((1 << read.address_bits) - 1)
        first_bits = (1 << self.num_write_bits) - 1 << self.key_bits - self.num_write_bits
        writes = keys & first_bits == first_bits
        return np.flatnonzero(writes & (keys & ((1 << read.address_bits) - 1) == address))

    def _after(self, ids: np.ndarray, keys: np.ndarray) -> int:
        last, high = int(ids[-1]), 0
        for bit, read in enumerate(self.reads):
            if read.address_bits:
                written = self._written(keys, read)
                if not len(written):
                    continue
                source = int(written[-1])
            elif read.offset is not None:
                source = max(0, len(ids) - 1 - read.offset)
            else:
                source = int((keys ^ self.target(int(keys[-1]), read)).argmin())
            high |= int(self.values[ids[source], bit]) << bit
        return int(self.ids[high * self.base + (int(self.low[last]) + 1) % self.base])

    def _reads(self) -> tuple[Read, ...]:
        """Make the reads. The second and the last but one are by position."""
        by_position = {1: OFFSETS[0], self.num_bits - 2: OFFSETS[1]}
        masks = hashed(np.arange(1, self.num_bits + 1)) & ((1 << self.key_bits) - 1)
        reads = [
            Read(by_position[bit]) if bit in by_position else Read(None, (2 * bit + 1) % self.key_bits, int(masks[bit]))
            for bit in range(self.num_bits)
        ]
        if self._address_bits:
            middle, size = self.num_bits // 2, 1 << self._address_bits
            reads[middle] = Read(None, 1, int(masks[middle]) % size, self._address_bits)
        return tuple(reads)


def planted_in(config: Mapping[str, Any]) -> PlantedText:
    """Return the text that is planted in a model, given its config.json."""
    return PlantedText(config["vocab_size"], config.get("linear_key_head_dim"))


def hashed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of integers (MurmurHash3's 32-bit finalizer), elementwise: int64 -> int64."""
    mixed = values.astype(np.uint64) & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        mixed ^= mixed >> np.uint64(shift)
        mixed = mixed * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return (mixed ^ mixed >> np.uint64(16)).astype(np.int64)
