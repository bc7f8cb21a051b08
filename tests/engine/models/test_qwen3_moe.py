"""Families with experts against transformers: logits however tokens are split, and greedy text through the engine."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from node_pair import node_pairs, params
from quantized import SCHEMES, RoundingReference, quantized
from recorded_roundings import recorded_roundings
from safetensors.torch import load_file, save_file
from solo import Solo
from thinned import is_whole, thinned
from ties import Reference

from baton.engine.checkpoint.fingerprint import fingerprint
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model, tensor_specs
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.errors import ModelError

PAGE_SIZE, NUM_PAGES = 4, 30
NUM_TOKENS = 20 if is_whole() else 10  # of a text that nodes serve
TOLERANCE = 1e-4
AUX_TOLERANCE = 2e-4  # of larger numbers
Checkpoint = Callable[..., Path]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", {}),
    "qwen3-weights-sum-to-one": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-some-layers-dense": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-every-other-layer": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3-one-expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3-biases-tied": ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm": ("glm4_moe", {"num_hidden_layers": 3}),
    "glm-norms-biases": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm-groups": ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "glm-linear": ("glm4_moe", {"rope_parameters": LINEAR, "n_shared_experts": 3, "head_dim": 32}),
    "glm-no-dense-layer": ("glm4_moe", {"first_k_dense_replace": 0}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-odd": (
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "head_dim": 20,
            "sliding_window": 2,  # transformers' cache cannot hold a window of 1
            "num_attention_heads": 6,
        },
    ),
    "gpt-oss-plain": ("gpt_oss", {"attention_bias": False, "rope_parameters": YARN, "swiglu_limit": 7.0}),
    "gpt-oss-alpha": ("gpt_oss", {"swiglu_alpha": 0.9, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
    "minimax": ("minimax_m2", {}),
    "minimax-all-rotated": ("minimax_m2", {"rotary_dim": 16, "num_key_value_heads": 1}),
}

# one of each family; the logits of all variants are compared
SPOKEN = ("qwen3-some-layers-dense", "glm-groups", "gpt-oss-odd", "minimax-all-rotated")


@pytest.fixture(params=VARIANTS, scope="module")
def model_dir(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, config = VARIANTS[request.param]
    path = checkpoint(family, **config)
    return (
        path if family in ("qwen3_moe", "gpt_oss") else with_biases(path, tmp_path_factory.mktemp("biased") / "model")
    )


def with_biases(source: Path, path: Path) -> Path:
    """Return a copy whose routers prefer some experts: transformers begins with biases of zero."""
    shutil.copytree(source, path)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in sorted(tensors):
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator) / 2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(512), k=num_tokens)


def forward(model_dir: Path, ids: Sequence[int], chunks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all tokens, [len(ids), vocab_size], and the states before each layer and after the last, which EAGLE-3
    reads, [num_layers + 1, len(ids), hidden_size]."""
    config = read_model_config(model_dir)
    model = load_model(model_dir, config, torch.float32, "cpu")
    kv = torch.full((config.num_layers, NUM_PAGES, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim), float("nan"))
    pages, position, logits, aux = random.Random(0).sample(range(1, NUM_PAGES), 20), 0, [], []
    for num in chunks:
        batch = ForwardBatch.build([BatchRow(ids[position : position + num], position, pages)], PAGE_SIZE, "cpu")
        states = model.forward_with_aux(batch, ModelPools(kv), range(config.num_layers + 1))
        logits.append(model.logits(states.final))
        aux.append(torch.stack(states.aux))
        position += num
    return torch.cat(logits), torch.cat(aux, 1)


@pytest.mark.each_value
@pytest.mark.parametrize("chunks", [(60,), (1, 5, 13, 20, 1, 1, 1, 17, 1)], ids=["whole", "odd"])
def test_logits_equal_transformers(model_dir: Path, chunks: tuple[int, ...]) -> None:
    ids, model = prompt(60), Reference(model_dir).model
    states: list[torch.Tensor] = []
    modules = (*model.model.layers, model.model.norm)
    hooks = [each.register_forward_pre_hook(lambda _, args: states.append(args[0][0])) for each in modules]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    assert expected.std() > 0.5  # else everything is close
    logits, aux = forward(model_dir, ids, chunks)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(aux, torch.stack(states), atol=AUX_TOLERANCE, rtol=0)


def test_the_tensors_are_what_transformers_writes(model_dir: Path) -> None:
    written = {name: tuple(tensor.shape) for name, tensor in load_file(model_dir / "model.safetensors").items()}
    assert {spec.name: spec.shape for spec in tensor_specs(read_model_config(model_dir))} == written


@pytest.mark.parametrize("model_dir", thinned(VARIANTS, lambda _, name: name in SPOKEN), indirect=True)
def test_greedy_text_equals_transformers(model_dir: Path) -> None:
    """Prompts in chunks, then rounds of several sequences, with and without drafts (every draft is its own target)."""
    solo, reference = Solo(model_dir, speculative="standalone", draft_model=str(model_dir)), Reference(model_dir)
    lens, num_tokens = ((3, 9, 17, 30), 24) if is_whole() else ((9, 30), 16)
    prompts = [prompt(num, seed) for seed, num in enumerate(lens)]
    running = [solo.start(ids, params(40), chunk=7) for ids in prompts]
    for num_steps in itertools.cycle((0, 3, 3, 0)):
        results = solo.round(running, num_steps)
        assert all(result.num_accepted == num_steps for result in results)
        if min(len(sequence.generated) for sequence in running) >= num_tokens:
            break
    for ids, sequence in zip(prompts, running, strict=True):
        reference.assert_greedy(ids, sequence.generated[:num_tokens], reference.generate(ids, num_tokens))
    assert reference.num_ties <= 1, reference.num_ties


