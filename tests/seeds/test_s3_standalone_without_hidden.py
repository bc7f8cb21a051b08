"""S3: a standalone draft has no hidden state: not in a round, in the metadata row, in memory or on the wire.

The schema of a standalone draft has the row of no speculation, and no slot holds a state. Filling every hidden state
with NaN changes nothing, in direct rounds and through the real handoff with prefix hits and preemption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import perturbed, settings
from layouts import WITH_DRAFT_POOL, make_layout
from node_pair import NodePair, node_pairs, params
from solo import Solo, caught

from baton.engine.drafters import standalone
from baton.engine.engine import Engine
from baton.engine.rounds import trees
from baton.engine.rounds.slots import Slots
from baton.engine.sampling.row_shares import Lens
from baton.kernels.sampling.sample import Choice
from baton.metadata.handoff.schema.buffers import MetadataBuffers
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout, HiddenSpec
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, row_bytes
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

PROMPT = random.Random(8).choices(range(512), k=10)
TARGET = PoolLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
PHASES = ("extend", "recurrent")
OF_STATE = {"topk_index", "topk_score", "recurrent_hidden", "target_rows"}

MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, decode: dict[str, Any] | None = None, **both: Any) -> NodePair:
            both = {"page_size": 4, "chunk_tokens": 6, **both}
            return start(model, prefill=both, decode={**both, **(decode or {})})

        yield make


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


# --- no bytes for a hidden state ---


def schema_of(algorithm: str) -> HandoffSchema:
    hidden = make_layout(algorithm)
    return make_schema(TARGET, TARGET if algorithm in WITH_DRAFT_POOL else None, 4, algorithm, hidden)


def check_no_bytes(standalone: HandoffSchema, none: HandoffSchema) -> None:
    """Check that the row has the fields of no speculation, and that pages grow only by the draft's KV."""
    assert not {field.name for field in standalone.row} & OF_STATE
    assert standalone.row == none.row and row_bytes(standalone) == row_bytes(none)
    assert MetadataBuffers(standalone).row_bytes == MetadataBuffers(none).row_bytes
    assert len(MetadataBuffers(standalone).pack()) == row_bytes(none)


def test_a_standalone_draft_sends_no_hidden_state(model: Path, tmp_path: Path) -> None:
    check_no_bytes(schema_of("standalone"), schema_of("none"))
    engine = Solo(model, **settings("standalone", model, tmp_path)).engine
    plain = Solo(model, speculative="ngram").engine
    check_no_bytes(engine.schema, plain.schema)
    assert page_bytes(engine.schema) == 2 * page_bytes(plain.schema)  # the draft has the target's sizes here
    assert [memory.pages.nbytes for memory in engine.memory] == [plain.memory[0].pages.nbytes] * 2


