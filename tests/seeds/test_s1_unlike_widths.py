"""S1: with unlike hidden sizes and dtypes of target and draft, each state has the width and dtype of its own side.

HiddenLayout and every state in use are checked with target and draft sizes 64/32 and 32/64, because with equal sizes a
layout that asks the wrong side is right by accident. The same holds for zero rows: idle then live inputs and back, a
batch that becomes empty, and a round in which all sequences finish while others join. Each defect is put back once and
caught.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import local_nodes
import pytest
import torch
from drafters import STREAM_MTP, make_bigram, make_right, target_of
from heads import ALGORITHM, KINDS, LAYERED, write_head
from layouts import make_layout
from node_pair import NodePair, node_pairs, params
from thinned import halved, thinned

from baton.decode_node.config import DecodeConfig
from baton.decode_node.scheduler import StepPlan
from baton.engine.drafters.base import Drafter, DraftState, PromptChunk
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.startup import load_engine
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.buffers import MetadataBuffers
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout, HiddenSpec
from baton.metadata.handoff.schema.schema import differences, make_schema
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

NODE = {"page_size": 4, "chunk_tokens": 6}
PROMPTS = [[7, 3, 11, 5, 9], [2], [4, 4, 8, 15, 16, 23, 42, 8, 15]]
SIZES = [(64, 32), (32, 64), (64, 64)]  # of target and draft
Checkpoint = Callable[..., Path]
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs(checks_books=False) as start:
        yield lambda model, **settings: start(model, prefill=NODE | settings, decode=NODE | settings)


def settings(kind: str, model: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    if kind == STREAM_MTP:
        return {"speculative": "mtp", "draft_steps": 3}
    head = write_head(directory, kind, model, **changes)
    return {"speculative": ALGORITHM[kind], "draft_model": str(head), "draft_steps": 3}


# --- the widths of two sides ---


def extend_of_the_draft(layout: HiddenLayout) -> HiddenSpec | None:
    if layout.algorithm == "none":
        return None
    return HiddenSpec(layout.draft_hidden_size * max(1, layout.num_aux), layout.draft_dtype)


def recurrent_of_the_wrong_side(layout: HiddenLayout) -> HiddenSpec | None:
    if layout.algorithm == "none":
        return None
    is_eagle3 = layout.algorithm == "eagle3"
    return HiddenSpec(layout.target_hidden_size if is_eagle3 else layout.draft_hidden_size, layout.target_dtype)


WRONG_SIDES = {"_extend": extend_of_the_draft, "_recurrent": recurrent_of_the_wrong_side}


def check_served(make_pair: MakePair, model: Path, drafting: dict[str, Any]) -> None:
    """Check that nodes with this drafter speculate, and generate the text of nodes without one."""
    pair = make_pair(model, **drafting)
    assert text_of(pair) == plain_text_of(model)
    pair.check_books()
    assert pair.decode.rounds.stats.num_drafted > 0


@functools.cache
def plain_text_of(model: Path) -> dict[tuple[str, int], list[int]]:
    """Return the text of nodes without a drafter."""
    with node_pairs() as start:
        return text_of(start(model, prefill=NODE, decode=NODE))


def text_of(pair: NodePair) -> dict[tuple[str, int], list[int]]:
    for i, prompt in enumerate(PROMPTS):
        pair.submit(f"r{i}", prompt, params(9))
    return {key: result.ids for key, result in pair.run().items()}


@pytest.mark.parametrize(("kind", "sizes"), halved(["eagle3", "frozen-kv-mtp"], SIZES), ids=str)
def test_unlike_sizes_are_served(
    kind: str, sizes: tuple[int, int], checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path
) -> None:
    model = checkpoint("llama", hidden_size=sizes[0])
    drafting = settings(kind, model, tmp_path, hidden_size=sizes[1])
    check_served(make_pair, model, drafting)
    extend = {"eagle3": 3 * sizes[0], "frozen-kv-mtp": sizes[0]}[kind]
    recurrent = {"eagle3": sizes[1], "frozen-kv-mtp": sizes[0]}[kind]
    engine = Engine(DecodeConfig(model=str(model), device="cpu", num_pages=8, **drafting))
    layout = engine.speculation.hidden
    assert layout.spec("extend") == (extend, "float32") and layout.spec("recurrent") == (recurrent, "float32")
    assert MetadataBuffers(engine.schema).get("recurrent_hidden").shape == (recurrent,)


@pytest.mark.parametrize(
    ("kind", "phase", "sizes"),
    thinned(  # equal sizes, which tell nothing, are tried once
        itertools.product(("eagle3", "frozen-kv-mtp"), WRONG_SIDES, SIZES),
        lambda i, kind, phase, sizes: sizes[0] != sizes[1] or i == 2,
    ),
    ids=str,
)
def test_a_layout_that_asks_the_wrong_side_is_caught(
    kind: str,
    phase: str,
    sizes: tuple[int, int],
    checkpoint: Checkpoint,
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = checkpoint("llama", hidden_size=sizes[0])
    drafting = settings(kind, model, tmp_path, hidden_size=sizes[1])
    monkeypatch.setattr(HiddenLayout, phase, WRONG_SIDES[phase])
    monkeypatch.setattr(local_nodes, "warm", set())  # the node's warm-up finds it
    if sizes[0] == sizes[1]:
        check_served(make_pair, model, drafting)  # equal sizes cannot tell
    else:
        with pytest.raises(
            ValueError,
            match=r"state of .* is \[num_rows|recurrent_hidden: .* does not fit|state of .* does not fit a buffer",
        ):
            check_served(make_pair, model, drafting)


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_head_of_another_width_reads_the_collapsed_states_of_streams(
    is_mutated: bool, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 on DeepSeek-V4: its rows are three collapsed states. The defect: each of them has all streams."""
    model = target_of(STREAM_MTP, checkpoint, hc_mult=4)
    drafting = settings("eagle3", model, tmp_path, hidden_size=24)
    if not is_mutated:
        check_served(make_pair, model, drafting)
        return
    monkeypatch.setattr(HiddenLayout, "_extend", lambda layout: HiddenSpec(3 * 4 * 64, layout.target_dtype))
    monkeypatch.setattr(local_nodes, "warm", set())  # the node's warm-up finds it
    with pytest.raises(ValueError, match=r"extend state of eagle3 is \[num_rows, 768\] float32, not \(\d, 192\)"):
        check_served(make_pair, model, drafting)


