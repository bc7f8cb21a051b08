"""From how many tokens on it is sooner to borrow the pages of a prompt than to compute them, by transport.

    python tests/benchmarks/serving/bench_borrow.py [--model DIR] [--json FILE] [--figures DIR]

A prefill and a decode node run in this process, one after the other on one core, which makes borrowing look slower than
between two processes. The decode node has computed a text. Then the prefill node computes a prompt that begins with the
text, once with pages of the decode node and once without. `borrowed` and `computed` are the times to the first token.
The first loan, for which the link is opened, is not counted.
"""

from __future__ import annotations

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
PAGE = 16
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
ENDLESS_S = 1e6  # per token: borrowing is tried in any case, and takes as long as it takes


class Borrowing:
    """A pair of nodes of which the decode node lends."""

    def __init__(self, model: Path, transport: str) -> None:
        both: dict[str, Any] = {"page_size": PAGE, "num_pages": 1200, "max_running": 2, "transport": transport}
        both |= {"speculative": "none", "chunk_tokens": 512}
        self.pair = NodePair(model, prefill=dict(both), decode=dict(both))
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
        taken = self._run([*text, 7, 8, 9], num_lent=num_tokens // PAGE if borrows else 0, is_local=False)
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


def rows(model: Path, rounds: int) -> Iterator[dict[str, Any]]:
    for transport in ("local", "zmq"):
        borrowing = Borrowing(model, transport)
        borrowing.seconds(64, borrows=True)
        found: list[dict[str, Any]] = []
        for num_tokens in LENGTHS:
            borrowed, computed = (
                statistics.median(borrowing.seconds(num_tokens, borrows=borrows) for _ in range(rounds))
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
    options = parser.parse_args()
    report(options, "borrowing", rows(options.model, options.rounds), unit="ms")


if __name__ == "__main__":
    main()
