"""Attention of DeepSeek-V4 in one forward. A layer sees the last tokens, its window. It also sees entries, each
of which is made of several tokens (kernels/entries/entries.py).

Everything lies in pools with the page numbers of the sequence (pool_rows.py):

    KV              the key of each token, which is also its value, by layer; in tail pages
    *_INPUTS        kv and gate of each token, from which entries of two windows are made; in tail pages
    *_SUMS          the sums of a window up to each token, from which the other entries are made; in tail pages
    *_ENTRIES       one entry for `rate` tokens, at the slots of these tokens: each slot has a part of it

So the first pool of a target, which all models have, is one of entries (`ModelConfig.pool`). A draft, whose layers see
a window alone, has its pool in the target's tail pages. Of inputs and sums, a tail page keeps the last rows alone
(`Further.num_kept`).

A page is as long as a multiple of every rate, so a whole page never changes. All rows lie at the positions of their
tokens. So the token that takes the place of a rejected draft writes its rows again, and its entry if it ends a window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ...kernels.products.norm import Norm
from .context import AttentionContext

T = TypeVar("T")
KV = "kv"  # name of the pool of keys among the rows


class EntryPool(NamedTuple):
    """Where the entries of a layer lie, and how they are made."""

    inputs: str  # name of the pool of rows that they are made of
    entries: str  # name of the pool of entries
    place: int  # of the layer in both
    bias: Tensor  # [rate, columns] float32
    norm: Norm  # [width]
    frequencies: Tensor  # [num_pairs] float32, radians per position

    @property
    def rate(self) -> int:
        """Tokens that an entry stands for."""
        return len(self.bias)

    @property
    def overlaps(self) -> bool:
        """Whether an entry is also made of the tokens of the window before its own."""
        return self.bias.shape[1] > len(self.norm.weight)


class WindowHeads(NamedTuple):
    """Settings and weights of one layer's attention, other than its projections."""

    layer: int  # its index in the pool of keys
    window: int  # tokens that a token sees, itself included
    query_eps: float  # of the norm of queries, which has no weights
    key_norm: Norm  # [head_dim]
    frequencies: Tensor  # [num_pairs] float32, radians per position
    sinks: Tensor  # [num_heads] float32, of this rank's heads


class CompressedAttention(AttentionContext):
    """The attention of one forward to windows and entries. A layer calls `store`, `compress`, `choose` and `attend` in
    this order, as far as it has the parts."""

    __slots__ = ()

    def __call__(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("a layer over a window and entries stores, compresses and attends")

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returns, for a value that all layers of a forward share. It may be made for each."""
        del name
        return make()

    @abstractmethod
    def store(self, heads: WindowHeads, q: Tensor, key: Tensor) -> Tensor:
        """Norm and rotate queries [num_tokens, num_heads, head_dim], which may be overwritten, and return them. Norm
        and rotate keys [num_tokens, head_dim], and store them."""

    @abstractmethod
    def compress(self, pool: EntryPool, inputs: Tensor) -> None:
        """Store kv and gate of all tokens, [num_tokens, 2 * columns], and the entries of windows that end with one of
        them."""

    @abstractmethod
    def choose(self, keys: EntryPool, q: Tensor, weights: Tensor, num_picks: int) -> Any:
        """Return the entries that tokens choose, as `attend` takes them. The entries of `keys` are index keys. Index
        queries `q` [num_tokens, num_heads, head_dim] are not rotated yet. `weights` [num_tokens, num_heads] float32."""

    @abstractmethod
    def attend(self, heads: WindowHeads, q: Tensor, pool: EntryPool | None = None, chosen: Any = None) -> Tensor:
        """Return the attention of what `store` returned, rotated back: [num_tokens, num_heads, head_dim]. `pool`: the
        entries beside the window. `chosen`: those of them that tokens see; None: all."""
