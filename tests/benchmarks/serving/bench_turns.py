"""Conversations on a cluster: how many prompt tokens are computed again, and how long later turns wait.

    python tests/benchmarks/serving/bench_turns.py [--model DIR] [--before DIR] [--json FILE] [--figures DIR]

The cluster is one router, two prefill and two decode nodes, all real processes. Conversations of several turns run side
by side; no client sends a session's header. After the third turn each has two children, which share its history. In the
second load the router is killed after the third turn and starts again.

A prompt's new tokens are those behind the last turn's prompt: the answer and the client's text. `--before` holds the
`baton` of another commit, which then runs the same loads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from cluster import Cluster
from harness import flags, report

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
WORDS = [
    "import",
    "os",
    "def",
    "main",
    "self",
    "return",
    "value",
    "for",
    "each",
    "in",
    "range",
    "if",
    "not",
    "None",
    "else",
    "class",
    "print",
    "list",
    "open",
]
BREAK = 3  # turns before what happens in the middle of a load
SIDE_BY_SIDE = 3

Break = Literal["nothing", "router starts again"]


class Turn(NamedTuple):
    """What one turn took."""

    index: int
    num_prompt: int
    num_cached: int
    num_new: int
    ttft_s: float


class TurnShape(NamedTuple):
    """Words that the client says in a turn, and tokens of the answer."""

    num_words: int
    answer_len: int


class Conversation:
    """One conversation, or a child of one, which begins with its history."""

    def __init__(self, cluster: Cluster, shape: TurnShape, text: str, num_known: int = 0, seed: int = 0) -> None:
        self._shape = shape
        self._target = Target(f"http://127.0.0.1:{cluster.http_port}", cluster.model_name, fields={"ignore_eos": True})
        self._rng = random.Random(seed)
        self.text, self.num_known = text, num_known

    def take_turn(self, index: int) -> Turn:
        """Say something, wait for the whole answer, and return what that took."""
        self.text += "\n" + " ".join(self._rng.choices(WORDS, k=self._shape.num_words))
        reply = Reply()
        run_on_uvloop(self._ask(reply))
        assert reply.error is None and reply.prompt_len is not None, reply
        turn = Turn(
            index,
            reply.prompt_len,
            reply.num_cached,
            reply.prompt_len - self.num_known,
            reply.times[0] - reply.sent_s,
        )
        self.text += reply.text
        self.num_known = reply.prompt_len
        return turn

    async def _ask(self, reply: Reply) -> None:
        async with open_session(self._target, timeout_s=120.0) as session:
            await ask(session, self._target, self.text, self._shape.answer_len, reply)


def converse(cluster: Cluster, num_conversations: int, num_turns: int, event: Break, shape: TurnShape) -> list[Turn]:
    """Run a load, and return all turns."""
    rng = random.Random(1)
    held = [
        Conversation(cluster, shape, " ".join(rng.choices(WORDS, k=120)), seed=number)
        for number in range(num_conversations)
    ]
    turns: list[Turn] = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for index in range(num_turns):
            if index == BREAK:
                _break(cluster, event)
                held += [
                    Conversation(cluster, shape, each.text, each.num_known, seed=100 + 2 * number + child)
                    for number, each in enumerate(held)
                    for child in range(2)
                ]
            rng.shuffle(held)
            turns += pool.map(lambda each, index=index: each.take_turn(index), held)
    return turns


def _break(cluster: Cluster, event: Break) -> None:
    if event == "router starts again":
        cluster.processes["router"].kill()
        cluster.start_router()
        cluster.wait_ready(num_nodes=4)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for event in get_args(Break):
        for who in ("before", "told pages") if options.before else ("told pages",):
            for number in range(options.rounds):
                turns = _measure(options, event, who == "before")
                later = [turn for turn in turns if turn.index > 0]
                computed = sum(turn.num_prompt - turn.num_cached for turn in turns)
                yield {
                    "in the middle": event,
                    "router": who,
                    "round": number,
                    "prompt tokens": sum(turn.num_prompt for turn in turns),
                    "new": (num_new := sum(turn.num_new for turn in turns)),
                    "computed": computed,
                    "computed over new": round(computed / num_new, 3),
                    "ttft p50 of later turns, ms": round(1000 * statistics.median(turn.ttft_s for turn in later), 1),
                }


def _measure(options: argparse.Namespace, event: Break, is_before: bool) -> list[Turn]:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), options.model)
        if is_before:
            names = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
            cluster.releases = dict.fromkeys(names, options.before)
        try:
            cluster.start(prefill=2, decode=2, node_flags=["--speculative", options.speculative])
            return converse(
                cluster, options.conversations, options.turns, event, TurnShape(options.words, options.answer)
            )
        finally:
            cluster.kill_all()


def main() -> None:
    parser = flags(__doc__, rounds=1)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--before", type=Path, help="directory of the `baton` of another commit")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--speculative", default="auto", help="setting of all nodes")
    parser.add_argument("--words", type=int, default=30, help="that the client says in each turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    options = parser.parse_args()
    report(options, "turns", rows(options), unit="tokens")


if __name__ == "__main__":
    main()