def check_rows_keep_the_drafts_dtype() -> None:
    """The metadata row of a bfloat16 target keeps the state of a float32 draft bit for bit."""
    layout = make_layout("eagle", target_dtype="bfloat16", draft_dtype="float32")
    pools = [PoolLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype=dtype) for dtype in ("bfloat16", "float32")]
    here, there = (MetadataBuffers(make_schema(*pools, 4, "eagle", layout, draft_topk=1)) for _ in range(2))
    state = torch.linspace(0.1, 0.2, 32)
    here.set("recurrent_hidden", state)
    there.unpack(here.pack())
    assert torch.equal(there.get("recurrent_hidden"), state)


def test_rows_keep_the_dtype_of_the_draft() -> None:
    check_rows_keep_the_drafts_dtype()


def test_the_dtype_of_the_wrong_side_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_target(layout: HiddenLayout) -> HiddenSpec:
        return HiddenSpec(layout.draft_hidden_size, layout.target_dtype)

    monkeypatch.setattr(HiddenLayout, "_recurrent", of_the_target)
    with pytest.raises(ValueError, match="does not fit"):
        check_rows_keep_the_drafts_dtype()


# --- the dtypes of two sides ---

DTYPES = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]  # of target and draft
WITH_DTYPE = ["standalone", "eagle", "eagle3", "mtp-deepseek", "mtp3-deepseek", "mtp3-mimo", STREAM_MTP]


def unlike_dtypes(kind: str, dtypes: tuple[str, str], model: Path, directory: Path, **shape: Any) -> dict[str, Any]:
    """Return settings of a node whose drafter computes in another dtype than its target."""
    if kind == "standalone":
        drafting: dict[str, Any] = {"speculative": "standalone", "draft_model": str(model), "draft_steps": 3}
    else:
        drafting = settings(kind, model, directory / kind)
    return {"dtype": dtypes[0], "draft_dtype": dtypes[1], **drafting, **shape}


