"""Fused attention of prompts is the specification, and the same as reading the pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import thinned
from triton_device import DEVICE, ULP

from baton.engine.config import EngineConfig, KvDtype
from baton.engine.engine import Engine
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.kernels.attention import prompt_attention
from baton.kernels.attention.prompt_attention import prompt_attention_ref, shapes, takes, whole_part
from baton.kernels.operations import preferring

DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("num_tokens", [2, 37, 128])
def test_is_the_specification(num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """From views of one tensor, as a forward has them."""
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, 64, generator=generator).to(DEVICE, dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    out, expected = prompt_attention.prompt_attention(q, k, v), prompt_attention_ref(q, k, v)
    assert out.is_contiguous() and out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=8 * ULP[dtype], rtol=8 * ULP[dtype])


def test_prompts_of_one_length_do_not_see_each_other() -> None:
    qkv = torch.randn(96, 4 + 2 + 2, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPES[0])
    q, k, v = qkv.split([4, 2, 2], dim=1)
    out = prompt_attention.prompt_attention(q, k, v, 3)
    for tokens in (slice(0, 32), slice(32, 64), slice(64, 96)):
        expected = prompt_attention_ref(q[tokens], k[tokens], v[tokens])
        torch.testing.assert_close(out[tokens], expected, atol=8 * ULP[DTYPES[0]], rtol=8 * ULP[DTYPES[0]])


def test_shapes_are_few_and_known_before() -> None:
    known = shapes(8192)
    assert len(known) == 15 and all(takes(*shape) and 4096 <= shape[0] * shape[1] <= 8192 for shape in known)
    parts = {whole_part(num_tokens) for num_tokens in range(1, 8193)}
    assert parts == {0} | {length for num_seqs, length in known if num_seqs == 1}
    assert all(whole_part(num_tokens) <= num_tokens for num_tokens in range(1, 5000))


CUTS = {  # lengths of prompts: (tokens, prompts) of each call where UNIT is 4 and LEAST 8
    (8,): [(8, 1)],
    (3, 9, 4): [(8, 1)],
    (11, 2): [(8, 1)],
    (4, 4, 9, 8, 8): [(8, 2), (8, 1), (16, 2)],
    (1, 4, 4, 4): [(12, 3)],
}


@pytest.mark.parametrize(
    ("lengths", "kv_dtype"),
    thinned(
        itertools.product(CUTS, ("auto", "fp8")),
        lambda _, *cell: DEVICE == "cuda" or cell in (((4, 4, 9, 8, 8), "auto"), ((3, 9, 4), "fp8")),
    ),
)
def test_a_forward_is_the_same_with_it_and_without(
    lengths: tuple[int, ...], kv_dtype: KvDtype, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts cut into what it takes and a rest, beside chunks that begin later. Pages in FP8 hold what it sees."""
    settings = {"dtype": "float32", "kv_dtype": kv_dtype, "page_size": 4, "num_pages": 40}
    config = EngineConfig(
        model=str(checkpoint("qwen3", num_hidden_layers=1, hidden_size=32, intermediate_size=32)),
        device=DEVICE,
        **settings,
    )
    outputs: list[torch.Tensor] = []
    for serves in (False, True):
        monkeypatch.setattr(prompt_attention, "serves", lambda *_, is_served=serves: is_served)
        monkeypatch.setattr(prompt_attention, "UNIT", 4)
        monkeypatch.setattr(prompt_attention, "LEAST", 8)
        calls: list[tuple[int, int]] = []

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: int, told: Any = calls) -> torch.Tensor:
            told.append((len(q), n))
            return torch.cat(
                [prompt_attention_ref(*each) for each in zip(q.chunk(n), k.chunk(n), v.chunk(n), strict=True)]
            )

        monkeypatch.setattr(prompt_attention, "prompt_attention", attention)
        engine = Engine(config)
        calls.clear()  # on a GPU the engine has tried every shape
        pages = [engine.pool.allocate(5, Owner.REQUEST) for _ in lengths]
        ids = [[(7 * seq + 3 * i) % 500 for i in range(length + 6)] for seq, length in enumerate(lengths)]
        firsts = [
            BatchRow(all_ids[:length], 0, own, length) for all_ids, length, own in zip(ids, lengths, pages, strict=True)
        ]
        nexts = [BatchRow(all_ids[n:], n, own, 6) for all_ids, n, own in zip(ids, lengths, pages, strict=True)]
        with preferring("triton"):
            outputs.append(torch.cat([engine.forward(firsts), engine.forward([*nexts[1:], nexts[0]])]))
        assert calls == (CUTS[lengths] * engine.model_config.num_layers if serves else []), calls
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
