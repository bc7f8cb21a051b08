"""One drafter of every kind for a target, with random weights or such that it is always right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from heads import ALGORITHM, KINDS, LAYERED, SIX_LAYERS, write_head
from own_mtp import with_mtp
from safetensors.torch import load_file, save_file

NAMES = ("standalone", *KINDS)  # that run once a token
ORDINARY = (*NAMES, *LAYERED)  # on a llama
STREAM_MTP = "mtp-of-deepseek-v4"  # which reads all residual streams, and drafts chains only
_OWN: dict[str, tuple[str, dict[str, Any]]] = {  # prediction layers in the target's own checkpoint
    "mtp-of-glm4": ("glm4_moe", {}),
    "mtp-of-deepseek": ("deepseek_v3", {"first_k_dense_replace": 1, "q_lora_rank": 48}),
    "mtp-of-glm-dsa": ("glm_moe_dsa", {}),
    "mtp-of-mimo": ("mimo_v2_flash", {}),
    STREAM_MTP: ("deepseek_v4", {}),
}
_HEADS = {  # a target's family, and the head of it
    "eagle-on-latents": ("deepseek_v3", "eagle"),
    "eagle3-on-gpt-oss": ("gpt_oss", "eagle3"),
    "eagle3-on-qwen3-moe": ("qwen3_moe", "eagle3"),
    "eagle-on-gemma4": ("gemma4_text", "eagle"),
}
OF_FAMILIES = (*_OWN, *_HEADS)  # on targets with experts, latents or windows
TREES_OF_FAMILIES = tuple(name for name in OF_FAMILIES if name != STREAM_MTP)
# others have their drafters, or the kinds of their pools
ALIKE = ("mtp-of-glm4", "mtp-of-deepseek", "mtp-of-mimo", "eagle3-on-qwen3-moe", "eagle-on-gemma4")
RARE = ("mtp-of-mimo", "eagle-on-gemma4", STREAM_MTP)  # the gate leaves them out of tests that take long
ALL = (*ORDINARY, *OF_FAMILIES)
SHIFTED = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", *OF_FAMILIES)
_UNLIKE = {"eagle3": 24, "frozen-kv-mtp": 24}  # heads of another width than their target's


def target_of(name: str, checkpoint: Callable[..., Path], **config: Any) -> Path:
    """Return a target that the drafter fits."""
    if name in _OWN:
        family, more = _OWN[name]
        source = checkpoint(family, **(more | config))
        path = source.with_name(f"{source.name}-mtp")
        return path if path.exists() else with_mtp(source, path)
    if name in _HEADS:
        return checkpoint(_HEADS[name][0], **config)
    return checkpoint("llama", **config)


def most_steps(name: str) -> int:
    return {SIX_LAYERS: 6, **dict.fromkeys(LAYERED, 3)}.get(name, 15)


def settings(name: str, model: Path, directory: Path, *, steps: int = 5) -> dict[str, Any]:
    """Return engine settings with a random drafter, written into `directory`. Its drafts are almost never right."""
    if name == "ngram":
        return {"speculative": "ngram", "draft_steps": steps}
    if name == "standalone":
        draft = perturbed(model, directory / "standalone", 10.0)
        return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": steps}
    if name in _OWN:
        return {"speculative": "mtp", "draft_steps": steps}
    name = _HEADS[name][1] if name in _HEADS else name
    own = {"hidden_size": _UNLIKE[name]} if name in _UNLIKE else {}
    head = write_head(directory / name, name, model, **own)
    return {"speculative": ALGORITHM[name], "draft_model": str(head), "draft_steps": min(steps, most_steps(name))}


def perturbed(model: Path, directory: Path, size: float) -> Path:
    """Return a copy of `model` with noise of `size` times the spread in each matrix: 0.1 is often right, 10 almost
    never."""
    shutil.copytree(model, directory)
    path, generator = directory / "model.safetensors", torch.Generator().manual_seed(11)
    tensors = load_file(path)
    for name in sorted(tensors):
        if tensors[name].ndim == 2:
            noise = torch.randn(tensors[name].shape, generator=generator)
            tensors[name] = (tensors[name] + size * tensors[name].std() * noise) / (1 + size**2) ** 0.5
    save_file(tensors, path, {"format": "pt"})
    return directory


# --- drafters that are always right ---


def make_bigram(model: Path, directory: Path, context: float = 0.0) -> Path:
    """Write a copy of `model` whose next token depends only on the last: no branch adds anything, and the rows of the
    embedding have unit RMS. A head that returns the embedding of its token then equals the target. `context`: the share
    of every branch that is kept, for a target that such a head often predicts."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= context
    embedding = tensors["model.embed_tokens.weight"]
    embedding[0] = embedding[1].flip(0)  # transformers leaves the padding token's at zero
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    save_file(tensors, path, {"format": "pt"})
    return directory


def make_right(name: str, model: Path, directory: Path) -> Path:
    """Write a head of kind `name` with exactly the logits of the bigram target `model`. EAGLE-3's vocabulary is a
    permutation of the target's."""
    config = json.loads((model / "config.json").read_text())
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    target = load_file(model / "model.safetensors")
    wide = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size, "draft_vocab_size": vocab_size}
    write_head(directory, name, model, **(wide if name == "eagle3" else {}))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")) or key == "fc.bias":
            tensor.zero_()
        elif key.endswith("norm.weight") and tensor.ndim == 1:
            tensor.fill_(1.0)
    eye, nothing = torch.eye(size), torch.zeros(size, size)
    norm, lm_head = target["model.norm.weight"], target["lm_head.weight"]
    first, second = torch.cat([eye, nothing], 1), torch.cat([nothing, eye], 1)
    match name:
        case "eagle":
            tensors["fc.weight"] = first * norm.unsqueeze(1)
        case "mtp-deepseek":
            prefix = f"model.layers.{config['num_hidden_layers']}"
            tensors[f"{prefix}.eh_proj.weight"] = first
            tensors[f"{prefix}.shared_head.norm.weight"] = norm.clone()
        case "mtp-mimo":
            tensors["model.mtp_layers.0.input_proj.weight"] = second
            tensors["model.mtp_layers.0.final_layernorm.weight"] = norm.clone()
        case "frozen-kv-mtp":
            tensors["pre_projection.weight"] = first
            tensors["model.norm.weight"] = norm.clone()
            tensors["model.embed_tokens.weight"] = lm_head.clone()
        case _:
            tensors |= _right_eagle3(target, first, second)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})
    return directory


def _right_eagle3(
    target: dict[str, torch.Tensor], first: torch.Tensor, second: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Make attention find the row of the same token and return its embedding minus the state that the residual adds."""
    norm, lm_head = target["model.norm.weight"], target["lm_head.weight"]
    size, vocab_size = lm_head.shape[1], lm_head.shape[0]
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(4))
    return {
        "fc.weight": torch.zeros(size, 3 * size),
        "midlayer.self_attn.q_proj.weight": 8 * first,
        "midlayer.self_attn.k_proj.weight": first,
        "midlayer.self_attn.v_proj.weight": first - second,
        "midlayer.self_attn.o_proj.weight": torch.eye(size),
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "norm.weight": norm.clone(),
        "lm_head.weight": lm_head[ids],
        "d2t": ids - torch.arange(vocab_size),
        "t2d": torch.ones(vocab_size, dtype=torch.bool),
    }