@pytest.mark.each_value
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WITH_DTYPE)
def test_every_state_and_pool_has_the_dtype_of_its_side(
    kind: str, dtypes: tuple[str, str], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = target_of(kind, checkpoint)
    drafting = unlike_dtypes(kind, dtypes, model, tmp_path)
    engine = load_engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))
    target, draft = (getattr(torch, name) for name in dtypes)
    schema, layout = engine.schema, engine.speculation.hidden
    assert schema.draft is not None and (schema.target.dtype, schema.draft.dtype) == dtypes
    assert engine.draft_pools is not None and (engine.kv.dtype, engine.draft_pools.kv.dtype) == (target, draft)
    assert engine.drafter is not None
    state = dict(engine.drafter.allocate(2).present())
    fields = {field.name: field.dtype for field in schema.row}
    if layout.num_target_rows:
        assert (state["rows"].dtype, fields["target_rows"]) == (target, dtypes[0])
    elif kind == "standalone":
        assert not state
    else:
        assert (state["hidden"].dtype, fields["recurrent_hidden"]) == (draft, dtypes[1])


@pytest.mark.parametrize(
    ("kind", "draft_dtype"),
    thinned(itertools.product(WITH_DTYPE, ("bfloat16", "float16")), lambda i, *_: i in (0, 5, 10)),
)
def test_a_draft_of_16_bits_serves_a_float32_target(
    kind: str, draft_dtype: str, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path
) -> None:
    """Through the handoff: the text is that of the target alone."""
    model = target_of(kind, checkpoint)
    check_served(make_pair, model, unlike_dtypes(kind, ("float32", draft_dtype), model, tmp_path))


@pytest.mark.parametrize("kind", thinned(["eagle", "eagle3"], lambda i, _: i == 0))
def test_a_tree_of_16_bits_serves_a_float32_target(
    kind: str, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path
) -> None:
    model = target_of(kind, checkpoint)
    check_served(make_pair, model, unlike_dtypes(kind, ("float32", "bfloat16"), model, tmp_path, draft_topk=2))


@pytest.mark.parametrize("kind", ["standalone", "eagle"])
def test_a_draft_of_16_bits_is_still_right(
    kind: str, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path
) -> None:
    """A draft that is the target in float32 is seldom wrong in bfloat16. A state that was read in the wrong dtype would
    make it wrong nearly always."""
    model = make_bigram(checkpoint("llama"), tmp_path / "bigram")
    drafting = unlike_dtypes(kind, ("float32", "bfloat16"), model, tmp_path)
    if kind == "eagle":
        drafting["draft_model"] = str(make_right("eagle", model, tmp_path / "right"))
    pair = make_pair(model, **drafting)
    for i, prompt in enumerate(PROMPTS):
        pair.submit(f"r{i}", prompt, params(24))
    pair.run()
    pair.check_books()
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > 40 and stats.num_accepted > 0.9 * stats.num_drafted, stats


@pytest.mark.parametrize("kind", ["eagle", "mtp3-mimo", STREAM_MTP])
def test_a_state_that_is_not_cast_is_caught(
    kind: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the target's rows go into the draft as they are."""
    model = target_of(kind, checkpoint)
    drafting = unlike_dtypes(kind, ("float32", "bfloat16"), model, tmp_path)
    monkeypatch.setattr(HiddenLayout, "to_draft", lambda _, rows: rows)
    engine = Engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))
    drafter, extend = engine.drafter, engine.speculation.hidden.allocate("extend", 2)
    assert drafter is not None and extend is not None
    with pytest.raises(RuntimeError, match=r"dtype|BFloat16"):
        drafter.observe_prompt([PromptChunk([5, 6, 7], 0, 2, [1])], extend)


