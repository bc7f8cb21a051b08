"""The state between rounds, and what every drafter makes of zero rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import ALIKE, ALL, settings, target_of
from thinned import thinned

from baton.decode_node.config import DecodeConfig
from baton.engine.drafters.base import DraftState
from baton.engine.engine import Engine
from baton.engine.sampling.batch import SamplingBatch

KINDS = thinned(("ngram", *ALL), lambda _, kind: kind not in ALIKE)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path: Path) -> Engine:
    model = target_of(request.param, checkpoint)
    drafting = settings(request.param, model, tmp_path, steps=3)
    return Engine(DecodeConfig(model=str(model), device="cpu", threads=1, num_pages=8, **drafting))


def test_zero_tails_give_a_state_of_zero_rows_and_store_nothing(engine: Engine) -> None:
    drafter = engine.drafter
    assert drafter is not None
    before = [kv.clone() for kv in engine.kvs]
    hidden = drafter.hidden.allocate("extend", 0)
    state = drafter.finish_prompt([], torch.zeros(0, dtype=torch.int64), hidden, SamplingBatch.of([]))
    live = dict(drafter.allocate(2).present())
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.present()} == {
        name: ((0, *value.shape[1:]), value.dtype) for name, value in live.items()
    }
    assert all(torch.equal(one, other) for one, other in zip(before, engine.kvs, strict=True))
    drafter.allocate(2).store(torch.zeros(0, dtype=torch.int64), state)  # fits the rows of slots


def test_zero_tails_of_another_width_or_dtype_are_refused(engine: Engine) -> None:
    drafter = engine.drafter
    assert drafter is not None
    spec = drafter.hidden.spec("extend")
    if spec is None:
        return  # no width to be wrong
    ids, sampling = torch.zeros(0, dtype=torch.int64), SamplingBatch.of([])
    for width, dtype in (
        (spec.width + 1, torch.float32),
        (spec.width - 1, torch.float32),
        (0, torch.float32),
        (spec.width, torch.bfloat16),
        (spec.width, torch.float64),
    ):
        with pytest.raises(ValueError, match=rf"extend state of .* not \(0, {width}\) {dtype}"):
            drafter.finish_prompt([], ids, torch.zeros(0, width, dtype=dtype), sampling)


def make_state(num_rows: int, start: float = 0.0) -> DraftState:
    hidden = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3) + start
    return DraftState(torch.arange(num_rows).view(-1, 1), hidden=hidden)


def test_rows_are_selected_and_stored_by_index() -> None:
    state = make_state(4)
    chosen = state.select(torch.tensor([2, 0]))
    assert chosen.hidden is not None and chosen.hidden.tolist() == [[6, 7, 8], [0, 1, 2]]
    state.store(torch.tensor([1, 3]), make_state(2, 100.0))
    assert state.hidden is not None
    assert state.hidden[:, 0].tolist() == [0, 100, 6, 103] and len(state) == 4
    assert state.row(3).hidden is not None and state.row(3).present()[1][1].tolist() == [[103, 104, 105]]


def test_a_state_of_other_fields_or_widths_is_not_stored() -> None:
    with pytest.raises(ValueError, match=r"draft state of \['hidden'\] does not fit one of \['hidden', 'tokens'\]"):
        make_state(2).store(torch.tensor([0]), DraftState(hidden=torch.zeros(1, 3)))
    wide = DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="does not fit"):
        make_state(2).store(torch.tensor([0]), wide)


@pytest.mark.parametrize(
    "row",
    [
        DraftState(torch.zeros(1, 1, dtype=torch.int32), hidden=torch.zeros(1, 3)),
        DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 3, dtype=torch.bfloat16)),
        DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 3, dtype=torch.float64)),
        DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 2)),
        DraftState(torch.zeros(1, 2, dtype=torch.int64), hidden=torch.zeros(1, 3)),
        DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 3), scores=torch.zeros(1, 1)),
    ],
    ids=["ids", "shorter numbers", "longer numbers", "narrower", "more tokens", "more fields"],
)
def test_a_state_of_another_dtype_or_smaller_or_larger_is_not_stored(row: DraftState) -> None:
    state = make_state(2)
    before = [value.clone() for _, value in state.present()]
    with pytest.raises(ValueError, match="does not fit"):
        state.store(torch.tensor([1]), row)
    assert all(torch.equal(one, value) for one, (_, value) in zip(before, state.present(), strict=True))


def test_a_state_without_fields_has_no_rows() -> None:
    assert len(DraftState()) == 0 and DraftState().present() == []
    assert DraftState().to_host().present() == []
