"""Families in odd shapes, end to end: the numbers of transformers in one forward, and its text through the handoff.

Each row of SHAPES runs every test. The gate compares the numbers of each, and the text of one shape per kind of pools,
for few prompts. `whole` has all texts, all lengths and all of oracles/matrix.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from index_picks import forward
from matrix import PAGE_SIZE, Cell, Plain, run_cell
from node_pair import node_pairs, params
from own_mtp import with_mtp, with_qwen_mtp
from safetensors.torch import load_file
from solo import Solo
from thinned import is_whole, thinned
from ties import Reference

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import tensor_specs

NUM_PAGES = 90
LONGEST = 300  # tokens of a prompt
NUM_TOKENS = 12 if is_whole() else 8  # of an output


LENGTHS = thinned([[1, 8, 61], *([*range(i, i + 50)] for i in range(1, LONGEST, 50))], lambda i, _: i == 0)


class Shape(NamedTuple):
    """A small random model of a family."""

    family: str
    config: dict[str, Any]
    drafter: str = "ngram"  # "mtp": a prediction layer in its own checkpoint
    page_size: int = PAGE_SIZE
    disagrees: bool = False  # the reference with itself, because it computes by two rules


SHAPES = {
    "glm4-lite": Shape(
        "glm4_moe_lite",
        {"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 96, "routed_scaling_factor": 1.8},
        "mtp",
    ),
    "glm4-lite-one-dense-between": Shape(
        "glm4_moe_lite",
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
    "mistral4": Shape(
        "mistral4", {"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 96, "first_k_dense_replace": 1}
    ),
    "mistral4-groups": Shape(
        "mistral4",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "q_lora_rank": None,
        },
    ),
    "deepseek-v32": Shape("deepseek_v32", {"num_attention_heads": 6, "hidden_size": 96}, "mtp"),
    "deepseek-v32-most-picked": Shape(
        "deepseek_v32",
        {
            "index_topk": 130,
            "index_head_dim": 16,
            "qk_rope_head_dim": 16,
            "index_n_heads": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm-dsa": Shape("glm_moe_dsa", {"num_attention_heads": 6, "hidden_size": 96}, "mtp"),
    "glm-dsa-all-full": Shape(
        "glm_moe_dsa",
        {
            "indexer_types": None,
            "index_topk": 40,
            "index_n_heads": 1,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "ministral3": Shape(
        "ministral3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "num_hidden_layers": 3}
    ),
    "gemma3": Shape("gemma3_text", {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 20}),
    "gemma3-one-key-head": Shape(
        "gemma3_text",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 7,
            "layer_types": None,  # every sixth has no window
            "sliding_window": 21,
        },
    ),
    "gemma4-inputs-and-shared-keys": Shape(
        "gemma4_text",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 96,
            "num_hidden_layers": 7,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]
            + ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-values-are-keys": Shape(
        "gemma4_text",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "global_head_dim": 40,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4-experts": Shape(
        "gemma4_text",
        {
            "num_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
            "num_kv_shared_layers": 1,
        },
    ),
    "mimo": Shape(
        "mimo_v2_flash",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 36, "v_head_dim": 10},
        "mtp",
    ),
    "deepseek-v4": Shape(
        "deepseek_v4",
        {"num_attention_heads": 6, "hidden_size": 96, "o_groups": 6, "index_n_heads": 32},
        "mtp",
    ),
    "deepseek-v4-four-streams": Shape(
        "deepseek_v4",
        {
            "hc_mult": 4,
            "num_hidden_layers": 3,
            "layer_types": [f"{kind}_attention" for kind in ("heavily_compressed",) * 2 + ("compressed_sparse",)],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 2},
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
            "index_n_heads": 32,
        },
        "mtp",
    ),
    "deepseek-v4-published-rates": Shape(
        "deepseek_v4",
        {"compress_rates": None, "sliding_window": 128, "index_n_heads": 32, "hc_mult": 2},
        "mtp",
        page_size=128,
    ),
    "qwen3-next": Shape("qwen3_next", {"num_attention_heads": 6, "hidden_size": 96}, "mtp", disagrees=True),
    "qwen3.5": Shape(
        "qwen3_5_text",
        {"num_key_value_heads": 1, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
        "mtp",
        disagrees=True,
    ),
    "qwen3.5-moe": Shape(
        "qwen3_5_moe_text", {"layer_types": None, "num_hidden_layers": 5, "head_dim": 24}, disagrees=True
    ),
    "kimi-linear": Shape(
        "kimi_linear",
        {"num_attention_heads": 6, "hidden_size": 96, "linear_num_heads": 6, "linear_head_dim": 16},
        disagrees=True,
    ),
    "kimi-linear-query-latents": Shape(
        "kimi_linear",
        {"q_lora_rank": 28, "linear_conv_kernel_dim": 3, "linear_num_heads": 2, "mlp_layer_types": ["sparse"] * 4},
        disagrees=True,
    ),
    "ministral3-tied-window": Shape(
        "ministral3",
        {
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.7,
                "original_max_position_embeddings": 11,
            },
        },
    ),
}

# pools of latents with picks that layers share, of shared keys by window, of narrow values, of entries, of states
TEXTS_IN_GATE = ("glm-dsa", "gemma4-values-are-keys", "mimo", "deepseek-v4", "qwen3-next")


@pytest.fixture(params=thinned(SHAPES, lambda _, name: name != "kimi-linear"))  # the one with query latents stays
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture
def model(shape: Shape, checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of the shape, with its drafter if that is a layer of it."""
    source = checkpoint(shape.family, **shape.config)
    if shape.drafter == "ngram":
        return source
    path = source.with_name(f"{source.name}-mtp")
    return path if path.exists() else (with_qwen_mtp if "qwen" in shape.family else with_mtp)(source, path)


