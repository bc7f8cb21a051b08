"""Random shapes of DeepSeek-V4 between two nodes: the text is that of transformers, whatever the sizes, the rates of
entries, the kinds of layers, the number of drafts, the chunks, the pages and the ranks are.

The gate runs two shapes, `whole` runs 200."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import coach
from node_pair import node_pairs, params
from own_mtp import with_mtp
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
    return tuple({**both, "chunk_tokens": rng.randint(1, 260), "tp": rng.choice(ranks)} for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", thinned(range(200), lambda seed, _: seed in (3, 8)))
def test_the_text_is_that_of_transformers(seed: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Greedy and seeded requests, one behind a cached beginning, one whose prompt the decode node computes. Drafts are
    often right."""
    rng = random.Random(seed)
    shape = shape_of(rng)
    prefill, decode = nodes_of(rng, shape)
    model = with_mtp(checkpoint("deepseek_v4", seed=seed, **shape), tmp_path / "model")
    prompts = [rng.choices(range(1, 512), k=rng.randint(1, 150)) for _ in range(3)]
    prompts.append(prompts[0] + prompts[1][: rng.randint(1, 40)])
    asked = [params(NUM_TOKENS, seed=at, temperature=float(at == 2)) for at in range(4)]
    solo = Solo(model, speculative="ngram", page_size=prefill["page_size"], num_pages=300)
    truths = {at: solo.run(solo.start(ids, asked[at]), NUM_TOKENS, 0) for at, ids in enumerate(prompts)}
    reference = Reference(model)
    with node_pairs() as start:
        pair = start(model, prefill=prefill, decode=decode)
        if decode["speculative"] != "none":
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
    print(f"{reference.counts}; {shape}; {prefill}; {decode}")
    assert reference.num_ties == 0, reference.counts
