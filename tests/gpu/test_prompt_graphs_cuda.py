"""Chunks replayed as graphs against the same chunks launched kernel by kernel, on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from waits import no_waiting

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts.sizes import BUCKETS, MAX_SEQS
from baton.engine.rounds.batch import Computed, ForwardBatch, upload
from baton.engine.work import BatchRow
from baton.kernels.operations import preferring

PAGE_SIZE = 16
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.35}  # as of logits against transformers (test_engine_cuda.py)
# New tokens of the sequences of each chunk, one chunk after another: a sequence goes on where it was
CHUNKS = (
    (1,),
    (16,),
    (5, 9),
    (17,),
    (300, 400),
    (270,) * MAX_SEQS,  # too large: launched kernel by kernel
    (40, 1, 20),
    (64,),
    (2,) * MAX_SEQS,
    (1,) * (MAX_SEQS + 1),  # too many
    (100, 50, 7),
    (256,),
    (257, 200),
    (64,) * MAX_SEQS,
    (3,),
)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Only with our kernels can a chunk be captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with preferring("triton"):
        yield


def make_engine(model: Path, dtype: Any = "float32", **drafting: Any) -> Engine:
    return Engine(
        EngineConfig(model=str(model), device="cuda", dtype=dtype, num_pages=900, page_size=PAGE_SIZE, **drafting)
    )


def make_chunks(vocab_size: int) -> list[list[BatchRow]]:
    generator = torch.Generator().manual_seed(0)
    num_pages = 1500 // PAGE_SIZE
    lengths = [0] * (MAX_SEQS + 1)
    chunks: list[list[BatchRow]] = []
    for chunk in CHUNKS:
        rows: list[BatchRow] = []
        for seq, num_new in enumerate(chunk):
            ids = torch.randint(0, vocab_size, (num_new,), generator=generator).tolist()
            pages = list(range(1 + seq * num_pages, 1 + (seq + 1) * num_pages))[::-1]
            rows.append(BatchRow(ids, lengths[seq], pages, int((seq + num_new) % 3 > 0), tail=pages))
            lengths[seq] += num_new
        chunks.append(rows)
    return chunks


def compute(engine: Engine, chunks: Sequence[list[BatchRow]], *, captured: bool) -> tuple[list[Computed], torch.Tensor]:
    """Results of all chunks, none read before the last is submitted, and the pool's KV. Page 0 is NaN."""
    for pool in engine.kvs:
        pool.zero_()
        pool[:, 0] = float("nan")
    results: list[Computed] = []
    for rows in chunks:
        batch = None if captured else ForwardBatch.build(rows, PAGE_SIZE, "cuda")
        results.append(engine.compute(rows) if batch is None else engine.compute_batch(batch))
    return results, engine.kv.clone()


def check(engine: Engine, tolerance: float) -> None:
    chunks = make_chunks(engine.model_config.vocab_size)
    counts: list[tuple[int, int]] = []
    engine.capture_prompts(lambda *each: counts.append(each))
    graphs = engine._prompt_graphs
    assert graphs is not None and counts == [(number, len(BUCKETS)) for number in range(1, len(BUCKETS) + 1)]
    assert [graphs.compute(rows) is None for rows in chunks].count(True) == 2
    expected, expected_kv = compute(engine, chunks, captured=False)
    compute(engine, chunks, captured=True)  # pinned memory is there from now on
    torch.cuda.synchronize()
    with no_waiting():
        results, kv = compute(engine, chunks, captured=True)
    worst = 0.0
    for chunk, result, wanted in zip(CHUNKS, results, expected, strict=True):
        assert result.logits.shape == wanted.logits.shape, chunk
        assert (result.extend is None) == (wanted.extend is None), chunk
        pairs = [(result.logits, wanted.logits), *_given(result.extend, wanted.extend)]
        for got, other in pairs:
            assert got.shape == other.shape and got.isfinite().all(), chunk
            if got.numel():
                worst = max(worst, ((got - other).float() / (1 + other.float().abs())).abs().max().item())
    kv_worst = (kv[:, 1:].float() - expected_kv[:, 1:].float()).abs().max().item()
    print(f"largest difference of a result {worst:.2e}, of KV {kv_worst:.2e}")
    assert kv[:, 0].isnan().all(), "padding was stored"
    assert worst < tolerance and kv_worst < tolerance, (worst, kv_worst)
    is_filled, should_be = ((each[:, 1:] != 0).any(-1) for each in (kv, expected_kv))
    assert torch.equal(is_filled, should_be), "not the same slots are filled"


def _given(*pair: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    first, second = pair
    return [] if first is None or second is None else [(first, second)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 50}),
        ("deepseek_v3", {}),
        ("gpt_oss", {"sliding_window": 50}),
    ],
)
def test_graphs_bring_what_direct_calls_bring(
    family: str, config: dict[str, Any], dtype: str, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint(family, **config, max_position_embeddings=2048)
    check(make_engine(model, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_states_for_a_drafter(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = target_of(name, checkpoint, max_position_embeddings=2048)
    engine = make_engine(model, **settings(name, model, tmp_path))
    assert engine.speculation.hidden.spec("extend") is not None
    check(engine, TOLERANCE["float32"])


def test_uploaded_arrays_begin_where_kernels_were_compiled_for() -> None:
    """A kernel is compiled once more for a pointer that is no multiple of 16, a block table's say."""
    numbers = [[1], [[2, 3, 4]], [], [5, 6]]
    parts = upload(numbers, "cuda")
    assert [each.tolist() for each in parts] == numbers
    assert [each.data_ptr() % 16 for each in parts] == [0] * len(parts)


def test_a_replay_leaves_earlier_results_alone(checkpoint: Callable[..., Path]) -> None:
    engine = make_engine(checkpoint("llama"))
    engine.capture_prompts()
    for size in BUCKETS[:2]:
        first = engine.compute([BatchRow([1] * size, 0, range(1, 40))]).logits
        kept = first.clone()
        engine.compute([BatchRow([2] * size, 0, range(40, 80))])
        assert torch.equal(first, kept)
        again = engine.compute([BatchRow([1] * size, 0, range(1, 40))]).logits
        torch.testing.assert_close(first, again, atol=1e-4, rtol=0)
