"""A round and a chunk of prompts in one forward bring what they bring one after the other.

On a CPU the executor runs the steps of a round directly. The graphs' own functions run in Triton's interpreter, with a
stand-in for the capture. tests/gpu/test_mixed_cuda.py tests the graphs themselves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ORDINARY, STREAM_MTP, settings, target_of
from grammars import LETTERS
from node_pair import params
from scratch import check_state
from solo import POISON, Running, Solo, coach, spoil
from thinned import thinned

from baton.engine.pace import mixed_sizes
from baton.engine.pace.draft_length import DraftShape
from baton.engine.pace.mixed_sizes import MixedSize
from baton.engine.prompts.graphs import PromptInputs
from baton.engine.rounds import device_executor, graphs, step_graphs
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.rounds.rounds import LocalChunk
from baton.engine.rounds.step_graphs import StepGraphs
from baton.engine.rounds.trees import Drafts
from baton.engine.sampling.state import SamplingState
from baton.engine.work import BatchRow
from baton.metadata.wire.request import SamplingParams

CHAIN, TREE = DraftShape(5), DraftShape(3, 2, 9)
PAGE = 4  # tokens of a page of Solo
BOUND = 1e-3
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "grammar": LETTERS},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 1.3, "logit_bias": {7: 2.0}, "presence_penalty": 0.3},
]
LENS = (7, 12, 3)  # of prompts that are computed at the start
LOCAL_LENS = (2, 9, 14, 14, 6, 17, 30)  # of those that are computed beside rounds; the fourth finds pages of the third
CHUNKS = (1, PAGE - 1, PAGE, PAGE + 1, 13)
TREES = {"draft_topk": 2, "draft_steps": 3}


def asked(index: int) -> SamplingParams:
    return params(90, seed=index, **PARAMS[index % len(PARAMS)])


def prompts() -> list[list[int]]:
    rng = random.Random(14)
    made = [[rng.randrange(512) for _ in range(num)] for num in (*LENS, *LOCAL_LENS)]
    made[len(LENS) + 3] = made[len(LENS) + 2]
    return made


@dataclass
class World:
    """Sequences that run, and those whose prompts are computed beside their rounds."""

    solo: Solo
    joins: bool  # whether a chunk goes beside a round, or before it
    running: list[Running] = field(default_factory=list)
    local: dict[int, Running] = field(default_factory=dict)  # by number, unfinished prompts
    all: list[Running] = field(default_factory=list)

    def begin(self) -> None:
        for index, prompt in enumerate(prompts()):
            if index < len(LENS):
                sequence = self.solo.start(prompt, asked(index))
                self.running.append(sequence)
            else:
                sequence = self._local(index, prompt)
                self.local[index] = sequence
            self.all.append(sequence)

    def _local(self, index: int, prompt: list[int]) -> Running:
        state = SamplingState(asked(index), prompt, vocab_size=self.solo.engine.model_config.vocab_size)
        pages, tail = self.solo.allocate(len(prompt) + 110)
        sequence = Running(len(prompt), list(prompt), 0, pages, state, lacks_draft=True, tail=tail)
        self.solo.rounds.admit(sequence, None)
        return sequence

    def share_pages(self, source: int, target: int) -> None:
        """Let a prompt find the first two pages of the same prompt."""
        given, taking = self.all[source], self.local[target]
        taking.pages = given.pages[:2] + taking.pages[2:]
        if given.tail is not None and taking.tail is not None:
            taking.tail.pages[:2] = given.tail.pages[:2]
        taking.num_computed = 2 * PAGE

    def step(self, chunks: dict[int, int], members: Sequence[int], num_steps: int, limits: Sequence[int]) -> None:
        """Run a round of `members`, and compute so many tokens of prompts."""
        sequences = [self.local[index] for index in chunks]
        rows: list[BatchRow] = []
        for sequence, most in zip(sequences, chunks.values(), strict=True):
            start = sequence.num_computed
            stop = min(start + most, len(sequence.token_ids) - 1)
            tail = None if sequence.tail is None else sequence.tail.pages
            rows.append(BatchRow(sequence.token_ids[start:stop], start, sequence.pages, 0, tail=tail))
        rounds, shape = self.solo.rounds, self.solo.rounds.shape.with_steps(num_steps)
        beside = LocalChunk(sequences, rows) if rows and self.joins else None
        if rows and beside is None:
            rounds.recompute(sequences, rows)
        taking = [self.running[index] for index in members]
        self.solo.take(taking, rounds.collect(rounds.submit(taking, shape, limits, beside)))
        for index, row in zip(chunks, rows, strict=True):
            sequence = self.local[index]
            sequence.num_computed += len(row.input_ids)
            if sequence.num_computed == len(sequence.token_ids) - 1:
                self.running.append(self.local.pop(index))


def run(worlds: Sequence[World], num_turns: int = 28, before: Callable[[World], None] = lambda _: None) -> int:
    """Do the same in all worlds, and compare them with the first. Return the number of steps with a chunk."""
    rng, num_beside = random.Random(3), 0
    for world in worlds:
        world.begin()
    shape, shared = worlds[0].solo.rounds.shape, False
    for turn in range(num_turns):
        local, third = worlds[0].local, len(LENS) + 2
        if not shared and worlds[0].all[third].num_computed >= 2 * PAGE:
            shared = True
            for world in worlds:
                world.share_pages(third, third + 1)
        open_prompts = [index for index in local if shared or index != third + 1]
        chosen = rng.sample(open_prompts, min(len(open_prompts), rng.choice((0, 1, 1, 2, 3))))
        chunks = {index: rng.choice(CHUNKS) for index in chosen}
        members = rng.sample(range(len(worlds[0].running)), rng.randint(1, len(worlds[0].running)))
        num_steps = rng.choice((0, shape.num_steps, rng.choice(list(shape.choices))))
        limits = [rng.choice((num_steps, num_steps // 2, 0)) for _ in members]
        num_beside += bool(chunks)
        for world in worlds:
            before(world)
            world.step(chunks, members, num_steps, limits)
        compare(worlds, turn)
    assert not worlds[0].local and shared
    return num_beside


def compare(worlds: Sequence[World], turn: int) -> None:
    first = worlds[0]
    for world in worlds[1:]:
        for ours, theirs in zip(world.all, first.all, strict=True):
            assert ours.token_ids == theirs.token_ids, turn
            assert ours.num_accepted == theirs.num_accepted and ours.num_computed == theirs.num_computed
            assert ours.lacks_draft == theirs.lacks_draft and ours.num_missed == theirs.num_missed
            if turn % 8 == 7:
                kvs = [(world.solo.target_kv(ours), first.solo.target_kv(theirs))]
                own = world.solo.draft_kv(ours), first.solo.draft_kv(theirs)
                if own[0] is not None and own[1] is not None and not ours.num_missed:
                    kvs.append((own[0], own[1]))
                for mine, expected in kvs:
                    torch.testing.assert_close(mine, expected, atol=BOUND, rtol=BOUND)
        if turn % 8 == 7:
            for ours, theirs in zip(world.running, first.running, strict=True):
                check_state(world.solo.draft(ours), first.solo.draft(theirs))


def tell(monkeypatch: pytest.MonkeyPatch, solo: Solo) -> None:
    """Let drafters propose most of the right text."""
    plain = [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts())]
    for _ in range(36):
        solo.round(plain, 0)
    truths = {index: sequence.token_ids for index, sequence in enumerate(plain)}
    for sequence in plain:
        solo.rounds.release(sequence)
    coach(monkeypatch, truths, lambda seed, position: (position + 3 * seed) % 7 not in (2, 3))


def count_mixed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each chunk that shares a forward."""
    mixed: list[int] = []
    verify = device_executor.verify

    def counting(engine: Any, proposed: Any, beside: Any = None) -> Any:
        if beside is not None:  # a round with a grammar calls it, too
            mixed.append(beside.num_tokens)
        return verify(engine, proposed, beside)

    monkeypatch.setattr(device_executor, "verify", counting)
    return mixed


