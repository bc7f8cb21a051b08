"""From how many tokens on it is sooner to borrow the pages of a prompt than to compute them, by transport.

    python tests/benchmarks/serving/bench_borrow.py [--model DIR] [--json FILE] [--figures DIR]
    python tests/benchmarks/serving/bench_borrow.py --model models/8b --device cuda --load-format dummy --page-size 64
        --transports cuda local --lengths 64 256 1024 4096

A prefill and a decode node run in this process, one after the other on one core, which makes borrowing look slower than
between two processes. The decode node has computed a text. Then the prefill node computes a prompt that begins with the
text, once with pages of the decode node and once without. `borrowed` and `computed` are the times to the first token.
The first loan, for which the link is opened, is not counted, nor is the first prompt of the longest length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from harness import flags, report
from node_pair import NodePair, params

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
ENDLESS_S = 1e6  # per token: borrowing is tried in any case, and takes as long as it takes


class Borrowing:
    """A pair of nodes of which the decode node lends."""

    def __init__(self, options: argparse.Namespace, transport: str) -> None:
        self._page = options.page_size
        num_pages = 6 * max(options.lengths) // self._page + 8  # a quarter of the idle ones may be on loan
        both: dict[str, Any] = {"page_size": self._page, "num_pages": num_pages, "max_running": 2}
        both |= {"transport": transport, "speculative": "none", "chunk_tokens": options.chunk, "tune": False}
        both |= {"device": options.device, "load_format": options.load_format}
        self.pair = NodePair(options.model, prefill=dict(both), decode=dict(both))
        borrower = self.pair.prefill._borrower
        assert borrower is not None
        borrower._token_s = lambda: ENDLESS_S
        self._rng = random.Random(1)
        self._number = 0

    def seconds(self, num_tokens: int, *, borrows: bool) -> float:
        """Return the time to the first token of a prompt of which the decode node has the first `num_tokens`."""
        text = [self._rng.randrange(10, 4000) for _ in range(num_tokens)]
        self._run(text, num_lent=0, is_local=True)
        self.pair.prefill.cache.flush()
        before = self.pair.prefill.stats().borrowed_tokens
        taken = self._run([*text, 7, 8, 9], num_lent=num_tokens // self._page if borrows else 0, is_local=False)
        assert (self.pair.prefill.stats().borrowed_tokens - before == num_tokens) == borrows
        for node in (self.pair.prefill, self.pair.decode):
            node.cache.flush()
        return taken

    def _run(self, prompt: list[int], *, num_lent: int, is_local: bool) -> float:
        self._number += 1
        name = f"r{self._number}"
        begun = time.perf_counter()
        self.pair.submit(name, prompt, params(2), is_local=is_local, num_lent=num_lent)
        self.pair.step_until(lambda: self.pair.results[name, 0].ids)
        taken = time.perf_counter() - begun
        self.pair.run()
        return taken


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for transport in options.transports:
        borrowing = Borrowing(options, transport)
        for borrows in (True, False):
            borrowing.seconds(max(options.lengths), borrows=borrows)
        found: list[dict[str, Any]] = []
        for num_tokens in options.lengths:
            borrowed, computed = (
                statistics.median(borrowing.seconds(num_tokens, borrows=borrows) for _ in range(options.rounds))
                for borrows in (True, False)
            )
            times = {"borrowed, ms": round(1000 * borrowed, 2), "computed, ms": round(1000 * computed, 2)}
            found.append({"transport": transport, "tokens": num_tokens} | times)
        yield from ({**row, "always sooner from, tokens": crossover(found)} for row in found)
        borrowing.pair.close()


def crossover(found: Sequence[dict[str, Any]]) -> int | None:
    """Return the number of tokens from which on borrowing was sooner in all rows. None: not even in the last one."""
    slower = [index for index, row in enumerate(found) if row["borrowed, ms"] >= row["computed, ms"]]
    rest = found[slower[-1] + 1 :] if slower else found
    return rest[0]["tokens"] if rest else None


def main() -> None:
    parser = flags(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", default="safetensors", help="dummy, or planted:maker")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step of either node")
    parser.add_argument("--transports", nargs="+", default=["local", "zmq"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens that are borrowed or computed")
    options = parser.parse_args()
    report(options, "borrowing", rows(options), unit="ms")


if __name__ == "__main__":
    main()
