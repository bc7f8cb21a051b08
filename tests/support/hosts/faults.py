"""Streams between hosts while the network is faulty: each equals the clean run, or ends with one clear error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import held
from host_cluster import HostCluster
from patience import Patience, wait_until
from streams import Known, Stream
from switch import Conditions
from tokenizers import Tokenizer

SPACING_S = 0.15  # between two requests of a load
STREAM_S = 90.0  # after the fault, each stream has ended within this
SETTLE_S = 30.0
CUT = "the connection ended without an error"  # that of the client to the router
_TEXTS = ("def main(", "class Parser:\n    def parse(self", "import os\n\n" * 25, "for line in open(path):\n" * 12)


def clean_answers(cluster: HostCluster, model: Path) -> list[Known]:
    """Return requests of several kinds, greedy and sampled, and the answer of each without a fault."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    name, answers = cluster.model_name, list[Known]()
    for number, text in enumerate(_TEXTS):
        prompt = tokenizer.encode(text).ids
        body = {"model": name, "prompt": prompt, "seed": number, "temperature": 0.8 * (number % 2), "max_tokens": 150}
        body |= {"ignore_eos": True, "return_token_ids": True}
        status, answer = cluster.post("/v1/completions", body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        answers.append(Known(f"text {number}", body, (tuple(choice["token_ids"]),), ((choice["finish_reason"], None),)))
    return answers


@dataclass
class Load:
    """Requests that are sent one after the other, whether or not the earlier ones are answered."""

    cluster: HostCluster
    answers: Sequence[Known]
    streams: list[Stream] = field(default_factory=list[Stream])

    def send_for(self, seconds: float) -> None:
        """Send requests for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.streams.append(Stream(self.cluster.connection, self.answers[len(self.streams) % len(self.answers)]))
            time.sleep(SPACING_S)

    def judge(self, *, allowed: str | None = None) -> dict[str, int]:
        """Wait for all streams. Check that none hangs, that none has a wrong token, and that each is done, or has ended
        with one error in which the pattern `allowed` is found; CUT is that of a lost router. Then check that all nodes
        are back and nothing is held. Return how many had which outcome."""
        patience = Patience(STREAM_S)
        outcomes: dict[str, int] = {}
        for stream in self.streams:
            while stream.thread.is_alive() and not patience.is_over():
                stream.thread.join(0.1)
            assert not stream.thread.is_alive(), f"{stream.known.name} ({stream.rid}) hangs at {stream.num_tokens}"
            assert not stream.problems, (stream.rid, stream.problems)
            if stream.outcome != "done":
                words = stream.error or CUT
                assert allowed is not None and re.search(allowed, words), (stream.rid, words)
            outcomes[stream.outcome] = outcomes.get(stream.outcome, 0) + 1
        cluster = self.cluster
        cluster.wait_ready(num_nodes=len(cluster.nodes_wanted))
        wait_until(lambda: not _held(cluster), lambda: f"books at rest: {_held(cluster)}", SETTLE_S)
        return outcomes


def _held(cluster: HostCluster) -> list[str]:
    books = cluster.ledger()
    books["router"]["canaries"] = 0  # there may always be some
    for report in books["nodes"].values():
        if report and any("canary-" in unit for unit in report["requests"] + report["tickets"]):
            return ["canaries"]
    return held(books)


def play(
    cluster: HostCluster, answers: Sequence[Known], fault: Callable[[Load], Any], *, allowed: str | None = None
) -> dict[str, int]:
    """Send requests before, during and after a fault, which may send more, and judge them as `Load.judge` does."""
    load = Load(cluster, answers)
    load.send_for(3 * SPACING_S)
    fault(load)
    load.send_for(3 * SPACING_S)
    return load.judge(allowed=allowed)


@contextmanager
def conditions(cluster: HostCluster, worse: Conditions, *ways: tuple[str, str]) -> Iterator[None]:
    """Let frames of these ways (source, target) travel under worse conditions in the block; of all, if none is
    named."""
    hosts = cluster.network.hosts
    chosen = ways or [(source, target) for source in hosts for target in hosts if source != target]
    for way in chosen:
        cluster.network.set(*way, worse)
    try:
        yield
    finally:
        for way in chosen:
            cluster.network.set(*way, Conditions())