@pytest.mark.parametrize("phase", PHASES)
def test_a_layout_that_gives_it_a_state_is_caught(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: a standalone draft is treated as a drafter that carries the target's hidden state."""
    spec = HiddenLayout.spec
    wide = HiddenSpec(64, "float32")
    monkeypatch.setattr(HiddenLayout, "spec", lambda self, asked: wide if asked == phase else spec(self, asked))
    layout = make_layout("standalone")
    with caught():
        check_no_state(layout)
    if phase == "recurrent":
        wrong = schema_of("standalone")
        monkeypatch.undo()
        with caught():
            check_no_bytes(wrong, schema_of("none"))


def check_no_state(layout: HiddenLayout) -> None:
    for phase in PHASES:
        assert layout.spec(phase) is None  # type: ignore[arg-type]
        assert layout.allocate(phase, 0) is None and layout.allocate(phase, 3) is None  # type: ignore[arg-type]


def test_a_standalone_draft_has_no_state_in_layout_rounds_or_row(
    model: Path, tmp_path: Path, make_pair: MakePair
) -> None:
    drafter = settings("standalone", model, tmp_path, steps=3)
    solo = Solo(model, **drafter)
    check_no_state(solo.drafter.hidden)
    sequence = solo.start(PROMPT, params(30))
    for num_steps in (3, 0, 2):
        solo.round([sequence], num_steps)
        assert solo.draft(sequence).present() == []
    check_no_tensors(solo.rounds.executor.slots)
    pair = make_pair(model, **drafter)
    pair.submit("r", PROMPT, params(60))
    pair.step_until(lambda: pair.decode.scheduler.running)
    check_no_tensors(pair.decode.rounds.executor.slots)
    pair.run()


def check_no_tensors(slots: Slots) -> None:
    """No row of any slot holds a state, not even after rounds without drafts."""
    assert slots._draft.present() == []
    assert [(kept.shape[1], kept.dtype) for kept in slots._missed] == [(1, torch.int64)]  # tokens
    zero = torch.zeros(1, dtype=torch.int64)
    assert slots.missed(zero, zero, zero, 3)[1] is None


# --- none that matters ---


class Poisoned:
    """Fill hidden states with NaN as soon as their logits are computed, in the target and in the draft."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def logits(self, hidden: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        result = self._inner.logits(hidden, lens)
        hidden.fill_(float("nan"))
        return result

    def best(self, hidden: torch.Tensor) -> Choice:
        result = self._inner.best(hidden)
        hidden.fill_(float("nan"))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def rounds(solo: Solo) -> list[tuple[list[int], list[int]]]:
    """Return tokens and accepted counts of a few sequences in one batch, greedy and sampled."""
    asked = [params(40, temperature=0.5 * i, seed=i) for i in range(3)]
    sequences = solo.start_many([PROMPT[i:] + PROMPT[:i] for i in range(3)], asked, chunk=4)
    for num_steps in (3, 1, 4, 0, 2, 4):
        solo.round(sequences, num_steps)
    return [(sequence.generated, sequence.num_accepted) for sequence in sequences]


def check_poison(model: Path, **drafter: Any) -> None:
    clean = rounds(Solo(model, **drafter))
    solo = Solo(model, **drafter)
    solo.engine.model = Poisoned(solo.engine.model)  # type: ignore[assignment]
    if hasattr(solo.drafter, "_model"):
        solo.drafter._model = Poisoned(solo.drafter._model)  # type: ignore[attr-defined]
    spoilt = rounds(solo)
    assert [counts for _, counts in clean] == [counts for _, counts in spoilt]
    assert clean == spoilt


def test_spoilt_hidden_states_change_nothing(model: Path, tmp_path: Path) -> None:
    draft = perturbed(model, tmp_path / "draft", 0.05)
    settings = {"speculative": "standalone", "draft_model": str(draft)}
    check_poison(model, **settings)
    counts = [count for _, counts in rounds(Solo(model, **settings)) for count in counts]
    assert sum(counts) > 3 and 0 in counts, counts


@pytest.mark.whole
def test_a_target_with_streams_has_no_state_for_a_standalone_draft(checkpoint: Callable[..., Path]) -> None:
    """All residual streams of DeepSeek-V4 would be its handoff state."""
    model = checkpoint("deepseek_v4")
    settings = {"speculative": "standalone", "draft_model": str(checkpoint("llama"))}
    solo, plain = Solo(model, **settings), Solo(model, speculative="ngram")
    check_no_bytes(solo.engine.schema, plain.engine.schema)
    check_no_state(solo.drafter.hidden)
    check_no_tensors(solo.rounds.executor.slots)
    check_poison(model, **settings)


def test_a_draft_that_reads_them_is_caught(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the target's state is kept for the draft and mixed into its next input."""
    kept: list[torch.Tensor] = []
    states, sample_ahead = Engine.states, trees.sample_ahead

    def keeping(self: Engine, batch: Any) -> Any:
        result = states(self, batch)
        kept[:] = [result[1]]
        return result

    def mixing(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return sample_ahead(logits + 1e-6 * kept[0].mean(), *rest)

    monkeypatch.setattr(Engine, "states", keeping)
    monkeypatch.setattr(standalone, "sample_ahead", mixing)
    draft = perturbed(model, tmp_path / "draft", 0.05)
    with caught():
        check_poison(model, speculative="standalone", draft_model=str(draft))


# --- end to end, with its caches under pressure ---


def test_a_standalone_draft_works_through_the_handoff_with_small_caches(
    model: Path, tmp_path: Path, make_pair: MakePair
) -> None:
    """The pools are so small that prefixes are evicted and requests preempted; no token changes."""
    rng = random.Random(9)
    stems = [[rng.randrange(512) for _ in range(9)] for _ in range(3)]
    prompts = [stems[i % 3] + [rng.randrange(512) for _ in range(i)] for i in range(9)]
    draft = perturbed(model, tmp_path / "draft", 0.04)
    drafter = {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 4}
    small = {"num_pages": 26}
    plain, tight = make_pair(model), make_pair(model, decode=small, **drafter)
    for pair in (plain, tight):
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                pair.submit(f"{turn}-{i}", prompt, params(16, temperature=float(i % 2), seed=i))
            pair.run()
    assert {key: result.ids for key, result in tight.results.items()} == {
        key: result.ids for key, result in plain.results.items()
    }
    assert tight.decode.stats().preemptions > 0
    stats = tight.decode.rounds.stats
    assert 0.2 < stats.num_accepted / stats.num_drafted < 0.95, stats
