"""Routers that place requests in another way, to compare with: a command with the arguments of `baton`.

python tests/benchmarks/serving/router_variants.py "random placement" router --port 8000
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any


def draw_nodes() -> None:
    """Draw the nodes of each request from those that have room, whatever they have cached. Nothing is lent."""
    from baton.router.placement import placement, prompt_placement

    def drawn(figures: Sequence[Any], *_: Any) -> int | None:
        able = [index for index, each in enumerate(figures) if not getattr(each, "is_full", False)]
        return random.choice(able) if able else None

    placement.choose_remote = placement.choose_decode = placement.choose_local = drawn
    prompt_placement.choose_remote = prompt_placement.choose_local = drawn
    for name in ("decode_reason", "local_reason", "remote_reason"):
        setattr(placement, name, lambda *_: "drawn")  # the real ones compare the node with better ones
    lend_nothing()


def lend_nothing() -> None:
    """Name no node as a lender. Prompts are placed as ever."""
    from baton.router.placement.node_choice import EntryFigures

    EntryFigures.lender = lambda *_: None


VARIANTS: dict[str, Callable[[], None]] = {"random placement": draw_nodes, "no borrowing": lend_nothing}


if __name__ == "__main__":
    from baton.deploy.cli import main

    VARIANTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
