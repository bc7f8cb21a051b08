"""Conversations on a cluster: how many prompt tokens are computed again, and how long later turns wait.

    python tests/benchmarks/serving/bench_turns.py [--model DIR] [--routers WHO ...] [--json FILE] [--figures DIR]

The cluster is one router, two prefill and two decode nodes (or `--prefill`, `--decode`), all real processes.
Conversations of several turns run side by side; no client sends a session's header. After the third turn each has some
children, which share its history. If `--breaks` says so, the router is killed after the third turn and starts again.

A prompt's new tokens are those behind the last turn's prompt: the answer and the client's text. `--routers` says with
which routers the load runs: one that draws the nodes of each request, or one that lets no node borrow
(router_variants.py). `before` is the `baton` in the directory `--before`, of another commit. `--host-cache-gb` runs all
loads with and without a host tier; `--num-pages` makes the pools small enough for that.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from cluster import READY_S, Cluster, Process
from harness import flags, report
from router_variants import VARIANTS

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
SYNTHETIC_WORDS = [f"t{number}" for number in range(100, 4000)]  # of the models of synthetic.py
BREAK = 3  # turns before what happens in the middle of a load
SIDE_BY_SIDE = 3

Break = Literal["nothing", "router starts again"]
TOLD = "told pages"  # the router as it is


class Turn(NamedTuple):
    """What one turn took."""

    index: int
    num_prompt: int
    num_cached: int
    num_new: int
    ttft_s: float


class TurnShape(NamedTuple):
    """Words that the client says in a turn, tokens of the answer, and the words that there are."""

    num_words: int
    answer_len: int
    words: list[str]


class Conversation:
    """One conversation, or a child of one, which begins with its history."""

    def __init__(self, cluster: Cluster, shape: TurnShape, text: str, num_known: int = 0, seed: int = 0) -> None:
        self._shape = shape
        self._target = Target(f"http://127.0.0.1:{cluster.http_port}", cluster.model_name, fields={"ignore_eos": True})
        self._rng = random.Random(seed)
        self.text, self.num_known = text, num_known

    def take_turn(self, index: int) -> Turn:
        """Say something, wait for the whole answer, and return what that took."""
        self.text += "\n" + " ".join(self._rng.choices(self._shape.words, k=self._shape.num_words))
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


class VariantCluster(Cluster):
    """A cluster with a router of router_variants.py."""

    variant = TOLD
    router_flags: Sequence[str] = ()

    def restart_router(self, variant: str) -> None:
        """Kill the router, start one of this variant, and wait until all nodes have joined it."""
        num_nodes = len(self.processes) - 1
        self.processes["router"].kill()
        self.variant = variant
        self.start_router(*self.router_flags)
        self.wait_ready(num_nodes=num_nodes)

    def start_process(self, name: str, *argv: str) -> Process:
        if name != "router" or self.variant == TOLD:
            return super().start_process(name, *argv)
        path = self.directory / f"{name}.log"
        program = [sys.executable, "-P", str(Path(__file__).with_name("router_variants.py")), self.variant]
        with path.open("ab") as log:
            popen = subprocess.Popen([*program, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes[name] = Process(name, popen, path)
        return self.processes[name]


def converse(cluster: VariantCluster, options: argparse.Namespace, event: Break) -> list[Turn]:
    """Run a load, and return all turns."""
    words = WORDS if options.model == DEMO else SYNTHETIC_WORDS
    rng, shape = random.Random(1), TurnShape(options.words, options.answer, words)
    held = [
        Conversation(cluster, shape, " ".join(rng.choices(words, k=options.first_words)), seed=number)
        for number in range(options.conversations)
    ]
    turns: list[Turn] = []
    with ThreadPoolExecutor(options.side_by_side) as pool:
        for index in range(options.turns):
            if index == BREAK:
                _break(cluster, event)
                held += [
                    Conversation(cluster, shape, each.text, each.num_known, seed=100 + 4 * number + child)
                    for number, each in enumerate(held)
                    for child in range(rng.randint(*options.children))
                ]
            rng.shuffle(held)
            turns += pool.map(lambda each, index=index: each.take_turn(index), held)
    return turns


def _break(cluster: VariantCluster, event: Break) -> None:
    if event == "router starts again":
        cluster.restart_router(cluster.variant)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all loads. Those with the same nodes' settings share the nodes, which forget all pages between two loads."""
    tiers = [None] if options.host_cache_gb is None else [None, options.host_cache_gb]
    now = [router for router in options.routers if router != "before"]
    before = ["before"] if "before" in options.routers else []
    for tier_gb, routers in itertools.product(tiers[:: -1 if options.tier_first else 1], (now, before)):
        if routers:
            with _nodes(options, tier_gb, is_before=routers is before) as cluster:
                for event, router in itertools.product(options.breaks, routers):
                    cluster.restart_router(TOLD if router == "before" else router)
                    yield from _loads(cluster, options, event, router, tier_gb)


