"""S2: with hc_mult residual streams, every hidden state is `spec_hidden_size` = hidden_size * hc_mult wide, everywhere.

Code that forgets the streams still hands over a full row of the first stream. Speculation still gives the right text;
only the drafts get worse. So the tests write a canary value into the last column of the last metadata row and read it
on the other side: with 1 to 4 streams of DeepSeek-V4, whose prediction layer reads all of them, and with models of one
stream, whose config.json lacks hc_mult or says null, 0 or 1. Nodes with different values must refuse each other.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import OF_FAMILIES, STREAM_MTP, settings, target_of
from handoff_nodes import check_refused, make_client, make_server
from node_pair import NodePair, node_pairs, params
from thinned import thinned

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.base import Drafter, DraftState, get_draft, set_draft
from baton.engine.drafters.shifted import ShiftedDrafter
from baton.engine.drafters.speculation import read_speculation
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.startup import load_engine
from baton.engine.work import BatchRow
from baton.metadata.handoff.schema import hidden_layout
from baton.metadata.handoff.schema.buffers import MetadataBuffers
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout, HiddenSpec
from baton.metadata.handoff.schema.schema import differences
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

NODE = {"page_size": 4, "chunk_tokens": 6}
SIZE = 64  # hidden_size of the target and of its head
NO_STREAMS = ("absent", None, 0, 1)  # hc_mult in config.json
KINDS = ("eagle", "mtp-deepseek", "mtp3-deepseek", "frozen-kv-mtp")  # heads for one stream
CASES = thinned([(STREAM_MTP, num) for num in (1, 2, 4)], lambda _, __, num: num != 2)
CASES += thinned(itertools.product(KINDS, NO_STREAMS), lambda i, *_: i % 5 == 0)  # each kind, each spelling
WIDTHS: dict[str, int] = {
    "eagle3-on-gpt-oss": 24,
    "eagle3-on-qwen3-moe": 24,
    STREAM_MTP: 3 * SIZE,
}  # other heads are as wide as their target
Checkpoint = Callable[..., Path]
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs(checks_books=False) as start:
        yield lambda model, drafting: start(model, prefill=NODE | drafting, decode=NODE | drafting)


def target_and_head(
    checkpoint: Checkpoint, kind: str, hc_mult: Any, directory: Path, **shape: Any
) -> tuple[Path, dict[str, Any]]:
    """Return a target whose config.json says `hc_mult`, and settings with a head for it."""
    if kind == STREAM_MTP:
        model = target_of(kind, checkpoint, hc_mult=hc_mult)
    else:
        model = Path(shutil.copytree(checkpoint("llama"), directory / f"{kind}-{hc_mult}"))
        fields = json.loads((model / "config.json").read_text())
        fields |= {} if hc_mult == "absent" else {"hc_mult": hc_mult}
        (model / "config.json").write_text(json.dumps(fields))
    return model, settings(kind, model, directory / f"head-{hc_mult}", steps=3) | shape


def width_of(kind: str, hc_mult: Any) -> int:
    """Return the width of a state of this head."""
    return SIZE * hc_mult if kind == STREAM_MTP else SIZE


# --- every state ---


@pytest.mark.parametrize(("kind", "hc_mult"), CASES)
def test_every_state_is_as_wide_as_all_streams(kind: str, hc_mult: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, drafting = target_and_head(checkpoint, kind, hc_mult, tmp_path)
    engine = load_engine(DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=8, **drafting))
    width, layout = width_of(kind, hc_mult), engine.speculation.hidden
    assert engine.model_config.hc_mult == width // SIZE
    assert engine.model.handoff_hidden_size == engine.model_config.handoff_hidden_size == width
    for phase in ("extend", "recurrent"):
        assert layout.spec(phase) == (width, "float32")
        for num_rows in (0, 2):
            idle = layout.allocate(phase, num_rows)
            assert idle is not None and idle.shape == (num_rows, width)
    row = MetadataBuffers(engine.schema)
    if layout.num_target_rows:
        assert row.get("target_rows").shape == (layout.num_target_rows * width,)
        assert "recurrent_hidden" not in row
    else:
        assert row.get("recurrent_hidden").shape == (width,)
    assert engine.drafter is not None
    assert {
        name: value.shape[2 if name == "rows" else 1]
        for name, value in engine.drafter.allocate(2).present()
        if value.is_floating_point()
    } == {"rows" if layout.num_target_rows else "hidden": width}
    batch = ForwardBatch.build([BatchRow([3, 4, 5], 0, [1])], engine.pool.page_size, "cpu")
    extend, final = engine.states(batch)
    assert extend is not None and extend.shape == (3, width) and final.shape == (3, SIZE)
    assert torch.equal(extend, final) == (kind != STREAM_MTP), "streams are handed over before they collapse"


# --- through the handoff ---


def check_canaries(
    monkeypatch: pytest.MonkeyPatch, pair: NodePair, width: int, write: Any = set_draft, read_back: Any = get_draft
) -> None:
    """Prefill writes a canary into the last column of each row, and decode reads all rows back unchanged. With several
    MTP layers that is the last column of the last target row."""
    sent: dict[float, torch.Tensor] = {}
    got: dict[float, torch.Tensor] = {}

    def mark(row: MetadataBuffers, draft: DraftState) -> None:
        name, state = state_of(draft)
        marked = state.clone()
        marked[0, -1] = 1000.0 + len(sent)
        sent[1000.0 + len(sent)] = marked
        write(row, replace(draft, **{name: marked.view(getattr(draft, name).shape)}))

    def read(row: MetadataBuffers, drafter: Drafter, token_ids: list[int]) -> DraftState:
        draft = read_back(row, drafter, token_ids)
        _, state = state_of(draft)
        got[float(state[0, -1])] = state
        return draft

    monkeypatch.setattr("baton.engine.prompts.prompts.set_draft", mark)
    monkeypatch.setattr("baton.engine.rounds.device_executor.get_draft", read)
    pair.submit("r", [7, 3, 11, 5, 9], params(6, temperature=1.0, seed=3), n=3)
    pair.submit("q", [4] * 9, params(6))
    results = pair.run()
    assert all(len(result.ids) == 6 for result in results.values())
    assert len(sent) == 4 and got.keys() == sent.keys(), "a canary is missing"
    for canary, state in sent.items():
        assert state.shape[1] % width == 0 and torch.equal(got[canary], state)


def state_of(draft: DraftState) -> tuple[str, torch.Tensor]:
    """Return the field that hands over hidden states, and its value [1, width], target rows side by side."""
    name = "hidden" if draft.rows is None else "rows"
    return name, getattr(draft, name).flatten(1)


@pytest.mark.parametrize(("kind", "hc_mult"), CASES)
def test_the_last_column_of_the_last_row_arrives(
    kind: str,
    hc_mult: Any,
    checkpoint: Checkpoint,
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(*target_and_head(checkpoint, kind, hc_mult, tmp_path))
    check_canaries(monkeypatch, pair, width_of(kind, hc_mult))
    pair.check_books()


@pytest.mark.parametrize(
    "name", thinned(OF_FAMILIES, lambda _, name: name in ("eagle-on-latents", "eagle3-on-gpt-oss"))
)
def test_the_last_column_arrives_from_targets_with_experts_or_latents(
    name: str, checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(name, checkpoint)
    pair = make_pair(model, settings(name, model, tmp_path, steps=3))
    assert pair.decode.executor.engine.speculation.hidden.spec("recurrent") == (WIDTHS.get(name, SIZE), "float32")
    check_canaries(monkeypatch, pair, WIDTHS.get(name, SIZE))
    pair.check_books()


def test_the_last_column_arrives_beside_the_scores_of_a_tree(
    checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(*target_and_head(checkpoint, "eagle", "absent", tmp_path, draft_topk=2))
    assert "topk_score" in {field.name for field in pair.decode.executor.engine.schema.row}
    check_canaries(monkeypatch, pair, SIZE)
    pair.check_books()


def one_stream(layout: HiddenLayout) -> HiddenSpec | None:
    return HiddenSpec(layout.draft_hidden_size, layout.draft_dtype) if layout.draft_hidden_size else None


def test_a_row_without_the_streams_is_caught(
    checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: rows are sized by hidden_size. The decode node's warm-up fails, at the first state of full width."""
    monkeypatch.setattr(HiddenLayout, "_recurrent", one_stream)
    with pytest.raises(ValueError, match=r"recurrent state of mtp is \[num_rows, 64\] float32, not \(\d, 256\)"):
        make_pair(*target_and_head(checkpoint, STREAM_MTP, 4, tmp_path))


