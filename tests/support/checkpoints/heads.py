"""Small random drafter heads with exactly the published names and shapes (docs/drafter_checkpoints.md)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KINDS = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp")  # for an ordinary target
LAYERED = ("mtp3-deepseek", "mtp3-mimo")  # three layers, one a step
SIX_LAYERS = "mtp6-deepseek"  # more than short prompts have tokens
ALGORITHM = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp-deepseek": "mtp",
    "mtp-mimo": "mtp",
    "mtp3-deepseek": "mtp",
    "mtp3-mimo": "mtp",
    SIX_LAYERS: "mtp",
    "frozen-kv-mtp": "frozen-kv-mtp",
}


def write_head(directory: Path, kind: str, target_dir: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a head of `kind` for the target in `target_dir`. `changes` override config.json."""
    target = json.loads((target_dir / "config.json").read_text())
    size = changes.get("hidden_size", target["hidden_size"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target.get("max_position_embeddings", 4096),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    shapes = _SHAPES[kind](config | changes, target)
    if kind == "eagle3":
        config |= {"draft_vocab_size": config["vocab_size"] // 2, "target_hidden_size": target["hidden_size"]}
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, target["num_hidden_layers"]]
    if kind in (*LAYERED, SIX_LAYERS):  # as in a target's own directory
        num_layers = int(kind.removeprefix("mtp")[0])
        config |= {"num_hidden_layers": target["num_hidden_layers"], "num_nextn_predict_layers": num_layers}
    if ALGORITHM[kind] == "frozen-kv-mtp":
        kv = {"num_key_value_heads": target.get("num_key_value_heads"), "head_dim": target["head_dim"]}
        kv |= {"num_attention_heads": target["num_attention_heads"], "num_hidden_layers": 2}
        config |= kv | {
            "backbone_hidden_size": target["hidden_size"],
            "target_layers": [0, target["num_hidden_layers"] - 1],
        }
        shapes = _frozen_kv(config, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(shape, generator) for name, shape in shapes.items()}
    if kind == "eagle3":
        num = config["draft_vocab_size"]
        tensors["d2t"] = torch.arange(num)  # draft id i is target id 2 i
        tensors["t2d"] = torch.arange(config["vocab_size"]) % 2 == 0
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def as_speculators(directory: Path) -> Path:
    """Bring an EAGLE-3 head, as `write_head` writes it, into the layout of Speculators."""
    path, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in load_file(path).items()}
    outer = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "torch_dtype", "tie_word_embeddings")
    own = {key: config.pop(key) for key in outer} | {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": config.pop("norm_before_residual", False),
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "speculators_model_type": "eagle3",
        "target_hidden_size": config.pop("target_hidden_size"),
    }
    del config["architectures"]
    save_file(tensors, path, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(own | {"transformer_layer_config": config}))
    return directory


def some_ids(num_ids: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Return `num_ids` different ids, ascending, [num_ids] int32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab_size, generator=generator)[:num_ids].sort().values.to(torch.int32)


def set_draft_ids(directory: Path, draft_ids: torch.Tensor, seed: int = 0) -> Path:
    """Give an EAGLE-3 head, as `write_head` writes it, the draft vocabulary `draft_ids` [draft_vocab_size] int64. A
    token's row of lm_head.weight does not depend on its place."""
    path, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    tensors, num = load_file(path), len(draft_ids)
    whole = _random((config["vocab_size"], config["hidden_size"]), torch.Generator().manual_seed(seed))
    tensors["lm_head.weight"] = whole[draft_ids]
    tensors["d2t"] = draft_ids - torch.arange(num)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, draft_ids, True)
    save_file(tensors, path, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"draft_vocab_size": num}))
    return directory


