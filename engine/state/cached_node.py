"""A node of the prefix cache's tree: one page of tokens, and the places where its KV lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...metadata.cache.names import Place


@dataclass(slots=True, eq=False)
class CachedNode:
    """A page of tokens behind those of its parent. Its KV lies in a page of the pool, in a slot of the host tier, in a
    file, or in several of them. So do the rows of its tail page, if it has some.

    The prefix cache writes the fields of the pool and the tree, the host tier those of slots, the disk tier those of
    files."""

    key: bytes  # its tokens and those that its KV depends on; before those of a first page, the salt
    parent: CachedNode | None  # None: it is the root
    page: int | None = None  # in the pool
    children: dict[bytes, CachedNode] = field(default_factory=dict)  # by key
    num_references: int = 0
    tail: int | None = None  # its tail page in the pool
    num_tail_uses: int = 0
    slot: int | None = None  # in the host tier
    tail_slot: int | None = None  # of its tail page, in the host tier
    is_filed: bool = False  # its KV lies in a file
    tail_is_filed: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its KV lies."""
        are_there: dict[Place, bool] = {
            "pool": self.page is not None,
            "host": self.slot is not None,
            "file": self.is_filed,
        }
        return tuple(place for place, is_there in are_there.items() if is_there)

    @property
    def is_in_memory(self) -> bool:
        """Whether its KV lies in the pool or in the host tier."""
        return self.page is not None or self.slot is not None

    @property
    def has_tail_in_memory(self) -> bool:
        """Whether the rows of its tail page lie in the pool or in the host tier."""
        return self.tail is not None or self.tail_slot is not None

    @property
    def is_cached(self) -> bool:
        """Whether its KV lies somewhere."""
        return self.is_in_memory or self.is_filed

    @property
    def has_tail(self) -> bool:
        """Whether the rows of its tail page lie somewhere."""
        return self.has_tail_in_memory or self.tail_is_filed
