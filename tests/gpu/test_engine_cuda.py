"""The forward and the sampler on a CUDA device against transformers there and against our CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ties import Reference
from waits import no_waiting

from baton.engine.config import EngineConfig
from baton.engine.device import to_host
from baton.engine.engine import Engine
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import sample
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.metadata.wire.request import SamplingParams

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
# largest difference of a logit from transformers on the same device and dtype
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.35}


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def chunked_logits(engine: Engine, ids: list[int], chunk: int) -> torch.Tensor:
    """[len(ids), vocab_size]: the prompt in chunks, the last tokens one by one."""
    pages = engine.cache.allocate(-(-len(ids) // engine.pool.page_size), Owner.REQUEST)
    pages.reverse()  # not in the order of the pool
    rows: list[torch.Tensor] = []
    at = 0
    while at < len(ids):
        num_new = min(chunk, len(ids) - at) if at < len(ids) - 8 else 1
        rows.append(engine.forward([BatchRow(ids[at : at + num_new], at, pages, num_new)]))
        at += num_new
    engine.pool.release(pages)
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["demo", "llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3"])
def test_logits_equal_transformers(name: str, dtype: str, checkpoint: Callable[..., Path]) -> None:
    model = DEMO if name == "demo" else checkpoint(name)
    engine = Engine(EngineConfig(model=str(model), device="cuda", dtype=dtype, num_pages=400))
    reference = Reference(model, dtype=dtype, device="cuda")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.card.vocab_size, (min(200, engine.context_len),), generator=generator).tolist()
    ours = chunked_logits(engine, ids, 37)
    with torch.inference_mode():
        theirs = reference.model(torch.tensor([ids], device="cuda")).logits[0].float()
    worst = (ours - theirs).abs().max().item()
    print(f"{name} {dtype}: largest difference of a logit {worst:.2e}, largest logit {theirs.abs().max().item():.1f}")
    assert worst < TOLERANCE[dtype], (name, dtype, worst)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_are_submitted_without_waiting(dtype: str) -> None:
    """What the host does for the next chunk is hidden behind the one that runs."""
    engine = Engine(EngineConfig(model=str(DEMO), device="cuda", dtype=dtype, num_pages=400))
    lengths = [1024] * 4 + [100, 1]  # fused attention where there is one, and our kernels
    pages = [engine.cache.allocate(-(-length // engine.pool.page_size), Owner.REQUEST) for length in lengths]
    rows = [BatchRow([7] * length, 0, own) for length, own in zip(lengths, pages, strict=True)]
    rows.append(BatchRow([7] * 3, 1000, pages[0]))  # some of a prompt whose first tokens are there
    state = SamplingState(SamplingParams(max_tokens=1, temperature=0.0), [0], vocab_size=engine.model_config.vocab_size)
    expected = engine.forward(rows)
    with no_waiting():
        logits = engine.forward(rows)
        batch = SamplingBatch.of([state] * len(rows), "cuda")
        with torch.inference_mode():
            tokens = to_host(sample(logits, batch).token_ids)
    torch.cuda.synchronize()
    assert torch.equal(logits, expected)
    assert tokens.tolist() == logits.argmax(1).tolist()
