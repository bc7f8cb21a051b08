"""Random shapes of DeepSeek-V4, and of families with a gated delta rule, between two nodes: the text is that of
transformers, whatever the sizes, the rates of entries, the kinds of layers, the number of drafts, the chunks, the pages
and the ranks are.

The gate runs one shape of each, `whole` runs 200."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import coach
from node_pair import node_pairs, params
from own_mtp import with_mtp, with_qwen_mtp
from solo import Solo
from thinned import thinned
from ties import Reference

NUM_TOKENS = 12
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def shape_of(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a configuration."""
    num_heads, num_layers, num_experts = rng.choice((2, 3, 4, 6)), rng.randint(1, 5), rng.randint(2, 8)
    head_dim, index_dim = rng.choice((12, 16, 26, 32, 40)), rng.choice((8, 12, 16, 22))
    yarn = {"rope_type": "yarn", "factor": rng.choice((2.0, 16.0)), "original_max_position_embeddings": 32}
    num_hash = rng.randint(0, num_layers - 1)  # the prediction layer is made of the last one
    return {
        "hidden_size": rng.choice((32, 48, 64, 96)),
        "intermediate_size": rng.choice((16, 24, 40)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "qk_rope_head_dim": rng.choice([size for size in (2, 4, 8, 12) if size <= min(head_dim, index_dim)]),
        "q_lora_rank": rng.choice((8, 20, 28)),
        "o_groups": rng.choice([num for num in range(1, num_heads + 1) if num_heads % num == 0]),
        "o_lora_rank": rng.choice((6, 12)),
        "n_routed_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "routed_scaling_factor": rng.choice((1.0, 1.5, 2.5)),
        "layer_types": [rng.choice(KINDS) for _ in range(num_layers)],
        "compress_rates": dict(zip(KINDS[1:], rng.choice(((4, 4), (4, 16), (2, 8), (8, 4), (4, 128))), strict=True)),
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (num_layers - num_hash),
        "hc_mult": rng.randint(1, 4),
        "hc_sinkhorn_iters": rng.choice((1, 3, 20)),
        "sliding_window": rng.choice((1, 2, 5, 7, 16, 128)),
        "index_n_heads": rng.choice((2, 8, 32)),
        "index_head_dim": index_dim,
        "index_topk": rng.choice((1, 3, 5, 40)),
        "swiglu_limit": rng.choice((0.5, 1.5, 10.0)),
        "rope_scaling": {**yarn, "beta_fast": 32, "beta_slow": 1} if rng.random() < 0.7 else None,
    }


def nodes_of(rng: random.Random, shape: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a prefill and of a decode node."""
    num_steps = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    both = {
        "page_size": math.lcm(*shape["compress_rates"].values()) * rng.choice((1, 1, 2)),
        "num_pages": 300,
        "speculative": "mtp" if num_steps else "none",
        "transport": rng.choice(("local", "zmq")),
        **({"draft_steps": num_steps} if num_steps else {}),
    }
    ranks = [num for num in (1, 1, 2, 3) if shape["o_groups"] % num == shape["intermediate_size"] % num == 0]
    prefill, decode = ({**both, "chunk_tokens": rng.randint(1, 260), "tp": rng.choice(ranks)} for _ in range(2))
    return (prefill if decode["tp"] == 1 else prefill | {"tp": 1}), decode  # one process has one group of ranks


DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")


def delta_shape(rng: random.Random, family: str) -> dict[str, Any]:
    """Return the fields of a configuration with a gated delta rule. A head has so many numbers that they fill the
    vectors of a processor."""
    num_layers, num_experts, num_heads = rng.randint(2, 5), rng.randint(2, 8), rng.choice((2, 4, 6))
    kinds = ["linear_attention", "full_attention"]
    kinds = rng.sample([*kinds, *rng.choices(kinds, k=num_layers - 2)], num_layers)
    experts = {"num_experts_per_tok": rng.randint(1, num_experts), "moe_intermediate_size": rng.choice((12, 24, 48))}
    fields: dict[str, Any] = {
        "hidden_size": rng.choice((48, 64, 96)),
        "intermediate_size": rng.choice((48, 96)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "layer_types": kinds,
        "linear_conv_kernel_dim": rng.choice((2, 3, 4, 6)),
    }
    if family == "kimi_linear":
        num_groups = rng.choice([num for num in (1, 2) if num_experts % num == 0 and num_experts >= 2 * num])
        fields |= experts | {
            "kv_lora_rank": rng.choice((16, 40)),
            "q_lora_rank": rng.choice((None, 28)),
            "qk_nope_head_dim": rng.choice((8, 20)),
            "qk_rope_head_dim": rng.choice((4, 16)),
            "v_head_dim": rng.choice((8, 24)),
            "linear_num_heads": rng.choice((2, 4, 6)),
            "linear_head_dim": rng.choice((8, 16, 32)),
            "num_local_experts": num_experts,
            "n_shared_experts": rng.choice((1, 2)),
            "n_group": num_groups,
            "topk_group": num_groups,
            "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(num_layers - 1)] + ["sparse"],
        }
        return fields
    num_key_heads = rng.choice((2, 4, 6))
    fields |= {
        "num_key_value_heads": rng.choice([num for num in (1, 2, num_heads) if num_heads % num == 0]),
        "head_dim": rng.choice((8, 16, 24)),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * rng.randint(1, 3),
        "linear_key_head_dim": rng.choice((8, 12, 16)),
        "linear_value_head_dim": rng.choice((8, 16)),
    }
    if family == "qwen3_5_text":
        return fields
    shared = {"shared_expert_intermediate_size": rng.choice((24, 48))}
    return fields | experts | shared | {"num_experts": num_experts, "mlp_only_layers": []}


def delta_nodes(rng: random.Random, family: str, shape: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a prefill and of a decode node."""
    num_steps, drafter = rng.randint(0, 10), "ngram" if family == "kimi_linear" else "mtp"
    both = {
        "page_size": rng.choice((1, 3, 4, 8, 16, 64)),
        "num_pages": 400,
        "speculative": drafter if num_steps else "none",
        "transport": rng.choice(("local", "zmq")),
        **({"draft_steps": num_steps} if num_steps else {}),
    }
    if drafter == "mtp" and num_steps:
        both["draft_topk"] = 1 + num_steps % 3  # trees of two or three choices, and chains
    names = ("num_attention_heads", "linear_num_heads", "linear_num_key_heads", "intermediate_size")
    counts = [shape[name] for name in (*names, "moe_intermediate_size") if name in shape]
    ranks = [num for num in (1, 1, 2, 3) if all(count % num == 0 for count in counts)]
    ranks = [num for num in ranks if num == 1 or shape.get("num_key_value_heads", 1) in (1, num, 6)]
    prefill, decode = ({**both, "chunk_tokens": rng.randint(1, 260), "tp": rng.choice(ranks)} for _ in range(2))
    return (prefill if decode["tp"] == 1 else prefill | {"tp": 1}), decode


@pytest.mark.parametrize("seed", thinned(range(200), lambda seed, _: seed == 3))
def test_the_text_of_a_delta_rule_is_that_of_transformers(
    seed: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A difference counts as a tie up to twice what transformers differs from itself."""
    rng, family = random.Random(seed), DELTA_FAMILIES[seed % len(DELTA_FAMILIES)]
    shape = delta_shape(rng, family)
    prefill, decode = delta_nodes(rng, family, shape)
    model = checkpoint(family, seed=seed, **shape)
    model = with_qwen_mtp(model, tmp_path / "model") if "qwen" in family else model
    reference = Reference(model, two_rules=[rng.randrange(1, 512) for _ in range(150)])
    check(rng, model, prefill, decode, reference)
    print(f"{reference.counts}; {family}; {shape}; {prefill}; {decode}")
    assert reference.num_ties <= 1, reference.counts


@pytest.mark.parametrize("seed", thinned(range(200), lambda seed, _: seed == 8))
def test_the_text_is_that_of_transformers(seed: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Greedy and seeded requests, one behind a cached beginning, one whose prompt the decode node computes. Drafts are
    often right."""
    rng = random.Random(seed)
    shape = shape_of(rng)
    prefill, decode = nodes_of(rng, shape)
    model = with_mtp(checkpoint("deepseek_v4", seed=seed, **shape), tmp_path / "model")
    reference = Reference(model)
    check(rng, model, prefill, decode, reference)
    print(f"{reference.counts}; {shape}; {prefill}; {decode}")
    assert reference.num_ties == 0, reference.counts


def check(
    rng: random.Random, model: Path, prefill: dict[str, Any], decode: dict[str, Any], reference: Reference
) -> None:
    """Compare the texts of four requests."""
    prompts = [rng.choices(range(1, 512), k=rng.randint(1, 150)) for _ in range(3)]
    prompts.append(prompts[0] + prompts[1][: rng.randint(1, 40)])
    asked = [params(NUM_TOKENS, seed=at, temperature=float(at == 2)) for at in range(4)]
    solo = Solo(model, speculative="ngram", page_size=prefill["page_size"], num_pages=40 + 1000 // prefill["page_size"])
    truths = {at: solo.run(solo.start(ids, asked[at]), NUM_TOKENS, 0) for at, ids in enumerate(prompts)}
    with node_pairs() as start:
        pair = start(model, prefill=prefill, decode=decode)
        if decode["speculative"] != "none" and decode["tp"] == 1:
            coach(pair.decode.executor.engine.drafter, {at: prompts[at] + each for at, each in truths.items()})
        for at, ids in enumerate(prompts):
            pair.submit(f"{at}", ids, asked[at], is_local=at == 1)
            if at != 1:
                pair.run()
        results = [pair.results[f"{at}", 0] for at in range(4)]
    for at, result in enumerate(results):
        assert result.failed is None, result.failed
        if asked[at].temperature:
            assert result.ids == truths[at]
        else:
            reference.assert_text(prompts[at], result.ids)