def test_nodes_whose_drafts_have_unlike_dtypes_refuse_each_other(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")

    def schema(draft: str) -> HandoffSchema:
        drafting = unlike_dtypes("eagle", ("float32", draft), model, tmp_path / draft)
        return Engine(DecodeConfig(model=str(model), device="cpu", num_pages=8, **drafting)).schema

    assert differences(schema("float32"), schema("bfloat16")) == [
        "draft.dtype: float32 here, bfloat16 there",
        "row.recurrent_hidden: 64 x float32 here, 64 x bfloat16 there",
    ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "frozen-kv-mtp",
            "attends to the target's KV, so it computes in the target's dtype float32, but draft_dtype is",
        ),
        ("ngram", "speculative ngram takes no draft_dtype, but bfloat16 was given"),
        ("none", "speculative none takes no draft_dtype, but bfloat16 was given"),
    ],
)
def test_a_drafter_without_a_dtype_of_its_own_refuses_one(
    kind: str, words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    drafting = {"speculative": kind} if kind in ("ngram", "none") else settings(kind, model, tmp_path)
    with pytest.raises(ConfigError, match=words):
        Engine(DecodeConfig(model=str(model), device="cpu", num_pages=8, draft_dtype="bfloat16", **drafting))


# --- zero rows ---


def check_idle(rounds: Rounds) -> None:
    """Run idle inputs before and after live ones: zero rows give no result and change nothing."""
    engine, drafter = rounds.executor.engine, rounds.executor.drafter
    assert drafter is not None
    layout = engine.speculation.hidden
    pools = [kv.clone() for kv in engine.kvs]
    nobody, none = SamplingBatch.of([]), torch.zeros(0, dtype=torch.int64)
    assert not rounds.run([], DraftShape(0), []).rows and not rounds.run([], rounds.shape, []).rows
    check_empty(drafter, drafter.finish_prompt([], none, layout.allocate("extend", 0), nobody))
    drafter.observe_prompt([PromptChunk([5, 6, 7], 2, 3, [1])], layout.allocate("extend", 1))  # no next token yet
    check_empty(drafter, drafter.finish_prompt([], none, layout.allocate("extend", 0), nobody))
    assert rounds.stats.num_verified == 0
    for before, after in list(zip(pools, engine.kvs, strict=True))[: 2 if engine.cache.lookahead else 1]:
        assert torch.equal(before, after)  # STANDALONE alone has a row of its own for a prompt's last token


def check_empty(drafter: Drafter, state: DraftState) -> None:
    """Check that zero rows have the fields, widths and dtypes of live rows."""
    live = dict(drafter.allocate(2).present())
    assert {name: (0, *value.shape[1:]) for name, value in live.items()} == {
        name: tuple(value.shape) for name, value in state.present()
    }
    assert all(value.dtype == live[name].dtype for name, value in state.present())


@pytest.fixture(params=["standalone", "ngram", *KINDS, *LAYERED, STREAM_MTP])
def idle(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Rounds:
    model = target_of(request.param, checkpoint)
    if request.param == "ngram":
        drafting: dict[str, Any] = {"speculative": "ngram"}
    elif request.param == "standalone":
        drafting = {"speculative": "standalone", "draft_model": str(model)}
    else:
        drafting = settings(request.param, model, tmp_path)
    engine = Engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))
    return Rounds(DeviceExecutor(engine, 2))


def test_idle_inputs_give_no_result_and_change_nothing(idle: Rounds) -> None:
    check_idle(idle)