def over_all_tokens(logits: torch.Tensor, logit_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Return `logits` of the tokens `logit_ids` (None: all) as [num_rows, vocab_size], -inf for all other tokens."""
    if logit_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), float("-inf"))
    return whole.index_copy_(1, logit_ids.to(torch.int64), logits)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * shape[1] ** -0.5


def _layer(prefix: str, config: dict[str, Any], *, qkv_in: int | None = None) -> dict[str, tuple[int, ...]]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    width = qkv_in or size
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, width),
        f"{prefix}.self_attn.k_proj.weight": (kv, width),
        f"{prefix}.self_attn.v_proj.weight": (kv, width),
        f"{prefix}.self_attn.o_proj.weight": (size, q),
        f"{prefix}.mlp.gate_proj.weight": (inner, size),
        f"{prefix}.mlp.up_proj.weight": (inner, size),
        f"{prefix}.mlp.down_proj.weight": (size, inner),
        f"{prefix}.post_attention_layernorm.weight": (size,),
        f"{prefix}.input_layernorm.weight": (size,),
    }


def _eagle(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size = config["hidden_size"]
    shapes = _layer("layers.0", config) | {"fc.weight": (size, 2 * size), "fc.bias": (size,)}
    del shapes["layers.0.input_layernorm.weight"]
    return shapes


def _eagle3(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    return _layer("midlayer", config, qkv_in=2 * size) | {
        "fc.weight": (size, 3 * target["hidden_size"]),
        "midlayer.hidden_norm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (vocab_size // 2, size),
        "embed_tokens.weight": (vocab_size, size),
    }


def _mtp_deepseek(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return _mtp_deepseek_layer(config, target["num_hidden_layers"])


def _mtp_deepseek_layers(config: dict[str, Any], target: dict[str, Any], num: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for m in range(num):
        shapes |= _mtp_deepseek_layer(config, target["num_hidden_layers"] + m)
    return shapes


def _mtp_deepseek_layer(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    size, prefix = config["hidden_size"], f"model.layers.{index}"
    return _layer(prefix, config) | {
        f"{prefix}.enorm.weight": (size,),
        f"{prefix}.hnorm.weight": (size,),
        f"{prefix}.eh_proj.weight": (size, 2 * size),
        f"{prefix}.shared_head.norm.weight": (size,),
    }


def _mtp_mimo(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return _mtp_mimo_layer(config, 0)


def _mtp3_mimo(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Add the biases of Qwen2's attention."""
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {}
    for m in range(3):
        biases = {
            f"model.mtp_layers.{m}.self_attn.{name}_proj.bias": (width,)
            for name, width in zip("qkv", (q, kv, kv), strict=True)
        }
        shapes |= _mtp_mimo_layer(config, m) | biases
    return shapes


def _mtp_mimo_layer(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    size, prefix = config["hidden_size"], f"model.mtp_layers.{index}"
    return _layer(prefix, config) | {
        f"{prefix}.token_layernorm.weight": (size,),
        f"{prefix}.hidden_layernorm.weight": (size,),
        f"{prefix}.input_proj.weight": (size, 2 * size),
        f"{prefix}.final_layernorm.weight": (size,),
    }


def _frozen_kv(config: dict[str, Any], target: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, width = config["hidden_size"], target["hidden_size"]
    shapes = {
        "pre_projection.weight": (size, 2 * width),
        "post_projection.weight": (width, size),
        "model.norm.weight": (size,),
        "model.embed_tokens.weight": (config["vocab_size"], size),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            name: shape
            for name, shape in _layer(f"model.layers.{layer}", config).items()
            if "k_proj" not in name and "v_proj" not in name
        }
    return shapes


_SHAPES = {
    "frozen-kv-mtp": _frozen_kv,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp-deepseek": _mtp_deepseek,
    "mtp-mimo": _mtp_mimo,
    "mtp3-deepseek": partial(_mtp_deepseek_layers, num=3),
    "mtp3-mimo": _mtp3_mimo,
    SIX_LAYERS: partial(_mtp_deepseek_layers, num=6),
}