def test_a_row_that_is_cut_in_silence_is_caught_by_the_canary(
    checkpoint: Checkpoint, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect as seen in the field: copies take only the columns that fit. The text is right nevertheless."""

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
    pair = make_pair(*target_and_head(checkpoint, STREAM_MTP, 4, tmp_path))
    with pytest.raises(AssertionError, match="a canary is missing"):
        check_canaries(monkeypatch, pair, SIZE * 4, cut, fill)


@pytest.mark.parametrize("where", ["extend", "everywhere"])
def test_a_layout_without_the_streams_does_not_start(
    where: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafting = target_and_head(checkpoint, STREAM_MTP, 4, tmp_path)
    if where == "extend":
        monkeypatch.setattr(HiddenLayout, "_extend", one_stream)
    else:
        monkeypatch.setattr(hidden_layout, "spec_hidden_size", lambda hidden_size, hc_mult: hidden_size)
    with pytest.raises(ValueError, match=r"extend state of \w+ is \[num_rows, 64\] float32, not \(1, 256\)"):
        load_engine(DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=8, **drafting))


# --- two nodes with different values ---


def schema_of(checkpoint: Checkpoint, kind: str, hc_mult: Any, directory: Path) -> HandoffSchema:
    """Return the schema that a node with this target and its head says hello with."""
    model, drafting = target_and_head(checkpoint, kind, hc_mult, directory)
    target = read_model_config(model)
    pool = PoolLayout(num_layers=target.num_layers, num_kv_heads=2, head_dim=16, dtype="float32")
    return read_speculation(DecodeConfig(**drafting), model, target, "float32").schema(pool, 4, checksums=True)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (4, 2, "row.recurrent_hidden: 256 x float32 here, 128 x float32 there"),
        (1, 4, "row.recurrent_hidden: 64 x float32 here, 256 x float32 there"),
    ],
)
def test_nodes_of_different_hc_mult_refuse_each_other(
    here: int, there: int, words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ours, theirs = (schema_of(checkpoint, STREAM_MTP, hc_mult, tmp_path) for hc_mult in (here, there))
    check_refused(make_server(ours), make_client(theirs), words)


@pytest.mark.parametrize("kind", KINDS)
def test_absent_none_zero_and_one_are_the_same_value(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    schemas = [schema_of(checkpoint, kind, hc_mult, tmp_path) for hc_mult in NO_STREAMS]
    assert all(differences(schemas[0], other) == [] for other in schemas)


def test_a_schema_without_the_streams_is_caught(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the schema has hidden_size, so two nodes are paired that cannot hand over to each other."""
    monkeypatch.setattr(hidden_layout, "spec_hidden_size", lambda hidden_size, hc_mult: hidden_size)
    here, there = (schema_of(checkpoint, STREAM_MTP, hc_mult, tmp_path) for hc_mult in (4, 2))
    with pytest.raises(AssertionError, match="nothing more within 1"):
        check_refused(make_server(here), make_client(there), "row.recurrent_hidden")
