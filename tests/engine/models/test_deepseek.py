"""DeepSeek-V2 and V3 against transformers: experts, greedy text through the engine, and what is refused.

Logits of dense models, however their tokens are split, are in test_decoder.py."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from drafted_text import check_drafted_text
from node_pair import params
from own_mtp import with_mtp
from quantized import ONLINE, SCHEMES, RoundingReference, quantized
from recorded_roundings import recorded_roundings
from safetensors.torch import load_file, save_file
from solo import Solo
from thinned import every, halved, is_whole, thinned
from ties import Reference

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model, tensor_specs
from baton.engine.ranks.shares import check_shares
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import KvPlane

PAGE_SIZE, NUM_PAGES = 4, 30
TOLERANCE = 1e-4
Checkpoint = Callable[..., Path]
EXPERTS = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
ODD = {  # two groups of 7 experts, and 5 heads
    "n_routed_experts": 14,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("deepseek_v2", EXPERTS | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v2": (
        "deepseek_v2",
        EXPERTS | {"topk_method": "group_limited_greedy", "q_lora_rank": 48, "routed_scaling_factor": 1.7},
    ),
    "v3": ("deepseek_v3", EXPERTS | {"q_lora_rank": 48, "rope_parameters": YARN | {"mscale_all_dim": 1.0}}),
    "v3-odd": ("deepseek_v3", EXPERTS | ODD),
    "v3-no-dense-layer": ("deepseek_v3", EXPERTS | {"first_k_dense_replace": 0, "norm_topk_prob": False}),
}

PUBLIC = {  # config.json of published checkpoints
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
    },
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    },
    "kimi-k2": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 163840,
    },
}  # fmt: skip


@pytest.fixture(params=VARIANTS, scope="module")
def model_dir(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts. The biases of their scores, which transformers leaves zero, are random."""
    family, config = VARIANTS[request.param]
    directory = shutil.copytree(checkpoint(family, **config), tmp_path_factory.mktemp("model") / family)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.3 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(512), k=num_tokens)


