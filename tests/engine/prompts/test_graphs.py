"""The forward that a bucket's graph captures gives, for any chunk, the results of `compute` over the chunk alone.

Without a GPU our kernels run in Triton's interpreter. tests/gpu/test_prompt_graphs_cuda.py tests the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from triton_device import DEVICE

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts.graphs import PromptInputs, own
from baton.engine.prompts.sizes import MAX_SEQS
from baton.engine.rounds.batch import Computed
from baton.engine.work import BatchRow
from baton.kernels.operations import preferring

PAGE_SIZE = 4
NUM_COLUMNS = 12
TOLERANCE = 2e-4  # of logits that spread over several units
# (tokens in the pages, new tokens, logits wanted) of each sequence, and tokens of the bucket
CHUNKS: dict[str, tuple[tuple[tuple[int, int, int], ...], int]] = {
    "one prompt, most of it padding": (((0, 5, 1),), 24),
    "a token after others": (((9, 1, 1),), 16),
    "a middle chunk": (((8, 7, 0),), 16),
    "full": (((0, 9, 1), (3, 7, 1)), 16),
    "full of one": (((6, 16, 1),), 16),
    "all sequences": (tuple((i, 1 + i % 3, i % 2) for i in range(MAX_SEQS)), 24),
    "all sequences, full": (tuple((2 * i, 2, 1) for i in range(MAX_SEQS)), 16),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
}


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make_engine(model: Path, **drafting: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), device=DEVICE, dtype="float32", num_pages=64, page_size=PAGE_SIZE, threads=1, **drafting
        )
    )


def make_rows(sequences: Sequence[tuple[int, int, int]]) -> list[BatchRow]:
    """Return rows whose pages begin at 3. Each sequence has one page more than it needs, in falling order."""
    rows: list[BatchRow] = []
    first = 3
    for index, (position, num_new, num_logits) in enumerate(sequences):
        num_pages = -(-(position + num_new) // PAGE_SIZE) + 1
        pages = list(range(first, first + num_pages))[::-1]
        ids = [(31 * index + 7 * at) % 500 + 1 for at in range(num_new)]
        rows.append(BatchRow(ids, position, pages, num_logits))
        first += num_pages
    return rows


def check(engine: Engine, chunk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the results and the KV of all pages. Page 0 and slots that no sequence fills are NaN before and after."""
    sequences, num_tokens = CHUNKS[chunk]
    rows = make_rows(sequences)
    generator = torch.Generator().manual_seed(0)
    before = torch.full(engine.kv.shape, float("nan"))
    is_own = torch.zeros(engine.kv.shape[1], PAGE_SIZE, dtype=torch.bool)
    for row in rows:
        for at in range(row.position + len(row.input_ids)):
            page, slot = row.pages[at // PAGE_SIZE], at % PAGE_SIZE
            is_own[page, slot] = at >= row.position
            if at < row.position:
                values = before[:, page, :, :, slot]
                values.copy_(torch.randn(values.shape, generator=generator))
    before = before.to(DEVICE)

    engine.kv.copy_(before)
    expected = engine.compute(rows)
    expected_kv = engine.kv.clone()
    engine.kv.copy_(before)
    inputs = PromptInputs.of(rows, PAGE_SIZE, num_tokens, NUM_COLUMNS)
    static = PromptInputs.allocate(num_tokens, NUM_COLUMNS, DEVICE)
    static.block.copy_(inputs.block)
    with preferring("triton"):
        computed = own(engine.compute_batch(static.batch(PAGE_SIZE)), rows)

    torch.testing.assert_close(computed.logits, expected.logits, atol=TOLERANCE, rtol=0)
    assert (computed.extend is None) == (expected.extend is None)
    if computed.extend is not None and expected.extend is not None:
        torch.testing.assert_close(computed.extend, expected.extend, atol=TOLERANCE, rtol=1e-4)
    others = ~is_own.to(DEVICE)
    assert torch.equal(_slots(engine.kv)[:, others].nan_to_num(7e7), _slots(before)[:, others].nan_to_num(7e7))
    mine = ~others
    torch.testing.assert_close(_slots(engine.kv)[:, mine], _slots(expected_kv)[:, mine], atol=TOLERANCE, rtol=0)
    assert not _slots(engine.kv)[:, mine].isnan().any()


def _slots(kv: torch.Tensor) -> torch.Tensor:
    """Return the KV as [num_layers, num_pages, page_size, 2, num_kv_heads, head_dim]."""
    return kv.permute(0, 1, 4, 2, 3, 5)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_padding_changes_nothing(chunk: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    check(make_engine(checkpoint("llama", num_hidden_layers=1)), chunk, monkeypatch)


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    family, config = MODELS[model]
    check(make_engine(checkpoint(family, **config, num_hidden_layers=1)), "all sequences", monkeypatch)


def test_states_for_a_drafter(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("eagle3", checkpoint)
    engine = make_engine(model, **settings("eagle3", model, tmp_path))
    assert engine.speculation.hidden.spec("extend") is not None
    check(engine, "full", monkeypatch)
    check(engine, "one prompt, most of it padding", monkeypatch)


def test_inputs_begin_where_kernels_were_compiled_for() -> None:
    inputs = PromptInputs.allocate(16, 3, "cpu")
    assert [(each.data_ptr() - inputs.block.data_ptr()) % 16 for each in inputs] == [0] * len(inputs)


def test_results_are_copies() -> None:
    """The next replay overwrites the results of this one."""
    static = Computed(torch.ones(16, 3), torch.ones(MAX_SEQS, 5))
    computed = own(static, [BatchRow([1, 2], 0, [1]), BatchRow([1, 2, 3], 0, [1], 0)])
    static.logits.zero_()
    assert static.extend is not None and computed.extend is not None
    static.extend.zero_()
    assert torch.equal(computed.logits, torch.ones(1, 5)) and torch.equal(computed.extend, torch.ones(5, 3))