def reference_of(model: Path, shape: Shape) -> Reference:
    """Return the model in transformers."""
    return Reference(model, two_rules=prompt(150) if shape.disagrees else ())


def settings(shape: Shape, **more: Any) -> dict[str, Any]:
    """Return those of a node that drafts."""
    return {"page_size": shape.page_size, "speculative": shape.drafter, "draft_steps": 3, **more}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 512), k=num_tokens)


def test_logits_equal_transformers(model: Path, shape: Shape) -> None:
    ids = prompt(max(90, shape.page_size + 20))
    reference = reference_of(model, shape)
    for chunks in ((len(ids),), (1, 5, 13, 20, 1, 1, 1, 17, len(ids) - 59)):
        logits, picks = forward(model, ids, chunks, shape.page_size)
        if picks or chunks == (len(ids),):
            expected = reference.all_logits(ids, picks)
        assert expected.std() > 0.5  # else everything is close
        error = float((logits - expected).abs().max())
        assert reference.is_close(error), error


def test_the_tensors_are_what_transformers_writes(model: Path) -> None:
    written = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    own = (f"model.layers.{read_model_config(model).num_layers}.", "model.mtp.", "mtp.")  # the drafter's
    written = {name: size for name, size in written.items() if not name.startswith(own)}
    assert {spec.name: spec.shape for spec in tensor_specs(read_model_config(model), written)} == written


@pytest.mark.parametrize("shape", thinned(SHAPES, lambda _, name: name in TEXTS_IN_GATE), indirect=True)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda each: f"{each[0]}-{each[-1]}")
def test_the_handoff_serves_the_text_of_transformers(model: Path, shape: Shape, lengths: list[int]) -> None:
    """Prompts of each length: one of its own, in chunks, and one that finds its beginning in the prefix cache. Two
    ranks decode."""
    reference = reference_of(model, shape)
    both = settings(shape, num_pages=600, chunk_tokens=23)
    longer = prompt(LONGEST)
    own = {f"own {length}": prompt(length, length) for length in lengths}
    prompts = own | {f"shared {length}": longer[:length] for length in lengths}
    with node_pairs() as start:
        pair = start(model, prefill=both, decode={**both, "tp": 2})
        for rid, ids in prompts.items():
            pair.submit(rid, ids, params(NUM_TOKENS))
            if rid.startswith("shared"):  # the ones before have left their pages
                pair.run(timeout_s=170)
        results = pair.results
        assert pair.decode.stats().num_drafted > 0
    num_hits = sum(bool(result.ended and result.ended.num_cached) for result in results.values())
    assert num_hits >= sum(length > 2 * shape.page_size for length in lengths) - 1
    for rid, ids in prompts.items():
        assert len(results[rid, 0].ids) == NUM_TOKENS
        reference.assert_text(ids, results[rid, 0].ids)
    print(f"{shape.family}: {reference.counts}")
    assert reference.num_ties <= 1, reference.counts


