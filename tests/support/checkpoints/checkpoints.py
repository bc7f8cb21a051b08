"""Small checkpoints in Hugging Face form with random weights, written by transformers itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"
TINY: dict[str, Any] = {  # fields of a transformers configuration
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that the greedy text varies and near-ties are rare
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENTS: dict[str, Any] = {  # multi-head latent attention
    "kv_lora_rank": 40,
    "q_lora_rank": None,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 24,
}
_INDEX: dict[str, Any] = {"index_n_heads": 5, "index_head_dim": 24, "index_topk": 9, "q_lora_rank": 28}
_DEEPSEEK: dict[str, Any] = _LATENTS | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": None,  # all layers
}
_DELTA: dict[str, Any] = {  # layers with a gated delta rule
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
}
_DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_CLASS_NAMES = {
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "minimax_m2": "MiniMaxM2",
    "deepseek_v32": "DeepseekV32",
    "gemma3_text": "Gemma3",
    "gemma4_text": "Gemma4",
    "mimo_v2_flash": "MiMoV2Flash",
}
FIELDS: dict[str, dict[str, Any]] = {  # of a family, beside those of TINY
    "mistral": {"sliding_window": None},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "glm4_moe": {"n_routed_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24},
    "glm4_moe_lite": _LATENTS | {"n_routed_experts": 7, "num_experts_per_tok": 3, "q_lora_rank": 28},
    "mistral4": _LATENTS
    | {
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "minimax_m2": {"num_local_experts": 7, "num_experts_per_tok": 2, "intermediate_size": 48, "rotary_dim": 8},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 7,
        "swiglu_limit": 1.5,  # small, so that it matters
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "deepseek_v32": _LATENTS
    | _INDEX
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "glm_moe_dsa": _LATENTS
    | _INDEX
    | {
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 11,  # not head_dim
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 512,
        "final_logit_softcapping": 9.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.334},
        },
    },
    "deepseek_v4": {
        "intermediate_size": 24,  # of an expert
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 28,
        "num_experts_per_tok": 3,
        "n_routed_experts": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,  # published: 20
        "sliding_window": 7,
        "o_groups": 2,
        "o_lora_rank": 12,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 5,
        "swiglu_limit": 1.5,  # small, so that it matters
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "qwen3_next": _DELTA | _DELTA_EXPERTS | {"mlp_only_layers": [2]},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _DELTA_EXPERTS,
    "kimi_linear": _LATENTS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
# families whose biases and sinks are spread
_BIASED = ("deepseek_v4", "gpt_oss", "kimi_linear", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "mimo_v2_flash")
_NORMED = {
    "deepseek_v4": {"norm.weight": 1.0},
    "qwen3_next": {"norm.weight": 0.3},
    "qwen3_5_text": {"norm.weight": 0.3},
    "qwen3_5_moe_text": {"norm.weight": 0.3},
    "kimi_linear": {"o_norm.weight": 1.0},
    "gemma3_text": {"norm.weight": 0.3},
    "gemma4_text": dict.fromkeys(("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar"), 1.0),
}  # families whose norms are spread: transformers leaves all at one


def make_checkpoint(path: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """Write a random float32 model of `family` with a byte-level tokenizer of 512 ids, and return `path`.

    Families: those of transformers' configurations, most of which `FIELDS` makes small. Layers of deepseek_v2 and
    deepseek_v3 are dense unless `first_k_dense_replace` is given. `config` overrides fields of the transformers
    configuration."""
    import torch
    import transformers

    class_name = _CLASS_NAMES.get(family) or "".join(map(str.capitalize, family.split("_")))
    fields: dict[str, Any] = {**TINY, "head_dim": 16, **FIELDS.get(family, {}), **config}
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        del fields["head_dim"]
    if fields.get("first_k_dense_replace", 0) is None:
        fields["first_k_dense_replace"] = fields["num_hidden_layers"]
    torch.manual_seed(seed)
    config_name = f"{class_name}{'Text' * family.endswith('_text')}Config"
    model = getattr(transformers, f"{class_name}ForCausalLM")(getattr(transformers, config_name)(**fields))
    path.mkdir(parents=True, exist_ok=True)
    model.float().eval().save_pretrained(path)
    if family in _BIASED:
        _spread(path, seed, {"sink_bias": 2.0, "bias": 0.3, "sinks": 2.0, "sink": 2.0, "ape": 1.0, "_base": 0.7})
    if "linear_num_key_heads" in fields or "linear_num_heads" in fields:
        _remember(path)
    if family in _NORMED:
        _spread(path, seed, _NORMED[family])
    if family == "deepseek_v4":
        _spread_experts(path, seed, fields["n_routed_experts"])
    (path / "tokenizer.json").write_text(_tokenizer())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": fields["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def _spread(path: Path, seed: int, scales: dict[str, float]) -> None:
    """Replace tensors of the model in `path`, by the ends of their names, which transformers leaves at one value."""
    import torch

    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        scale = next((scale for end, scale in scales.items() if name.endswith(end)), None)
        if scale is not None:
            tensors[name] = scale * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _spread_experts(path: Path, seed: int, num_experts: int) -> None:
    """Let each token id of the model in `path` have experts of its own in the layers that choose by it."""
    import torch

    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        if name.endswith("tid2eid"):
            num_ids, num_active = tensors[name].shape
            scores = torch.rand(num_ids, num_experts, generator=generator)
            tensors[name] = scores.argsort(1)[:, :num_active].contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _remember(path: Path) -> None:
    """Let the states of the delta rule in `path` fade over some dozens of tokens. Those of random weights are gone
    after three."""
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith(".A_log"):
            tensors[name] -= 4.0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@cache
def _tokenizer() -> str:
    """Return byte-level BPE of at most 512 ids: a special token, all 256 bytes, and merges learnt from a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).with_name("tokenizer_text.txt").read_text(encoding="utf-8")  # it never changes, or tests do
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer.to_str()


def shard(model_dir: Path, num_shards: int) -> None:
    """Divide the checkpoint in `model_dir`, which is one file, into `num_shards`."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == file}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