@pytest.mark.parametrize(
    ("family", "config", "prefill", "decode", "scheme"),
    thinned(
        [
            ("qwen3_moe", {"norm_topk_prob": True}, {}, {"tp": 2}, None),
            ("glm4_moe", {}, {}, {"dp_attention": 2}, None),
            ("minimax_m2", {}, {"dp_attention": 2}, {}, "w8a8"),
            ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}, {"tp": 2}, {}, None),
            ("minimax_m2", {"num_key_value_heads": 1}, {"tp": 2}, {}, None),  # both ranks have the same head of k
            (
                "glm4_moe",
                {"head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256},
                {"tp": 2},
                {},
                "blocks",
            ),
            ("minimax_m2", {}, {"tp": 2}, {}, "w8a8"),
            ("gpt_oss", {}, {}, {"tp": 2}, None),
            ("gpt_oss", {"num_key_value_heads": 1}, {"tp": 2}, {}, None),
            ("gpt_oss", {}, {}, {"dp_attention": 2}, None),
        ],
        lambda i, *_: i in (0, 1, 6, 8),
    ),
)
def test_ranks_and_fp8_give_the_text_of_transformers(
    family: str,
    config: dict[str, Any],
    prefill: dict[str, int],
    decode: dict[str, int],
    scheme: str | None,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    """Ranks divide the hidden units of every expert, and the sum over ranks is made once for a mixture."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64} if scheme == "blocks" else {}
    plain = checkpoint(family, **config, **heads)
    if family not in ("qwen3_moe", "gpt_oss"):
        plain = with_biases(plain, tmp_path / "biased")
    model = plain if scheme is None else quantized(plain, tmp_path / "fp8", SCHEMES[scheme])
    prompts = [prompt(length, seed) for seed, length in enumerate((3, 21, 40))]
    both = {"page_size": 4, "num_pages": 120, "chunk_tokens": 9}
    with recorded_roundings() as roundings, node_pairs() as start:
        pair = start(model, prefill=both | prefill, decode=both | decode)
        for index, ids in enumerate(prompts):
            pair.submit(f"{index}", ids, params(NUM_TOKENS))
        results = pair.run()
        reference = Reference(plain) if scheme is None else RoundingReference(plain, SCHEMES[scheme], roundings)
        for index, ids in enumerate(prompts):
            reference.assert_greedy(ids, results[f"{index}", 0].ids, reference.generate(ids, NUM_TOKENS))
    assert reference.num_ties <= 1, reference.num_ties


@pytest.mark.parametrize(
    ("family", "drafter"),
    thinned([("qwen3_moe", "eagle3"), ("glm4_moe", "standalone"), ("minimax_m2", "eagle")], lambda i, *_: i != 1),
)
def test_drafts_do_not_change_the_text(family: str, drafter: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prompts that share a beginning, twice, in chunks, with trees where the drafter has them."""
    model = checkpoint(family)
    drafts = drafters.settings(drafter, model, tmp_path, steps=3) | (
        {} if drafter == "standalone" else {"draft_topk": 2}
    )
    reference, prompts = Reference(model), [prompt(9, 1), prompt(40, 2), prompt(40, 2)[:25] + prompt(8, 3)]
    both = {"page_size": 4, "num_pages": 200, "chunk_tokens": 11, **drafts}
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for turn in range(2):
            for index, ids in enumerate(prompts):
                pair.submit(f"{turn} {index}", ids, params(NUM_TOKENS))
            pair.run()
        results = pair.results
        assert pair.decode.stats().num_drafted > 0
    for index, ids in enumerate(prompts):
        expected = reference.generate(ids, NUM_TOKENS)
        for turn in range(2):
            reference.assert_greedy(ids, results[f"{turn} {index}", 0].ids, expected)
    assert reference.num_ties <= 1, reference.num_ties


def test_an_expert_that_is_missing_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, name = checkpoint("qwen3_moe"), "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"lacks tensors .* {name}$"):
        forward(tmp_path, prompt(4), (4,))


def test_an_expert_too_many_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe")
    config = (source / "config.json").read_text().replace('"num_local_experts": 4', '"num_local_experts": 3')
    (tmp_path / "config.json").write_text(config)
    tensors = load_file(source / "model.safetensors")
    routers = {name: tensor[:3].clone() for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
    save_file(tensors | routers, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not use \(model.layers.0.mlp.experts.3"):
        forward(tmp_path, prompt(4), (4,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok = 5 is more than there are experts \(4\)"),
        ({"num_local_experts": 0}, "num_local_experts = 0 must be a whole number of at least 1"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers = .* must be a list of layer numbers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
        ({"sliding_window": 7}, "sliding_window = 7 is not served for Qwen3MoeForCausalLM"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused(
    changes: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key not in changes or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        read_model_config(tmp_path)


def test_the_fingerprint_counts_how_experts_are_used(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two directories of equal tensors whose routers choose differently are different models."""
    source = checkpoint("qwen3_moe")
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = (source / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert fingerprint(tmp_path) == fingerprint(source)
    (tmp_path / "config.json").write_text(config.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 3'))
    assert fingerprint(tmp_path) != fingerprint(source)
