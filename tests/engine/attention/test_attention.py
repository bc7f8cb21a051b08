"""The three ways of attention give the same values and store the same KV: Triton, numba and gathered pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_device
from quantized import fp8_numbers, fp8_pool
from thinned import halved

pytest.importorskip("triton")

from baton.engine.attention.attention import RotaryEmbedding, begin_attention
from baton.engine.attention.context import HeadNorms, LayerHeads
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.attention import prompt_attention
from baton.kernels.operations import preferring

pytestmark = pytest.mark.skipif(not triton_device.IS_INTERPRETED, reason="compares with the ways of a CPU")

PAGE_SIZE, NUM_PAGES = 16, 8
Checkpoint = Callable[..., Path]
SINKS = torch.tensor([4.0, -3.0, 0.5, 1.0])
ROWS = {
    "decode": [BatchRow([1], 20, [3, 5]), BatchRow([1], 6, [2])],
    "chunks": [BatchRow([1] * 3, 14, [3, 5]), BatchRow([1], 6, [2])],
    "prompts": [BatchRow([1] * 5, 0, [3]), BatchRow([1] * 9, 0, [2])],
}


def attend(
    config: ModelConfig,
    rows: list[BatchRow],
    norms: HeadNorms | None,
    num_first: int | None = None,
    sinks: torch.Tensor | None = None,
    *,
    in_fp8: bool = False,
    value_dim: int | None = None,
    is_filled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended values of layer 1, and the pool afterwards, float32. `num_first`: rows of the first of two mixed
    batches. `value_dim`: numbers of a value, in a pool of its own unless it `is_filled` up with zeros."""
    generator = torch.Generator().manual_seed(0)
    shape = (config.num_layers, NUM_PAGES, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    kv = torch.randn(shape, generator=generator)
    if in_fp8:
        kv = fp8_pool(kv)
    num_tokens = sum(len(row.input_ids) for row in rows)
    qkv = torch.randn(num_tokens, config.q_size + 2 * config.kv_size, generator=generator)
    rotary = RotaryEmbedding(config.rope, config.head_dim, torch.device("cpu"))
    batch: ForwardBatch | MixedBatch = ForwardBatch.build(rows, PAGE_SIZE, "cpu")
    if num_first is not None:
        parts = (ForwardBatch.build(part, PAGE_SIZE, "cpu") for part in (rows[:num_first], rows[num_first:]))
        batch = MixedBatch.of(*parts)
    pools = ModelPools(kv)
    if value_dim is not None:
        kv[:, :, 1, ..., value_dim:] = 0.0
        qkv.unflatten(1, (-1, config.head_dim))[:, config.num_heads + config.num_kv_heads :, value_dim:] = 0.0
    if value_dim is not None and not is_filled:
        config = replace(config, value_dim=value_dim)
        kv, values = kv[:, :, :1].contiguous(), kv[:, :, 1:, ..., :value_dim].contiguous()
        pools = ModelPools(kv, values=values)
    context = begin_attention(config, rotary, batch, pools, qkv.dtype)
    out = context(qkv, LayerHeads(1, norms, config.sliding_window[1], sinks))
    return out, fp8_numbers(kv) if in_fp8 else kv


@pytest.mark.each_value
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_values_narrower_than_keys_are_as_if_filled_up_with_zeros(
    kind: str, rows: str, window: int | None, checkpoint: Checkpoint
) -> None:
    config = read_model_config(checkpoint("mistral", sliding_window=window))
    sinks = None if window is None else SINKS
    with preferring(kind):
        expected, pool = attend(config, ROWS[rows], None, sinks=sinks, value_dim=10, is_filled=True)
        out, own = attend(config, ROWS[rows], None, sinks=sinks, value_dim=10)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(own, pool[:, :, :1])
    assert not out.unflatten(1, (-1, config.head_dim))[..., 10:].any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("has_norms", "has_sinks"), [(True, False), (False, False), (False, True)])
