"""The paged forward against transformers: every family and flag, however the tokens are split into forwards."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import every, halved

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel, DecoderStack
from baton.engine.models.registry import load_model
from baton.engine.products.half import HalfProduct
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.handoff.schema.kv_layout import KvLayout

PAGE_SIZE = 4
NUM_PAGES = 120
FLOAT32_TOLERANCE = 2e-4  # logits spread over several units
Checkpoint = Callable[..., Path]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK = {"num_attention_heads": 5, "hidden_size": 80, "rms_norm_eps": 1e-2}
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3-yarn-all-fields": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("mistral", {}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-query-latent-yarn": ("deepseek_v2", {"q_lora_rank": 48, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": 48}),
    "deepseek-v3-yarn": ("deepseek_v3", DEEPSEEK | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "kv_lora_rank": 48}),
}


@pytest.fixture(params=VARIANTS, scope="module")
def model_dir(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    family, config = VARIANTS[request.param]
    return checkpoint(family, **config)


class Run:
    """Our model on a pool full of NaN, with scattered pages per sequence."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        config = read_model_config(model_dir)
        self.model: DecoderModel = load_model(model_dir, config, dtype, "cpu")
        pool = config.pool("float32")
        shape = KvLayout.of(pool, PAGE_SIZE).stacked_shape(NUM_PAGES)
        self.kv = torch.full(shape, float("nan"), dtype=dtype)
        self._free = random.Random(seed).sample(range(1, NUM_PAGES), NUM_PAGES - 1)

    def pages(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // PAGE_SIZE))]

    def forward(self, rows: Sequence[BatchRow]) -> tuple[torch.Tensor, ...]:
        """Per row, logits of its last `num_logits` tokens, float32."""
        batch = ForwardBatch.build(rows, PAGE_SIZE, "cpu")
        logits = self.model.logits(self.model.forward(batch, ModelPools(self.kv))[batch.logit_rows])
        return logits.split([row.num_logits for row in rows])


def reference_logits(model_dir: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[len(ids), vocab_size] of transformers, eager attention."""
    with torch.inference_mode():
        return reference_of(model_dir, dtype)(torch.tensor([list(ids)])).logits[0].float()


@functools.lru_cache(maxsize=2)
def reference_of(model_dir: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(512), k=num_tokens)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "chunks",
    [(60,), (1, 5, 13, 20, 1, 1, 1, 17, 1), pytest.param((3,) * 20, marks=pytest.mark.whole)],
    ids=["whole", "odd", "threes"],
)
def test_chunks_and_decode_steps_equal_transformers(model_dir: Path, chunks: tuple[int, ...]) -> None:
    ids = prompt(sum(chunks))
    run = Run(model_dir)
    pages = run.pages(len(ids))
    logits: list[torch.Tensor] = []
    position = 0
    for size in chunks:
        logits += run.forward([BatchRow(ids[position : position + size], position, pages, num_logits=size)])
        position += size
    torch.testing.assert_close(torch.cat(logits), reference_logits(model_dir, ids), atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_dir", every(VARIANTS, 2), indirect=True)
def test_mixed_batches_equal_transformers(model_dir: Path) -> None:
    """Decode steps, equal and unequal chunks and a fresh prompt in the same forwards, in changing order."""
    lengths = (50, 23, 44, 9, 31)
    schedule = ((20, 3, 17, 1, 5), (1, 1, 20, 1, 5), (1, 17, 1, 1, 1), (25, 1, 5, 5, 5), (3, 1, 1, 1, 15))
    run = Run(model_dir)
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    pages = [run.pages(length) for length in lengths]
    done = [0] * len(lengths)
    logits: list[list[torch.Tensor]] = [[] for _ in lengths]
    order = list(range(len(lengths)))
    for sizes in schedule:
        order = order[2:] + order[:2]
        rows = [BatchRow(prompts[i][done[i] : done[i] + sizes[i]], done[i], pages[i], sizes[i]) for i in order]
        for i, row_logits in zip(order, run.forward(rows), strict=True):
            logits[i].append(row_logits)
            done[i] += sizes[i]
    assert tuple(done) == lengths
    for ids, ours in zip(prompts, logits, strict=True):
        torch.testing.assert_close(torch.cat(ours), reference_logits(model_dir, ids), atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_same_tokens_beside_others_and_alone(checkpoint: Checkpoint, family: str) -> None:
    """Poison in a neighbour's KV, in unused pages and in the padding page reaches nobody."""
    ids = prompt(18)
    alone = Run(checkpoint(family))
    pages = alone.pages(24)
    (expected,) = alone.forward([BatchRow(ids, 0, pages)])
    beside = Run(checkpoint(family))
    pages, neighbour = beside.pages(24), beside.pages(41)
    beside.forward([BatchRow(ids[:-1], 0, pages, 0), BatchRow(prompt(40, 1), 0, neighbour, 0)])
    beside.kv[:, neighbour] = float("nan")
    ours, _ = beside.forward([BatchRow(ids[-1:], 17, pages), BatchRow([5], 40, neighbour)])
    torch.testing.assert_close(ours, expected, atol=FLOAT32_TOLERANCE, rtol=0)


def test_only_the_rows_own_slots_are_written(checkpoint: Checkpoint) -> None:
    run = Run(checkpoint("llama"))
    pages, spare = run.pages(13), run.pages(8)
    run.kv.nan_to_num_(nan=7.0)
    run.forward([BatchRow(prompt(10), 0, [*pages, *spare])])
    before = run.kv.clone()
    run.forward([BatchRow([3, 4], 10, [*pages, *spare])])
    changed = (before != run.kv).any(dim=(0, 2, 3, 5)).nonzero().tolist()  # [page, slot]
    assert sorted(changed) == sorted([[pages[2], 2], [pages[2], 3]])
    untouched = [page for page in range(NUM_PAGES) if page not in pages[:3]]
    assert (run.kv[:, untouched] == 7.0).all()


@pytest.mark.parametrize(
    ("family", "dtype"),
    halved(["llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3"], ["bfloat16", "float16"]),
)
def test_16_bit_models(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    """Computed in 16 bits, logits are as close to those of the float32 model as those of transformers are (within a
    factor of 2, over all logits of a prompt); computed in float32 they equal float32 as ever."""
    model_dir = checkpoint(family, dtype)
    ids = prompt(40)
    exact = reference_logits(model_dir, ids)
    theirs = (reference_logits(model_dir, ids, getattr(torch, dtype)) - exact).square().mean().sqrt()
    run = Run(model_dir, getattr(torch, dtype))
    pages = run.pages(40)
    parts = [run.forward([BatchRow(ids[a:b], a, pages, b - a)])[0] for a, b in ((0, 17), (17, 18), (18, 40))]
    assert parts[0].dtype == getattr(torch, dtype)
    assert (torch.cat(parts).float() - exact).square().mean().sqrt() < 2 * theirs < 0.2 * exact.std()
    wide = Run(model_dir)
    assert isinstance(wide.model.stack, DecoderStack)
    assert any(isinstance(layer.body.mlp.down.product, HalfProduct) for layer in wide.model.stack.layers)
    (logits,) = wide.forward([BatchRow(ids, 0, wide.pages(40), 40)])
    torch.testing.assert_close(logits, exact, atol=FLOAT32_TOLERANCE, rtol=0)


def test_handoff_hidden_size(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama")
    run = Run(model_dir)
    hidden = run.model.forward(
        ForwardBatch.build([BatchRow([1, 2], 0, run.pages(2))], PAGE_SIZE, "cpu"), ModelPools(run.kv)
    )
    assert hidden.shape == (2, run.model.handoff_hidden_size)
