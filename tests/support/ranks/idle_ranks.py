"""One life of ranks with sequences of their own, in which each rank is idle in every phase of the other's work.

prefill, decode, catch-up, draft, verify, recompute      with the other rank idle
a verify in which one rank's last sequence ends and the other rank's first one takes part
the same phases with the ranks exchanged
both ranks at once, with unlike batches and numbers of drafts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafters import ALL, make_bigram, make_right, settings, target_of
from heads import KINDS
from node_pair import params
from rank_sequences import RankSequences, Request
from solo import Running, coach, plain_texts
from thread_ranks import ThreadRanks

from baton.decode_node.config import DecodeConfig
from baton.engine.ranks.agreement import Agreed, Proposal
from baton.engine.work import CatchUp

REQUESTS: dict[str, Request] = {
    "first": ([7, 8, 9, 7, 8, 9, 7, 8, 3, 5, 2], params(13, seed=1)),
    "second": (list(range(40, 53)), params(13, temperature=0.9, seed=2)),
    "third": ([3, 1], params(8, temperature=0.7, seed=3, top_k=40, repetition_penalty=1.2)),
    "fourth": ([4, 4, 8, 15, 16, 23, 42, 8], params(8, seed=4)),
    "fifth": ([5], params(5, temperature=0.8, seed=5, top_p=0.9, num_logprobs=1)),
}
UNLIKE_SIZES = {"standalone": 32, "eagle3": 24, "frozen-kv-mtp": 24}
UNLIKE_DTYPES = tuple(name for name in ALL if "frozen" not in name)
TREES = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp")
PHASES = ("prefill", "decode", "draft and verify", "recompute")


class Cell(NamedTuple):
    """A drafter, the way in which it differs from its target, and the rank that works first."""

    drafter: str
    variant: str  # alike, narrow, wide, float32-bfloat16, bfloat16-float32, tree, padded
    first: int


def cells() -> list[Cell]:
    """Return all cells for two ranks."""
    pairs = [(name, variant) for name in ("ngram", *ALL) for variant in ("alike", "padded")]
    pairs += [(name, variant) for name in UNLIKE_SIZES for variant in ("narrow", "wide")]
    pairs += [(name, variant) for name in UNLIKE_DTYPES for variant in ("float32-bfloat16", "bfloat16-float32")]
    pairs += [(name, "tree") for name in TREES]
    return [Cell(name, variant, first) for name, variant in pairs for first in (0, 1)]


class World:
    """Ranks of one cell, and the right output of every request."""

    def __init__(self, ranks: ThreadRanks, truths: dict[str, list[int]] | None, *, is_often_right: bool) -> None:
        """`truths`: generated tokens by request; None: the target's dtype allows ties. `is_often_right`: the drafter's
        drafts are."""
        self.ranks, self.truths, self.is_often_right = ranks, truths, is_often_right
        self.own = RankSequences(ranks)
        self.idle: set[tuple[str, int]] = set()  # phases, and ranks that were idle in them
        self.has_shared = False  # a forward had rows of all ranks
        self._has_rounds: list[bool] = []  # of each step
        self.has_kv = ranks.executors[0].keeps_missed_rows
        self.few = ranks.executors[0].shape.choices[1]  # steps
        self.phase_of_chunks = "prefill"  # the phase of chunks now
        # of each rank and step: the forwards of the drafter since the ranks agreed
        self._forwards: list[list[list[tuple[bool, int]]]] = [[[]] for _ in ranks.engines]
        for engine, forwards in zip(ranks.engines, self._forwards, strict=True):
            _watch(engine.drafter, forwards)
        for rank, steps in enumerate(ranks.steps):
            self._note_steps(rank, steps)

    def live(self, first: int) -> None:
        """Run the whole life, and check the output. Rank `first` works first."""
        other, own, wanted = 1 - first, self.own, list(range(len(self.own.books)))
        [one] = own.start({first: REQUESTS["first"]}, chunk=5)
        self._alone(first, one)
        [two] = own.start({other: REQUESTS["second"]}, chunk=5)
        own.round(3)  # the last of the first rank, and the first of the other one
        assert [len(own.running[rank]) for rank in (first, other)] == [0, 1]
        self._alone(other, two)
        own.run(3)
        three, four = own.start({other: REQUESTS["third"], first: REQUESTS["fourth"]}, chunk=3)
        own.round(*[self.few if rank == other else 3 for rank in wanted])
        [five] = own.start({first: REQUESTS["fifth"]})
        assert [len(own.running[rank]) for rank in (first, other)] == [2, 1]
        own.run(3, 0)
        started = dict(zip(REQUESTS, (one, two, three, four, five), strict=True))
        for name, sequence in started.items():
            max_tokens = sequence.sampling.params.max_tokens
            assert self.truths is None or sequence.generated[:max_tokens] == self.truths[name][:max_tokens], name
        assert not self.is_often_right or self._num_accepted(started.values()) > 5
        assert self.idle >= {(phase, rank) for phase in PHASES for rank in (first, other)}
        traces = self.ranks.group.traces
        assert all(trace == traces[0] for trace in traces)
        assert self.has_shared or self.ranks.size > 2
        self.check_drafters()

    def _alone(self, rank: int, sequence: Running) -> None:
        """Run the sequence while the other ranks are idle, until the next round must end it."""
        most = sequence.sampling.params.max_tokens - 1
        for num_steps in (0, 0, self.few, 3):
            self.own.round(num_steps)
        self.phase_of_chunks = "recompute"
        self.own.recompute(rank, sequence)
        self.phase_of_chunks = "prefill"
        assert len(sequence.generated) <= most, "the requests are too short for this drafter"
        while len(sequence.generated) < most:
            self.own.round(0)

    def _num_accepted(self, sequences: Any) -> int:
        return sum(sum(sequence.num_accepted) for sequence in sequences)

    def _note_steps(self, rank: int, steps: Any) -> None:
        """Note the steps of a rank, and the forwards of its drafter in each."""
        agree, run_idle, forwards = steps._agree_once, steps._run_idle, self._forwards[rank]
        executor = self.ranks.executors[rank]
        submit = executor.submit

        def noted(proposal: Proposal) -> Agreed:
            forwards.append([])
            agreed = agree(proposal)
            if rank == 0:
                self._has_rounds.append(agreed.has_rounds)
            if all(agreed.lens) and not any(each.is_idle for each in agreed.proposals):
                self.has_shared = True
            if proposal.is_idle:
                rounds = "draft and verify" if agreed.num_steps else "decode"
                self.idle.add((rounds if agreed.has_rounds else self.phase_of_chunks, rank))
            return agreed

        def without_rows(agreed: Agreed) -> None:
            run_idle(agreed)
            assert self._pads or not any(num_tokens for _, num_tokens in forwards[-1]), forwards[-1]

        def without_catching_up(work: Any) -> None:  # the drafter is whole on each rank, so a rank catches up alone
            before = list(forwards[-1])
            submit(work)
            if isinstance(work, CatchUp):
                forwards[-1][:] = before

        steps._agree_once, steps._run_idle = noted, without_rows
        executor.submit = without_catching_up  # type: ignore[method-assign]

    def check_drafters(self) -> None:
        """Check that in every round an idle rank ran the drafter as often as the others, for zero rows or padding, and
        that it ran none beside a chunk."""
        self.ranks.do(dict.fromkeys(range(self.ranks.size), lambda: None))
        for has_rounds, *logs in zip([False, *self._has_rounds], *self._forwards, strict=True):
            ran = [[is_extend for is_extend, _ in log] for log in logs]
            assert not has_rounds or all(each == ran[0] for each in ran), (
                f"ranks ran unlike forwards of the drafter: {ran}"
            )

    @property
    def _pads(self) -> bool:
        return bool(self.ranks.executors[0].buckets.sizes)


class _Watched:
    """A head or a draft model. Notes each forward: whether it is an extend, and the number of its tokens."""

    def __init__(self, inner: Any, log: list[list[tuple[bool, int]]]) -> None:
        self._inner, self._log = inner, log

    def forward(self, batch: Any, *rest: Any, **options: Any) -> Any:
        self._log[-1].append((options.get("is_extend", False), batch.num_tokens))
        return self._inner.forward(batch, *rest, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watch(drafter: Any, log: list[list[tuple[bool, int]]]) -> None:
    """Note the forwards of a drafter in the last list of `log`."""
    for name in ("_model", "_head"):
        if hasattr(drafter, name):
            setattr(drafter, name, _Watched(getattr(drafter, name), log))
    if hasattr(drafter, "_layers"):
        drafter._layers = [_Watched(layer, log) for layer in drafter._layers]


class Worlds:
    """Makes the ranks of a cell. The right output of a target is computed once."""

    def __init__(self, checkpoint: Callable[..., Path]) -> None:
        self._checkpoint = checkpoint
        self._truths: dict[Path, dict[str, list[int]]] = {}

    @contextmanager
    def of(self, cell: Cell, directory: Path, monkeypatch: pytest.MonkeyPatch, *, size: int = 2) -> Iterator[World]:
        """Start ranks. Their drafters are often told the right token."""
        model, more = self._settings(cell, directory)
        truths = self._truths_of(model)
        told = {wanted.seed: [*ids, *truths[name]] for name, (ids, wanted) in REQUESTS.items()}
        coach(monkeypatch, told, lambda _seed, position: position % 3 != 0)
        common: dict[str, Any] = {"device": "cpu", "threads": 1, "page_size": 4, "num_pages": 128}
        buckets = (1, 2, 4) if cell.variant == "padded" else ()
        config = DecodeConfig(model=str(model), **common, **more)
        with ThreadRanks(size, config, buckets=buckets) as ranks:
            has_ties = more.get("dtype") == "bfloat16"
            is_often_right = (
                not has_ties and cell.drafter != "ngram" and (cell.variant != "tree" or cell.drafter in KINDS)
            )
            yield World(ranks, None if has_ties else truths, is_often_right=is_often_right)

    def _settings(self, cell: Cell, directory: Path) -> tuple[Path, dict[str, Any]]:
        name, variant = cell.drafter, cell.variant
        if variant not in ("narrow", "wide"):
            model = target_of(name, self._checkpoint)
            more = settings(name, model, directory, steps=3)
            if variant == "tree":
                more |= {"draft_topk": 2, "draft_tokens": 4}
            if variant == "tree" and name in KINDS:  # nobody tells a tree what is right
                model = make_bigram(model, directory / "bigram")
                more["draft_model"] = str(make_right(name, model, directory / "right"))
            elif "-" in variant:
                more |= dict(zip(("dtype", "draft_dtype"), variant.split("-"), strict=True))
            return model, more
        size = 32 if variant == "wide" else 64
        model = target_of(name, self._checkpoint, hidden_size=size)
        more = settings(name, model, directory, steps=3)
        if name == "standalone":
            more["draft_model"] = str(self._checkpoint("llama", hidden_size=96 - size))
        return model, more

    def _truths_of(self, model: Path) -> dict[str, list[int]]:
        if model not in self._truths:
            torch.set_num_threads(1)
            prompts, asked = zip(*REQUESTS.values(), strict=True)
            texts = plain_texts(model, prompts, asked.__getitem__, max(each.max_tokens for each in asked) + 4)
            self._truths[model] = {name: texts[index][len(prompts[index]) :] for index, name in enumerate(REQUESTS)}
        return self._truths[model]