def test_all_ways_agree(
    rows: str, window: int | None, has_norms: bool, has_sinks: bool, checkpoint: Checkpoint
) -> None:
    config = read_model_config(checkpoint("mistral", sliding_window=window))
    norms = HeadNorms(torch.rand(config.head_dim), torch.rand(config.head_dim)) if has_norms else None
    ways = {}
    for way, kind in (("triton", "triton"), ("numba", "numba"), ("gathered", "reference")):
        with preferring(kind):
            ways[way] = attend(config, ROWS[rows], norms, sinks=SINKS if has_sinks else None)
    used = sorted({page for row in ROWS[rows] for page in row.pages})
    for way in ("triton", "numba"):
        torch.testing.assert_close(ways[way][0], ways["gathered"][0], atol=1e-4, rtol=1e-4)
        for row in ROWS[rows]:
            for position in range(row.position + len(row.input_ids)):
                at = (1, row.pages[position // PAGE_SIZE], slice(None), slice(None), position % PAGE_SIZE)
                torch.testing.assert_close(ways[way][1][at], ways["gathered"][1][at], atol=1e-4, rtol=1e-4)
        unused = [page for page in range(1, NUM_PAGES) if page not in used]
        assert torch.equal(ways[way][1][:, unused], ways["gathered"][1][:, unused])


@pytest.mark.each_value
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 4])
def test_pages_in_fp8_are_attended_alike(rows: str, window: int | None, checkpoint: Checkpoint) -> None:
    """By Triton and by gathered pages, whichever kernels a CPU has. Prompts read back what is stored."""
    config = read_model_config(checkpoint("mistral", sliding_window=window))
    norms = HeadNorms(torch.rand(config.head_dim), torch.rand(config.head_dim))
    with preferring("triton"):
        found, kv = attend(config, ROWS[rows], norms, in_fp8=True)
    with preferring("numba"):
        expected, expected_kv = attend(config, ROWS[rows], norms, in_fp8=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    unlike, _ = attend(config, ROWS[rows], norms)
    assert not torch.allclose(found, unlike, atol=1e-2)
    for row in ROWS[rows]:
        for position in range(row.position + len(row.input_ids)):
            at = (1, row.pages[position // PAGE_SIZE], slice(None), slice(None), position % PAGE_SIZE)
            torch.testing.assert_close(kv[at], expected_kv[at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "window", "in_fp8"), halved(["triton", "numba", "reference"], [None, 4], [False, True])
)
def test_two_batches_of_one_forward_attend_as_alone(
    kind: Any, window: int | None, in_fp8: bool, checkpoint: Checkpoint
) -> None:
    """The first is a round, the second a chunk of prompts of several lengths."""
    config = read_model_config(checkpoint("mistral", sliding_window=window))
    norms = HeadNorms(torch.rand(config.head_dim), torch.rand(config.head_dim))
    rows = [*ROWS["decode"], BatchRow([1] * 5, 0, [4]), BatchRow([1], 9, [1]), BatchRow([1] * 20, 3, [6, 7])]
    with preferring(kind):
        expected, expected_kv = attend(config, rows, norms, sinks=SINKS, in_fp8=in_fp8)
        for num_first in (1, 2, 4):
            found, kv = attend(config, rows, norms, num_first, SINKS, in_fp8=in_fp8)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(kv[1], expected_kv[1], atol=1e-5, rtol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["numba", "reference"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_what_is_not_a_number_is_returned(rows: str, kind: Any, in_fp8: bool, checkpoint: Checkpoint) -> None:
    """The node ends the request that it belongs to."""
    config = read_model_config(checkpoint("mistral", sliding_window=4))
    with preferring(kind):
        found, _ = attend(config, ROWS[rows][:1], None, sinks=torch.full((4,), float("nan")), in_fp8=in_fp8)
    assert found.shape == (len(ROWS[rows][0].input_ids), config.q_size) and found.isnan().all()


def test_prompts_with_sinks_are_left_to_the_kernels(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's fused attention of whole prompts has no sinks."""

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int) -> torch.Tensor:
        calls.append(num_seqs)
        return torch.zeros_like(q)

    calls: list[int] = []
    monkeypatch.setattr(prompt_attention, "serves", lambda *_: True)
    monkeypatch.setattr(prompt_attention, "takes", lambda *_: True)
    monkeypatch.setattr(prompt_attention, "prompt_attention", fused)
    config = read_model_config(checkpoint("mistral", sliding_window=None))
    with preferring("reference"):
        expected, _ = attend(config, ROWS["prompts"], None, sinks=SINKS)
    with preferring("triton"):
        found, _ = attend(config, ROWS["prompts"], None, sinks=SINKS)
        assert not calls
        attend(config, ROWS["prompts"], None)
        assert calls == [1, 1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