def _loads(
    cluster: VariantCluster, options: argparse.Namespace, event: Break, router: str, tier_gb: float | None
) -> Iterator[dict[str, Any]]:
    for number in range(options.rounds):
        cluster.check_books()  # every page is free
        turns = converse(cluster, options, event)
        later = [turn for turn in turns if turn.index > 0]
        num_prompt, num_new = sum(turn.num_prompt for turn in turns), sum(turn.num_new for turn in turns)
        computed = sum(turn.num_prompt - turn.num_cached for turn in turns)
        yield {
            "nodes": f"{options.prefill}P{options.decode}D",
            "in the middle": event,
            "router": router,
            "host tier, GB": tier_gb or 0,
            "round": number,
            "prompt tokens": num_prompt,
            "seen before": round(1 - num_new / num_prompt, 3),
            "new": num_new,
            "computed": computed,
            "computed over new": round(computed / num_new, 3),
            "ttft p50 of later turns, ms": round(1000 * statistics.median(turn.ttft_s for turn in later), 1),
        }


@contextmanager
def _nodes(options: argparse.Namespace, tier_gb: float | None, *, is_before: bool) -> Iterator[VariantCluster]:
    """Start a router and nodes, and kill them at the end."""
    node_flags = ["--speculative", options.speculative, *options.node_flags.split()]
    node_flags += [] if options.num_pages is None else ["--num-pages", str(options.num_pages)]
    node_flags += [] if tier_gb is None else ["--host-cache-gb", str(tier_gb)]
    with tempfile.TemporaryDirectory() as directory:
        cluster = VariantCluster(Path(directory), options.model)
        cluster.ready_s, cluster.router_flags = options.ready_s, options.router_flags.split()
        if is_before:
            names = "router", "prefill-0", "prefill-1", "decode-0", "decode-1"
            cluster.releases = dict.fromkeys(names, options.before)
        try:
            cluster.start(options.prefill, options.decode, router_flags=cluster.router_flags, node_flags=node_flags)
            yield cluster
        except BaseException:
            print(cluster.tails(), file=sys.stderr)
            raise
        finally:
            cluster.kill_all()


def main() -> None:
    parser = flags(__doc__, rounds=1)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--before", type=Path, help="directory of the `baton` of another commit")
    parser.add_argument("--routers", nargs="+", default=[TOLD], choices=[TOLD, "before", *VARIANTS])
    parser.add_argument("--breaks", nargs="+", default=["nothing"], choices=get_args(Break))
    parser.add_argument("--prefill", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--decode", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--children", type=int, nargs=2, default=(2, 2), help="fewest and most of a conversation")
    parser.add_argument("--side-by-side", type=int, default=SIDE_BY_SIDE, help="turns at once")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--speculative", default="auto", help="setting of all nodes")
    parser.add_argument("--first-words", type=int, default=120, help="of a conversation")
    parser.add_argument("--words", type=int, default=30, help="that the client says in each turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--num-pages", type=int, help="of each pool")
    parser.add_argument("--host-cache-gb", type=float, help="of each node, in half of the loads")
    parser.add_argument("--tier-first", action="store_true", help="run the loads with a host tier first")
    parser.add_argument("--node-flags", default="", help="further flags of all nodes, in one word")
    parser.add_argument("--router-flags", default="", help="further flags of the router, in one word")
    parser.add_argument("--ready-s", type=float, default=READY_S, help="how long nodes may take to start")
    options = parser.parse_args()
    report(options, "turns", rows(options), unit="tokens")


if __name__ == "__main__":
    main()