def forward(model_dir: Path, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, [len(ids), vocab_size]."""
    config = read_model_config(model_dir)
    model = load_model(model_dir, config, torch.float32, "cpu")
    kv = torch.full(KvLayout.of(config.pool("float32"), PAGE_SIZE).stacked_shape(NUM_PAGES), float("nan"))
    pages, position, logits = random.Random(0).sample(range(1, NUM_PAGES), 20), 0, []
    for num in chunks:
        batch = ForwardBatch.build([BatchRow(ids[position : position + num], position, pages)], PAGE_SIZE, "cpu")
        logits.append(model.logits(model.forward(batch, ModelPools(kv))))
        position += num
    return torch.cat(logits)


@pytest.mark.parametrize("chunks", [(60,), (1, 5, 13, 20, 1, 1, 1, 17, 1)], ids=["whole", "odd"])
def test_logits_equal_transformers(model_dir: Path, chunks: tuple[int, ...]) -> None:
    ids = prompt(60)
    with torch.inference_mode():
        expected = Reference(model_dir).model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.5  # else everything is close
    torch.testing.assert_close(forward(model_dir, ids, chunks), expected, atol=TOLERANCE, rtol=0)


def test_the_tensors_are_what_transformers_writes(model_dir: Path) -> None:
    written = {name: tuple(tensor.shape) for name, tensor in load_file(model_dir / "model.safetensors").items()}
    assert {spec.name: spec.shape for spec in tensor_specs(read_model_config(model_dir))} == written


def test_a_page_holds_one_latent_per_token(checkpoint: Checkpoint) -> None:
    solo = Solo(checkpoint("deepseek_v3"), speculative="ngram")
    [plane] = solo.engine.schema.target.planes
    assert plane == KvPlane("latent", num_heads=1, head_dim=40 + 16, dtype="float32")
    assert solo.engine.page_bytes * 1024 == solo.engine.pool_bytes == 1024 * 2 * 4 * 56 * 4  # pages, layers, tokens


@pytest.mark.parametrize(
    ("algorithm", "topk"), every([("standalone", 1), ("eagle", 1), ("eagle", 3), ("eagle3", 3)], 2)
)
def test_greedy_text_equals_transformers(checkpoint: Checkpoint, tmp_path: Path, algorithm: str, topk: int) -> None:
    """Prompts in chunks, then rounds of several sequences, with chains and with trees of drafts, and without any."""
    model_dir = checkpoint("deepseek_v3", q_lora_rank=48)
    if algorithm == "standalone":  # every draft is its own target
        settings: dict[str, Any] = {"draft_model": str(model_dir)}
    else:
        settings = {"draft_model": str(heads.write_head(tmp_path, algorithm, model_dir))}
    settings |= {"draft_topk": topk, "draft_tokens": 8} if topk > 1 else {}
    solo, reference = Solo(model_dir, speculative=algorithm, draft_steps=3, **settings), Reference(model_dir)
    prompts = [prompt(num, seed) for seed, num in enumerate((3, 9, 17, 30))]
    running = [solo.start(ids, params(40), chunk=7) for ids in prompts]
    while min(len(sequence.generated) for sequence in running) < 24:
        solo.round(running, 3)
        solo.round(running[:2], 0)
    for ids, sequence in zip(prompts, running, strict=True):
        reference.assert_greedy(ids, sequence.generated[:24], reference.generate(ids, 24))
    assert reference.num_ties <= 1
    if algorithm == "standalone":
        assert all(num == 3 for sequence in running for num in sequence.num_accepted if num)


def test_its_own_layer_drafts_through_the_handoff(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With no setting at all. The text is the target's."""
    model = with_mtp(checkpoint("deepseek_v3", **EXPERTS, **ODD, q_lora_rank=48), tmp_path / "model")
    reference = Reference(model)
    check_drafted_text(model, reference)
    assert reference.num_ties == 0


@pytest.mark.parametrize("name", every(["blocks", "w8a16", "fp8-static", "online"], 4))
def test_its_own_layer_may_be_in_fp8(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Through the handoff, with the text of a model that rounds alike. Attention multiplies by the numbers of
    `kv_b_proj`, whose stored scale of rows is left over then."""
    plain = with_mtp(checkpoint("deepseek_v3", **EXPERTS, q_lora_rank=48), tmp_path / "model")
    scheme = ONLINE if name == "online" else SCHEMES[name]
    model = plain if name == "online" else quantized(plain, tmp_path / name, scheme)
    prompts, num_tokens = [prompt(3), prompt(30, 1), [*prompt(30, 1)[:17], 7, 8]], 16 if is_whole() else 8
    with recorded_roundings() as roundings:
        reference = RoundingReference(plain, scheme, roundings)
        check_drafted_text(model, reference, prompts, num_tokens, quantization="fp8" if name == "online" else "auto")
    assert reference.num_ties == 0, reference.num_ties


@pytest.mark.parametrize(
    ("families", "transport"), halved([("llama", "deepseek_v2"), ("deepseek_v2", "llama")], ["local", "zmq"])
)
def test_target_and_draft_have_pools_of_unlike_kinds(
    families: tuple[str, str], transport: str, checkpoint: Checkpoint
) -> None:
    model, draft = map(checkpoint, families)
    drafting = {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}
    check_drafted_text(model, Reference(model), transport=transport, **drafting)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not served"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15 is odd"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not served; num_attention_heads \\(4\\) is"),
        ({"scoring_func": "linear"}, "scoring_func = 'linear' is not served"),
        ({"norm_topk_prob": True, "first_k_dense_replace": 0}, "norm_topk_prob = True is not served for DeepseekV2For"),
        ({"topk_method": "best"}, "topk_method = 'best' is not served"),
        ({"kv_lora_rank": None}, "kv_lora_rank = None must be a whole number"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((checkpoint("deepseek_v2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_a_key_with_an_uncertain_default_must_be_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = json.loads((checkpoint("deepseek_v2") / "config.json").read_text())
    del config["q_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="q_lora_rank is missing"):
        read_model_config(tmp_path)


def test_a_head_without_kv_of_its_own_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = checkpoint("deepseek_v3")
    head = heads.write_head(tmp_path, "frozen-kv-mtp", checkpoint("llama"))
    with pytest.raises(ConfigError, match="latents"):
        Solo(target, speculative="frozen-kv-mtp", draft_model=str(head))


@pytest.mark.parametrize(
    ("name", "num_billions", "scale"),
    thinned([("v2-lite", 15.7, 0.11472), ("v3", 671.0, 0.13523), ("kimi-k2", 1026.4, 0.13086)], lambda i, *_: i != 2),
)
def test_published_models_have_their_sizes(name: str, num_billions: float, scale: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]))
    config = read_model_config(tmp_path)
    assert round(sum(math.prod(spec.shape) for spec in tensor_specs(config)) / 1e9, 1) == num_billions
    assert config.latent is not None and round(config.latent.scale, 5) == scale
    assert KvLayout.of(config.pool("bfloat16"), 64).page_layer_bytes == 64 * (512 + 64) * 2
    for num_ranks in (2, 4, 8, 16):
        check_shares(config, num_ranks, name)
