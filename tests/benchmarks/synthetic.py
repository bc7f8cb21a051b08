"""Write checkpoints of real sizes without a download, for benchmarks and tests.

    python tests/benchmarks/synthetic.py llama-3.1-8b DIR                             # random weights
    python tests/benchmarks/synthetic.py llama-3.1-8b DIR --planted --acceptance 0.8  # and a head in DIR/eagle3-0.8
    python tests/benchmarks/synthetic.py gpt-oss-20b DIR --planted --config-only      # weights are made when loaded

The weights are random, or they continue every prompt with a text that is known in advance (planted.py). Tensors are
drawn one after the other, on a GPU if there is one, and at most one shard is held in memory. The same seed gives the
same values on the same kind of device. The vocabulary is `t0`, `t1`, ...: one word per token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import shared_paths  # noqa: F401
import torch
from planted import PLANTED, PlantedModel, write_planted
from planted_eagle3 import write_planted_eagle3
from tensor_files import SHARD_BYTES, standard_normal, write_config, write_shards, write_tokenizer
from torch import Tensor

from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.made_checkpoint import EveryName, dummy_tensor
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.models.registry import tensor_specs

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
MXFP4 = {  # the quantization_config of gpt-oss
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

ARCHITECTURES: dict[str, dict[str, Any]] = {  # fields of config.json that differ between models
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "qwen2.5-3b": _QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN2
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}

ARCHITECTURES |= {
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "tie_word_embeddings": False,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "quantization_config": MXFP4,
    },
}

ARCHITECTURES["deepseek-v4-flash"] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "tie_word_embeddings": False,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}

ARCHITECTURES["deepseek-v4-pro"] = ARCHITECTURES["deepseek-v4-flash"] | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}

FP8_BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}

_LOGIT_SPREAD = 3.0  # standard deviation of random logits


def write_random(directory: Path, fields: dict[str, Any], *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a model of random weights and return `directory`. `fields`: one of ARCHITECTURES, plus `dtype`."""
    config = write_config(directory, fields)
    specs, dtype = tensor_specs(config), getattr(torch, config.checkpoint_dtype)
    drawn = ((spec.name, random_tensor(spec, config, seed).to(dtype)) for spec in specs)
    write_shards(directory, drawn, shard_bytes)
    write_tokenizer(directory, config.vocab_size)
    return directory


def random_tensor(spec: TensorSpec, config: ModelConfig, seed: int) -> Tensor:
    """Draw one weight, float32, on a GPU if there is one.

    Norms are near one, matrices keep the scale of their input, and all sublayers together add to the residual stream
    as much as the embedding does. Logits spread by a few units, so that the next token is neither certain nor
    arbitrary. If the head shares the embedding's weights, the sublayers outweigh the embedding: otherwise every token
    would be followed by itself."""
    noise = standard_normal(spec.name, spec.shape, seed)
    if len(spec.shape) == 1:
        return noise.mul_(0.1).add_(1.0)
    embedding_scale = _LOGIT_SPREAD / math.sqrt(config.hidden_size)
    if spec.name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return noise.mul_(embedding_scale)
    scale = 1.0 / math.sqrt(spec.shape[1])
    if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= embedding_scale / math.sqrt(config.num_layers)
        scale *= math.sqrt(config.hidden_size) / 2 if config.tie_word_embeddings else 1.0
    return noise.mul_(scale)


def write_random_prediction_layer(directory: Path, fields: dict[str, Any]) -> Path:
    """Write a prediction layer (MTP) of random weights for a model of DeepSeek-V4 that the loader makes, and return
    `directory`. `fields`: of the model."""
    own = fields | {"num_hidden_layers": 1, "compress_ratios": [0, 0], "num_hash_layers": 0}
    config, device = write_config(directory, own), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, hc_mult = config.hidden_size, config.hc_mult
    specs = [spec for spec in tensor_specs(config, EveryName()) if spec.name.startswith("layers.0.")]
    specs = [replace(spec, name=spec.name.replace("layers.0.", "mtp.0.")) for spec in specs]
    for name in ("e_proj", "h_proj"):
        specs.append(TensorSpec(f"mtp.0.{name}.weight", (size, size), ("F8_E4M3",)))
        specs.append(TensorSpec(f"mtp.0.{name}.scale", (-(-size // 128), -(-size // 128)), ("F8_E8M0",)))
    shapes = {"enorm.weight": (size,), "hnorm.weight": (size,), "norm.weight": (size,), "hc_head_scale": (1,)}
    shapes |= {"hc_head_base": (hc_mult,), "hc_head_fn": (hc_mult, hc_mult * size)}
    specs += [TensorSpec(f"mtp.0.{name}", shape, ("F32",)) for name, shape in shapes.items()]
    stored = {"F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}
    drawn = ((spec, dummy_tensor(spec, device)) for spec in specs)
    named = ((spec.name, each.view(stored.get(spec.dtypes[0], each.dtype))) for spec, each in drawn)
    write_shards(directory, named)
    return directory


def with_layers(fields: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """Return `fields` with another number of layers (None: their own), of the same kinds in turn."""
    num_layers = fields["num_hidden_layers"] if num_layers is None else num_layers
    kinds = fields.get("layer_types")
    types = {} if kinds is None else {"layer_types": [kinds[layer % len(kinds)] for layer in range(num_layers)]}
    ratios = fields.get("compress_ratios")  # the last one is that of a prediction layer
    types |= {} if ratios is None else {"compress_ratios": [*ratios[:num_layers], *ratios[-1:]]}
    return fields | {"num_hidden_layers": num_layers} | types


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", metavar="ARCH", choices=ARCHITECTURES, help=", ".join(ARCHITECTURES))
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="fewer or more layers than the original has")
    parser.add_argument("--planted", action="store_true", help="a text that is known in advance (planted_text.py)")
    parser.add_argument("--config-only", action="store_true", help="for --load-format dummy or planted:maker")
    parser.add_argument("--fp8-blocks", action="store_true", help="the loader makes weights in FP8, in blocks of 128")
    parser.add_argument("--mtp", action="store_true", help="a random prediction layer of DeepSeek-V4, in DIR/mtp")
    heads = "EAGLE-3 heads beside a planted model, in DIR/eagle3-A: shares of tokens that they propose right"
    parser.add_argument("--acceptance", type=float, nargs="+", default=[], metavar="A", help=heads)
    options = parser.parse_args(arguments)
    if options.acceptance and not options.planted:
        parser.error("--acceptance needs --planted")
    fields = with_layers(ARCHITECTURES[options.architecture], options.layers) | {"dtype": options.dtype}
    if options.fp8_blocks and "quantization_config" in fields:
        parser.error(f"{options.architecture} is quantized already; leave --fp8-blocks out")
    fields |= FP8_BLOCKS if options.fp8_blocks else {}
    if "quantization_config" in fields and not options.config_only:
        parser.error("quantized weights are made by the loader; add --config-only")
    model = None
    if options.config_only:
        config = write_config(options.directory, fields | (PLANTED if options.planted else {}))
        write_tokenizer(options.directory, config.vocab_size)
        model = PlantedModel(config, options.seed) if options.acceptance else None
    elif options.planted:
        model = write_planted(options.directory, fields, seed=options.seed)
    else:
        write_random(options.directory, fields, seed=options.seed)
    for share in options.acceptance if model is not None else ():
        write_planted_eagle3(options.directory / f"eagle3-{share:g}", model, share, seed=options.seed)
    if options.mtp:
        write_random_prediction_layer(options.directory / "mtp", fields)
    print(f"wrote {options.directory}")


if __name__ == "__main__":
    main()