V4 = [name for name in SHAPES if name.startswith("deepseek-v4")]
PARTS = [slice(i, None, 5) for i in range(5)]


@pytest.mark.whole  # tests/decode_node/test_kept_rows.py has hits at edges, and chunks
@pytest.mark.parametrize(("shape", "part"), [*itertools.product(SHAPES, PARTS)], indirect=["shape"])
def test_a_prompt_may_end_at_each_offset_behind_a_hit_at_each_page_edge(model: Path, shape: Shape, part: slice) -> None:
    """Each of these prompts leaves a cached text one token behind a page's edge. That token is part of the page's key,
    because the keys of a prediction layer depend on it."""
    reference, size, base = reference_of(model, shape), shape.page_size, prompt(LONGEST)
    ends = [(edge, offset) for edge in range(size, LONGEST, size) for offset in range(1, size + 1)]
    both = settings(shape, num_pages=600, chunk_tokens=23)
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for edge, group in itertools.groupby(ends[part], lambda each: each[0]):
            pair.submit(f"{edge}", base[: edge + 1], params(2))
            pair.run(timeout_s=170)
            prompts = {num: base[: edge + 1] + prompt(num - 1, 1000 * edge + num) for _, num in group}
            for offset, ids in prompts.items():
                pair.submit(f"{edge} {offset}", ids, params(6))
            pair.run(timeout_s=170)
            for offset, ids in prompts.items():
                result = pair.results[f"{edge} {offset}", 0]
                assert result.ended is not None and result.ended.num_cached == edge, (edge, offset, result)
                reference.assert_text(ids, result.ids)
    print(f"{shape.family}: {reference.counts}")
    assert reference.num_ties <= 1, reference.counts


@pytest.mark.whole
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [(name, range(i, i + 52)) for name in V4 for i in range(1, 260, 52)],
    indirect=["shape"],
)
def test_chunks_of_each_size_give_the_text_of_transformers(model: Path, shape: Shape, chunks: range) -> None:
    """One process computes a prompt of 261 tokens in chunks of so many, and drafts behind it."""
    reference, ids = reference_of(model, shape), prompt(261)
    solo = Solo(model, num_pages=300, num_slots=60, **settings(shape))
    for chunk in chunks:
        sequence = solo.start(ids, params(8), chunk=chunk)
        reference.assert_text(ids, solo.run(sequence, 8, 3))
        assert sequence.tail is not None
        solo.engine.pool.release(sequence.pages + sequence.tail.own)
    print(f"{shape.family}: {reference.counts}")
    assert reference.num_ties <= 1, reference.counts


@pytest.mark.whole
def test_no_way_to_compute_it_changes_the_text(model: Path, shape: Shape) -> None:
    """Grammars, choices, penalties, hits, preemptions and local prompts, between unlike numbers of ranks."""
    if shape.page_size != PAGE_SIZE:
        pytest.skip("few requests would fill a page")
    num_pages = 500 if shape.family == "kimi_linear" else 190  # its states are large: a pool has few tail pages
    both = settings(shape, num_pages=num_pages, max_running=10, chunk_tokens=5)
    plain = Plain.of(model)
    with node_pairs() as start:
        pair = start(model, prefill={**both, "tp": 2}, decode=both)
        for cell in (Cell(False, True, False), Cell(True, True, True)):
            run_cell(pair, cell, plain.cases, "mixed")
        assert pair.decode.rounds.stats.num_drafted > 0
