"""What the router's knowledge of cached pages takes: memory, and processor time per change and per look.

    python tests/benchmarks/serving/bench_told_pages.py --nodes 64 --pages 50000 --changes 20000

No node and no socket takes part: the bytes of each batch are decoded as the hub decodes them, entered in the node's
table, and prompts are looked up in all tables. Nodes store and remove pages at an even rate, in batches of a quarter of
a second. The share of a core is what a second of batches takes, of that second. Looks are counted apart, per prompt.
Figures of 1,000 nodes are computed from these.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import flags, report

from baton.metadata.cache.changes import INTERVAL_S
from baton.metadata.cache.names import NAME_BYTES, PageNames, PromptNames
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.membership import CachedPages
from baton.metadata.wire.messages import to_router_decoder
from baton.router.nodes.told_pages import ToldPages

PROMPT_TOKENS, PAGE_SIZE = 32_768, 16
COMPUTED_NODES = 1000


class IndexFigures(NamedTuple):
    """What the tables of all nodes take."""

    num_nodes: int
    num_pages: int  # per node
    changes_per_s: int
    memory_mb: float  # by which the process grew
    bytes_per_page: float
    core_share: float  # of a core, for these changes
    change_us: float
    new_prompt_ms: float  # a prompt that no node has: looked up on all nodes
    known_prompt_ms: float  # one of which 4 nodes have 240 pages
    name_us: float  # per page of a prompt


class _TellingNode:
    """A node that stores and removes pages."""

    def __init__(self, rng: random.Random, num_pages: int) -> None:
        self._rng, self._num_pages = rng, num_pages
        self._held: deque[bytes] = deque()
        self._number = 0

    def batch(self, num_stored: int) -> bytes:
        """Return a frame with so many new pages, and with the removal of those for which there is no room."""
        stored = self._rng.randbytes(NAME_BYTES * num_stored)
        self._held.extend(stored[start : start + NAME_BYTES] for start in range(0, len(stored), NAME_BYTES))
        surplus = max(0, len(self._held) - self._num_pages)
        removed = b"".join(self._held.popleft() for _ in range(surplus))
        message = CachedPages(number=self._number, stored=stored, removed=removed, num_changes=0, is_whole=True)
        self._number += 1
        return encode(message)


def measure(num_nodes: int, num_pages: int, changes_per_s: int, seconds: float) -> IndexFigures:
    """Fill the tables of all nodes, then measure `seconds` of changes, and looks."""
    rng, process = random.Random(0), psutil.Process(os.getpid())
    tables = [ToldPages(num_pages) for _ in range(num_nodes)]
    nodes = [_TellingNode(rng, num_pages - 256) for _ in range(num_nodes)]
    grown = 0
    for table, node in zip(tables, nodes, strict=True):
        for start in range(0, num_pages - 256, 1024):
            frame = node.batch(min(1024, num_pages - 256 - start))
            before = process.memory_info().rss
            _take(table, frame)
            grown += process.memory_info().rss - before
    memory = max(grown, sum(table.num_bytes for table in tables))
    num_rounds = max(1, round(seconds / INTERVAL_S))
    num_stored = max(1, round(changes_per_s * INTERVAL_S / num_nodes / 2))
    spent_s, num_changes = 0.0, 0
    for _ in range(num_rounds):
        frames = [node.batch(num_stored) for node in nodes]
        begun = time.process_time()
        for table, frame in zip(tables, frames, strict=True):
            _take(table, frame)
        spent_s += time.process_time() - begun
        num_changes += 2 * num_stored * num_nodes
    looks = _looks(tables, rng)
    return IndexFigures(
        num_nodes,
        num_pages,
        changes_per_s,
        memory / 1e6,
        memory / (num_nodes * num_pages),
        spent_s / num_changes * changes_per_s,
        1e6 * spent_s / num_changes,
        *looks,
    )


def _take(table: ToldPages, frame: bytes) -> None:
    news = decode_frame(to_router_decoder, frame)
    assert isinstance(news, CachedPages)
    table.take(news)


def _looks(tables: list[ToldPages], rng: random.Random) -> tuple[float, float, float]:
    """Return the milliseconds of a look for a new prompt and for a known one, and the microseconds of a name."""
    names = PageNames(rng.randbytes(32), PAGE_SIZE, 0)
    ids = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    known = PromptNames(names, ids, "")
    begun = time.process_time()
    num_names = len(list(known))
    name_us = 1e6 * (time.process_time() - begun) / num_names
    stored = b"".join(known._whole[: min(num_names, 240)])  # as many as the tables have room for
    for table in tables[:4]:
        table.take(CachedPages(number=table._next, stored=stored, removed=b"", num_changes=0, is_whole=True))
    times: list[float] = []
    for prompt_ids in ([7, *ids[1:]], ids):
        begun = time.process_time()
        for _ in range(20):
            prompt = PromptNames(names, prompt_ids, "")
            for table in tables:
                table.num_matched(prompt, 0)
        times.append(1e3 * (time.process_time() - begun) / 20)
    return times[0], times[1], name_us


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was measured, and the same for COMPUTED_NODES nodes with as many changes each."""
    measured = measure(options.nodes, options.pages, options.changes, options.seconds)
    factor = COMPUTED_NODES / measured.num_nodes
    for what, times in (("measured", 1.0), ("computed", factor)):
        yield {
            "nodes": round(measured.num_nodes * times),
            "figures": what,
            "pages per node": measured.num_pages,
            "changes per s": round(measured.changes_per_s * times),
            "memory, MB": round(measured.memory_mb * times, 1),
            "of a core, %": round(100 * measured.core_share * times, 2),
            "change, us": round(measured.change_us, 2),
            "look for a new prompt of 32,768 tokens, ms": round(measured.new_prompt_ms * times, 2),
        }


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--pages", type=int, default=50_000)
    parser.add_argument("--changes", type=int, default=20_000, help="per second, of all nodes together")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    report(options, "told-pages", rows(options), unit="as named")


if __name__ == "__main__":
    main()