def test_idle_inputs_of_the_wrong_width_are_caught(idle: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: an idle input has the model's hidden size, though live inputs have another width."""

    def allocate(layout: HiddenLayout, phase: Any, num_rows: int, device: Any = "cpu") -> torch.Tensor | None:
        return None if layout.spec(phase) is None else torch.zeros(num_rows, 16)

    monkeypatch.setattr(HiddenLayout, "allocate", allocate)
    if idle.executor.engine.speculation.hidden.spec("extend") is None:
        check_idle(idle)  # nothing to be wide
    else:
        with pytest.raises(ValueError, match=r"extend state of .*not .*16"):
            check_idle(idle)


# --- batches that empty and fill ---


class Gate:
    """Holds back the events of a handoff client until it is opened."""

    def __init__(self, pair: NodePair) -> None:
        self.held: list[Any] = []
        self.is_open = False
        self._poll = pair.decode.handoff.poll
        pair.decode.handoff.poll = self

    @property
    def num_arrived(self) -> int:
        return sum(isinstance(event, Arrived) for event in self.held)

    def __call__(self) -> list[Any]:
        self.held += self._poll()
        events = self.held if self.is_open else []
        self.held = [] if self.is_open else self.held
        return events


def check_filter_and_join(pair: NodePair) -> None:
    """Let three sequences finish in the round in which two others join. The two draft as if each were alone, and so
    does one that comes after the node was idle."""
    rounds = record_rounds(pair)
    joins = PROMPTS[1:]
    for i, prompt in enumerate(PROMPTS):
        pair.submit(f"alone{i}", prompt, params(8))
        pair.run()
    pair.prefill.cache.flush()
    pair.decode.cache.flush()
    gate, running = Gate(pair), pair.decode.scheduler.running
    for i in range(3):
        pair.submit(f"first{i}", PROMPTS[0], params(24))
    pair.step_until(lambda: gate.num_arrived == 3)
    gate.is_open = True
    pair.step_until(lambda: len(running) == 3)
    gate.is_open = False
    for i, prompt in enumerate(joins, 1):
        pair.submit(f"join{i}", prompt, params(8))
    plan = pair.decode.scheduler.plan
    pair.decode.scheduler.plan = StepPlan  # no round runs until their pages have arrived
    pair.step_until(lambda: gate.num_arrived == len(joins))
    pair.decode.scheduler.plan = plan
    pair.step_until(lambda: all(each.num_generated == 23 for each in running))
    assert len(running) == 3
    at, gate.is_open = len(rounds), True
    pair.run()
    pair.submit("after0", PROMPTS[0], params(8))
    pair.run()
    pair.check_books()
    assert set(rounds[at]) == {"first0", "first1", "first2", "join1", "join2"}
    assert set(rounds[at + 1]) == {"join1", "join2"}
    for rid, alone in (("join1", "alone1"), ("join2", "alone2"), ("after0", "alone0")):
        ours, theirs = ([each[name] for each in rounds if name in each] for name in (rid, alone))
        assert ours == theirs, rid
        assert pair.results[rid, 0].ids == pair.results[alone, 0].ids


def record_rounds(pair: NodePair) -> list[dict[str, list[int]]]:
    """Return a list that grows by the proposals of each round, by rid."""
    rounds: list[dict[str, list[int]]] = []
    drafter, of_node = pair.decode.executor.engine.drafter, pair.decode.rounds
    propose, submit = drafter.propose, of_node.submit

    def submitting(sequences: Any, *rest: Any) -> Any:
        rounds.append({sequence.unit.rid: [] for sequence in sequences})
        return submit(sequences, *rest)

    def recording(rows: Any, shape: Any) -> Any:
        drafts = propose(rows, shape)
        for rid, tokens in zip(rounds[-1], drafts.tokens.tolist(), strict=True):
            rounds[-1][rid] = tokens
        return drafts

    drafter.propose, of_node.submit = recording, submitting
    return rounds


@pytest.fixture(params=["eagle3", "frozen-kv-mtp"])
def joining_pair(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path
) -> NodePair:
    model = checkpoint("llama")
    return make_pair(model, **settings(request.param, model, tmp_path, hidden_size=24))


def test_a_batch_can_finish_in_the_round_in_which_others_join(joining_pair: NodePair) -> None:
    check_filter_and_join(joining_pair)


def test_states_of_the_batch_before_are_caught(joining_pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: after sequences have left, the states of the others are read at their old rows."""
    drafter = joining_pair.decode.executor.engine.drafter
    observe = type(drafter).observe

    def at_old_rows(self: Any, *rest: Any) -> DraftState:
        state = observe(self, *rest)
        return state.select(torch.arange(len(state)).roll(1))

    monkeypatch.setattr(type(drafter), "observe", at_old_rows)
    with pytest.raises(AssertionError, match="join"):
        check_filter_and_join(joining_pair)
