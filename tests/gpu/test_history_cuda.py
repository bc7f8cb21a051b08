"""Chunks behind long histories by cuDNN: the same numbers as from pages, known memory, nothing planned in service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from waits import no_waiting

pytest.importorskip("triton")

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.kernels.attention import history
from baton.kernels.attention.history import gather_keys, history_attention
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_extend import extend_attention

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = (8, 2)  # query and kv heads


@pytest.fixture(autouse=True)
def _needs_cudnn() -> None:
    if not history.serves(DEVICE, torch.bfloat16, 128):
        pytest.skip("cuDNN does not serve on this GPU")


def make(seq_len: int, page_size: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pages that are NaN but for the slots of one sequence, and a table whose second row is the sequence's."""
    num_pages = -(-seq_len // page_size)
    kv_layer = torch.randn(num_pages + 1, 2, HEADS[1], page_size, head_dim, device=DEVICE).to(dtype)
    pages = torch.randperm(num_pages, device=DEVICE) + 1
    kv_layer[0] = float("nan")
    kv_layer[pages[-1], :, :, (seq_len - 1) % page_size + 1 :] = float("nan")
    table = torch.zeros(2, num_pages + 3, dtype=torch.int64, device=DEVICE)
    table[1, :num_pages] = pages
    return kv_layer, table


def specified(
    q: torch.Tensor, kv_layer: torch.Tensor, table: torch.Tensor, num_before: int, tokens: list[int]
) -> torch.Tensor:
    """Return the attention of some tokens of the chunk in float32: [len(tokens), num_heads, head_dim]."""
    outs: list[torch.Tensor] = []
    for token in tokens:
        num_seen = num_before + token + 1
        k, v = gather_keys(kv_layer, table, 1, 0, num_seen, num_seen, kv_layer.dtype).float()
        grouped = q[token].float().unflatten(0, (HEADS[1], -1))  # [num_kv_heads, group, head_dim]
        weights = (torch.einsum("kgd,kjd->kgj", grouped, k) * q.shape[2] ** -0.5).softmax(-1)
        outs.append(torch.einsum("kgj,kjd->kgd", weights, v).flatten(0, 1))
    return torch.stack(outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_before", "page_size", "head_dim"),
    [
        (8192, 8192, 64, 128),
        (8192, 57_344, 64, 128),
        (5312, 114_688, 64, 128),
        (4096, 1, 16, 128),
        (4097, 4095, 48, 64),
        (7001, 33_333, 10, 64),
        (4096, 70_003, 3, 128),
    ],
)
def test_it_is_the_specification(
    num_tokens: int, num_before: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kv_layer, table = make(num_before + num_tokens, page_size, head_dim, dtype)
    qkv = torch.randn(num_tokens, sum(HEADS) + HEADS[1], head_dim, device=DEVICE).to(dtype)
    q = qkv[:, : HEADS[0]]
    out = history_attention(q, kv_layer, table, 1, num_before)
    lens = torch.tensor([num_before + num_tokens], device=DEVICE)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=DEVICE)
    ours = extend_attention(q, kv_layer, PagedPlan(table[1:], lens, None, None, starts, None, None, None))
    torch.testing.assert_close(out, ours, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    tokens = [0, 1, 63, num_tokens // 2, num_tokens - 2, num_tokens - 1]
    expected = specified(q, kv_layer, table, num_before, tokens)
    torch.testing.assert_close(out[tokens].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    error = [(found[tokens].float() - expected).abs().mean().item() for found in (out, ours)]
    assert error[0] < 2 * error[1] + 1e-6, f"mean error {error[0]:.2e}, of our kernel {error[1]:.2e}"


def test_no_history_needs_more_memory_than_the_rehearsed_one() -> None:
    """Pages may repeat, so that a small pool holds a long history."""
    num_tokens, page_size = 8192, 64
    kv_layer = torch.zeros(200, 2, HEADS[1], page_size, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.arange(200_000 // page_size + 200, device=DEVICE).remainder(200).unsqueeze(0)
    q = torch.zeros(num_tokens, HEADS[0], 128, device=DEVICE, dtype=torch.bfloat16)
    peaks: list[int] = []
    for num_before in (history.longest_rehearsal(), 4095, 8192, 36_863, 102_399, 200_000):
        for _ in range(2):  # the first call plans
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            history_attention(q, kv_layer, table, 0, num_before)
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    assert max(peaks) == peaks[0], peaks


def test_chunks_of_a_long_prompt_are_submitted_without_waiting(checkpoint: Callable[..., Path]) -> None:
    """After the warm-up. The logits are those without fused attention over histories."""
    model = checkpoint("qwen3", "bfloat16", head_dim=64, num_hidden_layers=2, max_position_embeddings=40_000)
    engine = Engine(EngineConfig(model=str(model), device="cuda", dtype="bfloat16", num_pages=1200, page_size=32))
    engine.warm_up(8192)
    lens = [8192, 8192, 5000, 100]
    pages = engine.cache.allocate(-(-sum(lens) // engine.pool.page_size), Owner.REQUEST)
    ids = torch.randint(0, engine.card.vocab_size, (sum(lens),), generator=torch.Generator().manual_seed(0)).tolist()
    found: list[torch.Tensor] = []
    for is_fused in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_fused:
                patch.setattr(history, "takes", lambda *_: False)
            first = 0
            logits: list[torch.Tensor] = []
            for num_new in lens:
                with no_waiting():
                    logits.append(engine.forward([BatchRow(ids[first : first + num_new], first, pages, 4)]))
                first += num_new
        found.append(torch.cat(logits).float())
    worst = (found[0] - found[1]).abs().max().item()
    print(f"largest difference of a logit {worst:.2e}, largest logit {found[1].abs().max().item():.1f}")
    assert worst < 0.1