@pytest.mark.parametrize(
    ("name", "shape"),
    thinned(
        [
            *[(name, {}) for name in ("ngram", *ORDINARY, STREAM_MTP)],
            *[(name, TREES) for name in ("eagle", "eagle3", "frozen-kv-mtp")],
        ],
        lambda i, name, _: i in (0, 8, 12) or name == STREAM_MTP,
    ),
    ids=lambda each: each if isinstance(each, str) else ("tree" if each else "chain"),
)
def test_a_mixed_forward_brings_what_two_forwards_bring(
    name: str, shape: dict[str, int], checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(name, checkpoint)
    drafting = settings(name, model, tmp_path, steps=3) | shape
    worlds = [World(Solo(model, num_pages=3000, buckets=(4,), **drafting), joins) for joins in (False, True)]
    tell(monkeypatch, worlds[0].solo)
    mixed = count_mixed(monkeypatch)
    num_beside = run(worlds)
    assert len(mixed) == num_beside > 8 and all(mixed)
    accepted = [count for each in worlds[0].all for count in each.num_accepted]
    assert len(set(accepted)) > 1 or name == "ngram", accepted


# --- which sizes have graphs, and which one serves a round ---


# --- the graphs, captured by a stand-in ---

GRAPHED = ("ngram", "standalone", "eagle3", "frozen-kv-mtp", "mtp3-deepseek")
PADDED_CHUNKS = (6, 24)  # sizes of chunks of small graphs


class HostGraph:
    """A graph on the host: its replay runs the function again, and writes the results where the first run left them."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.result = run, run()

    def replay(self) -> None:
        for static, new in zip(tensors(self.result), tensors(self._run()), strict=True):
            static.copy_(new)


def tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for each in result or () for tensor in tensors(each)]


def host_batch(inputs: PromptInputs, page_size: int) -> ForwardBatch:
    """Return the batch of a captured chunk for the kernels of a CPU, which know its lengths on the host. The tokens of
    padding form a sequence on the page of padding."""
    starts = inputs.starts.tolist()
    lens = [stop - start for start, stop in itertools.pairwise(starts)]
    seqs = [seq for seq, num in enumerate(lens) if num]
    seq_lens, positions = inputs.seq_lens.clone(), inputs.positions.clone()
    seq_lens[-1] = min(lens[-1], page_size)
    table = inputs.block_table.clone()
    if lens[-1]:
        positions[starts[-2] :] = torch.arange(lens[-1])
        seq_lens[-1], table[-1] = lens[-1], 0
    return ForwardBatch(
        input_ids=inputs.input_ids,
        positions=positions,
        query_lens=tuple(lens[seq] for seq in seqs),
        seq_lens=seq_lens[seqs],
        block_table=table[seqs],
        logit_rows=None,
        page_size=page_size,
    )


@pytest.fixture
def host_graphs(monkeypatch: pytest.MonkeyPatch) -> list[HostGraph]:
    """Let executors capture graphs on the host. Returns the graphs that were captured."""
    made: list[HostGraph] = []

    def captured(run: Callable[[], Any], pool: object) -> tuple[HostGraph, Any]:
        made.append(HostGraph(run))
        return made[-1], made[-1].result

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(device_executor, "captures", lambda device: True)
    monkeypatch.setattr(PromptInputs, "batch", host_batch)
    monkeypatch.setattr(mixed_sizes, "CHUNK_SIZES", PADDED_CHUNKS)
    for module in (graphs, step_graphs):
        monkeypatch.setattr(module, "captured", captured)
    return made


class Watched:
    """Checks replays of the graphs of an executor, and counts those of rounds with chunks."""

    def __init__(self, graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs, self.sizes = graphs, list[MixedSize]()
        self._replay, self._verify, self._propose = graphs._replay, graphs.verify, step_graphs.propose
        self._drafts: Drafts | None = None  # that the drafter proposed last
        monkeypatch.setattr(step_graphs, "propose", self._proposing)
        monkeypatch.setattr(graphs, "_replay", self._watched)
        monkeypatch.setattr(graphs, "verify", self._noting)

    def poison(self) -> None:
        """Overwrite what the steps of a round leave for each other."""
        for each in (self.graphs._seam.final, self.graphs._seam.extend, self.graphs._seam.beside):
            if each is not None:
                each.fill_(POISON)
        self.graphs._seam.allowed.fill_(0)
        self.graphs._seam.tokens.fill_(5)
        self.graphs._seam.parents.fill_(0)

    def _inputs(self) -> list[torch.Tensor]:
        blocks = [block.block for block in self.graphs._blocks.values()]
        return blocks + [inputs.block for inputs in self.graphs._prompts.values()]

    def _watched(self, key: Any) -> Any:
        before = [each.clone() for each in self._inputs()]
        result = self._replay(key)
        assert all(map(torch.equal, before, self._inputs())), key
        return result

    def _proposing(self, *rest: Any) -> Any:
        proposed = self._propose(*rest)
        self._drafts = proposed.drafts
        return proposed

    def _noting(self, size: MixedSize, *rest: Any) -> Any:
        """Check that the forward ran the drafts, which are rarely right in a tree."""
        self.sizes.append(size)
        result, seam = self._verify(size, *rest), self.graphs._seam
        if size.shape.num_steps:
            assert self._drafts is not None
            for ours, theirs in ((seam.tokens, self._drafts.tokens), (seam.parents, self._drafts.parents)):
                assert theirs is None or torch.equal(ours[: size.num_seqs], theirs)
        return result


def run_watched(
    direct: World, captured: World, monkeypatch: pytest.MonkeyPatch, host_graphs: list[HostGraph]
) -> tuple[Watched, int]:
    """Run both worlds; before each step, spoil what the graphs of the second must not read. Return its record, and the
    number of steps with a chunk."""
    owned = captured.solo.executor._graphs
    assert owned is not None and owned.steps is not None
    watched, num_captured = Watched(owned.steps, monkeypatch), len(host_graphs)
    tell(monkeypatch, direct.solo)

    def spoil_all(world: World) -> None:
        if world is captured:
            spoil(world.solo, world.running[0])
            watched.poison()

    num_beside = run([direct, captured], before=spoil_all)
    assert {size.shape.num_steps for size in watched.sizes} == {0, direct.solo.rounds.shape.num_steps}
    assert len(host_graphs) == num_captured, "service captures nothing"
    return watched, num_beside


@pytest.mark.parametrize(
    ("name", "shape"),
    thinned(
        [*[(name, {}) for name in GRAPHED], ("eagle", TREES)],
        lambda i, name, shape: name in ("eagle3", "mtp3-deepseek") or bool(shape),
    ),
    ids=lambda each: each if isinstance(each, str) else ("tree" if each else "chain"),
)
def test_graphs_of_the_steps_bring_what_two_forwards_bring(
    name: str,
    shape: dict[str, int],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host_graphs: list[HostGraph],
) -> None:
    """What a step or a round before left in static tensors, and what lies in padding, reaches nobody."""
    model = target_of(name, checkpoint)
    drafting = settings(name, model, tmp_path, steps=3) | shape
    direct = World(Solo(model, num_pages=800, **drafting), joins=False)
    captured = World(Solo(model, num_pages=800, buckets=(5,), **drafting), joins=True)
    captured.solo.executor.warm_up(expects_prompts=True)
    watched, num_beside = run_watched(direct, captured, monkeypatch, host_graphs)
    num_mixed = sum(size.num_tokens > 0 for size in watched.sizes)
    assert 4 < num_mixed < num_beside, "some rounds and chunks are too large for the graphs"
    assert {size.num_tokens for size in watched.sizes} == {0, *PADDED_CHUNKS}, "rounds with grammars, and with chunks"


@pytest.mark.parametrize(
    ("name", "shape"), thinned([("ngram", {}), ("eagle3", {}), ("eagle", TREES)], lambda i, *_: i != 1), ids=str
)
def test_graphs_of_rounds_with_grammars_need_no_chunks(
    name: str,
    shape: dict[str, int],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host_graphs: list[HostGraph],
) -> None:
    """On a node that expects no prompts, in every bucket, with any kind of sampling and number of drafts."""
    model = target_of(name, checkpoint)
    drafting = settings(name, model, tmp_path, steps=3) | shape
    direct = World(Solo(model, num_pages=800, **drafting), joins=False)
    captured = World(Solo(model, num_pages=800, buckets=(1, 2, 5, 10), **drafting), joins=False)
    captured.solo.executor.warm_up()
    watched, _ = run_watched(direct, captured, monkeypatch, host_graphs)
    assert {size.num_tokens for size in watched.sizes} == {0} and len({size.num_seqs for size in watched.sizes}) > 2
