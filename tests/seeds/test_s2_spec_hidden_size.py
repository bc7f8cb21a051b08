"""S2: with hc_mult residual streams, every hidden state is `spec_hidden_size` = hidden_size * hc_mult wide, everywhere.

Code that forgets the streams still hands over a full row of the first stream. Speculation still gives the right text;
only the drafts get worse. So a canary value is written into the last column of the last metadata row and read back on
the other side, for hc_mult absent, None, 0, 1, 2 and 4, and nodes with unlike values must refuse each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_nodes import make_client, make_server, named, peer_of, spin, unit
from heads import HYPER, write_head
from node_pair import NodePair, node_pairs, params

from baton.decode_node.config import DecodeConfig
from baton.engine.batch import ForwardBatch
from baton.engine.draft_row import get_draft, set_draft
from baton.engine.drafters.base import Drafter, DraftState
from baton.engine.drafters.shifted import ShiftedDrafter
from baton.engine.drafters.speculation import read_speculation
from baton.engine.model_config import ModelConfig
from baton.engine.startup import load_engine
from baton.engine.work import BatchRow
from baton.metadata.handoff import hidden_layout
from baton.metadata.handoff.buffers import MetadataBuffers
from baton.metadata.handoff.client import TransferFailed
from baton.metadata.handoff.hidden_layout import HiddenLayout, HiddenSpec
from baton.metadata.handoff.schema import differences
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

NODE = {"page_size": 4, "chunk_tokens": 6}
SIZE = 64  # hidden_size of the target and of its head
MULTS = [("absent", 1), (None, 1), (0, 1), (1, 1), (2, 2), (4, 4)]  # in config.json; streams
Checkpoint = Callable[..., Path]
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs(checks_books=False) as start:
        yield lambda model, drafting: start(model, prefill=NODE | drafting, decode=NODE | drafting)


def target_and_head(checkpoint: Checkpoint, hc_mult: Any, directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return a target, and settings with a head for it: the ordinary EAGLE head if there is one stream."""
    model = checkpoint("llama") if hc_mult == "absent" else checkpoint("hyper_llama", hc_mult=hc_mult)
    kind = HYPER if hc_mult in (2, 4) else "eagle"
    head = write_head(directory / f"head-{hc_mult}", kind, model)
    return model, {"speculative": "eagle", "draft_model": str(head), "draft_steps": 3}


# --- every state ---


@pytest.mark.parametrize(("hc_mult", "num_streams"), MULTS)
def test_every_state_is_as_wide_as_all_streams(
    hc_mult: Any, num_streams: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model, drafting = target_and_head(checkpoint, hc_mult, tmp_path)
    engine = load_engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))
    width, layout = SIZE * num_streams, engine.speculation.hidden
    assert engine.model_config.hc_mult == num_streams
    assert engine.model.handoff_hidden_size == engine.model_config.handoff_hidden_size == width
    for phase in ("extend", "recurrent"):
        assert layout.spec(phase) == (width, "float32")
        for num_rows in (0, 2):
            idle = layout.allocate(phase, num_rows)
            assert idle is not None and idle.shape == (num_rows, width)
    row = MetadataBuffers(engine.schema, num_rows=2)
    assert row.get("recurrent_hidden", 1).shape == (width,)
    batch = ForwardBatch.build([BatchRow([3, 4, 5], 0, [1])], engine.pool.page_size, "cpu")
    extend, final = engine.states(batch)
    assert extend is not None and extend.shape == (3, width) and final.shape == (3, SIZE)


# --- through the handoff ---


def check_canaries(
    monkeypatch: pytest.MonkeyPatch, pair: NodePair, width: int, write: Any = set_draft, read_back: Any = get_draft
) -> None:
    """Prefill writes a canary into the last column of each row, and decode reads all rows back unchanged."""
    sent: dict[float, torch.Tensor] = {}
    got: dict[float, torch.Tensor] = {}

    def mark(row: MetadataBuffers, draft: DraftState) -> None:
        assert draft.hidden is not None
        marked = replace(draft, hidden=draft.hidden.clone())
        marked.hidden[0, -1] = 1000.0 + len(sent)
        sent[1000.0 + len(sent)] = marked.hidden[0]
        write(row, marked)

    def read(row: MetadataBuffers, drafter: Drafter, token_ids: list[int]) -> DraftState:
        draft = read_back(row, drafter, token_ids)
        assert draft.hidden is not None
        got[float(draft.hidden[0, -1])] = draft.hidden[0]
        return draft

    monkeypatch.setattr("baton.engine.prompts.set_draft", mark)
    monkeypatch.setattr("baton.decode_node.node.get_draft", read)
    pair.submit("r", [7, 3, 11, 5, 9], params(6, temperature=1.0, seed=3), n=3)
    pair.submit("q", [4] * 9, params(6))
    results = pair.run()
    assert all(len(result.ids) == 6 for result in results.values())
    assert len(sent) == 4 and got.keys() == sent.keys(), "a canary is missing"
    for canary, state in sent.items():
        assert state.shape == (width,) and torch.equal(got[canary], state)


@pytest.mark.parametrize(("hc_mult", "num_streams"), MULTS)
def test_the_last_column_of_the_last_row_arrives(
    hc_mult: Any,
    num_streams: int,
    checkpoint: Checkpoint,
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(*target_and_head(checkpoint, hc_mult, tmp_path))
    check_canaries(monkeypatch, pair, SIZE * num_streams)
    pair.check_books()


def one_stream(layout: HiddenLayout) -> HiddenSpec | None:
    return HiddenSpec(layout.draft_hidden_size, layout.draft_dtype) if layout.algorithm == "eagle" else None


def test_a_row_without_the_streams_is_caught(
    checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: rows are sized by hidden_size. The decode node's warm-up fails, at the first state of full width."""
    monkeypatch.setattr(HiddenLayout, "_recurrent", one_stream)
    with pytest.raises(ValueError, match=r"recurrent state of eagle is \[num_rows, 64\] float32, not \(\d, 256\)"):
        make_pair(*target_and_head(checkpoint, 4, tmp_path))


def test_a_row_that_is_cut_in_silence_is_caught_by_the_canary(
    checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect as seen in the field: copies also take only what fits. The text is right nevertheless."""

    def cut(row: MetadataBuffers, draft: DraftState) -> None:
        assert draft.hidden is not None
        set_draft(row, replace(draft, hidden=draft.hidden[:, :SIZE]))

    def fill(row: MetadataBuffers, drafter: Drafter, token_ids: list[int]) -> DraftState:
        draft = whole(drafter, 1)
        assert draft.hidden is not None and draft.tokens is not None
        draft.hidden[0, :SIZE] = row.get("recurrent_hidden")
        draft.tokens[0] = row.get("topk_index")
        return draft

    def whole(self: Any, num_rows: int) -> DraftState:
        return replace(allocate(self, num_rows), hidden=torch.zeros(num_rows, 4 * SIZE))

    allocate = ShiftedDrafter.allocate
    monkeypatch.setattr(ShiftedDrafter, "allocate", whole)  # rounds themselves are right
    monkeypatch.setattr(HiddenLayout, "_recurrent", one_stream)
    monkeypatch.setattr(HiddenLayout, "check", lambda *_: None)
    pair = make_pair(*target_and_head(checkpoint, 4, tmp_path))
    with pytest.raises(AssertionError, match="a canary is missing"):
        check_canaries(monkeypatch, pair, SIZE * 4, cut, fill)


@pytest.mark.parametrize("where", ["extend", "everywhere"])
def test_a_layout_without_the_streams_does_not_start(
    where: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafting = target_and_head(checkpoint, 4, tmp_path)
    if where == "extend":
        monkeypatch.setattr(HiddenLayout, "_extend", one_stream)
    else:
        monkeypatch.setattr(hidden_layout, "spec_hidden_size", lambda hidden_size, hc_mult: hidden_size)
    with pytest.raises(ValueError, match=r"extend state of eagle is \[num_rows, 64\] float32, not \(1, 256\)"):
        load_engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))


# --- two nodes with different values ---


def schema_of(checkpoint: Checkpoint, hc_mult: Any, directory: Path) -> HandoffSchema:
    """Return the schema that a node with this target and its head says hello with."""
    model, drafting = target_and_head(checkpoint, hc_mult, directory)
    target = ModelConfig.from_dir(model)
    pool = PoolLayout(num_layers=target.num_layers, num_kv_heads=2, head_dim=16, dtype="float32")
    return read_speculation(DecodeConfig(**drafting), model, target, "float32").schema(pool, 4, checksums=True)


def check_refused(here: HandoffSchema, there: HandoffSchema, words: str) -> None:
    """A decode node that claims from a prefill node of another width is refused with both values."""
    server, source = make_server(here)
    client, target = make_client(there)
    try:
        server.open(unit(), 1)
        client.claim(unit(), peer_of(server), 0, [3])
        events = spin([server, client], lambda events: named(events, TransferFailed), timeout_s=1.0)
        failed = named(events, TransferFailed)[0]
        assert failed.is_refused and words in failed.reason, failed
    finally:
        for each in (*source, *target, server, client):
            each.close()


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (4, 2, "row.recurrent_hidden: 256 x float32 here, 128 x float32 there"),
        ("absent", 4, "row.recurrent_hidden: 64 x float32 here, 256 x float32 there"),
        (2, 0, "row.recurrent_hidden: 128 x float32 here, 64 x float32 there"),
    ],
)
def test_nodes_of_different_hc_mult_refuse_each_other(
    here: Any, there: Any, words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    check_refused(schema_of(checkpoint, here, tmp_path), schema_of(checkpoint, there, tmp_path), words)


def test_absent_none_zero_and_one_are_the_same_value(checkpoint: Checkpoint, tmp_path: Path) -> None:
    schemas = [schema_of(checkpoint, hc_mult, tmp_path) for hc_mult in ("absent", None, 0, 1)]
    assert all(differences(schemas[0], other) == [] for other in schemas)


def test_a_schema_without_the_streams_is_caught(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the schema has hidden_size, so two nodes are paired that cannot hand over."""
    monkeypatch.setattr(hidden_layout, "spec_hidden_size", lambda hidden_size, hc_mult: hidden_size)
    schemas = [schema_of(checkpoint, hc_mult, tmp_path) for hc_mult in (4, 2)]
    with pytest.raises(AssertionError, match="nothing more within 1"):
        check_refused(*schemas, "row.recurrent_hidden")
