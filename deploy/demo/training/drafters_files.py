"""Read and write drafter directories (docs/drafter_checkpoints.md): config.json, and model.safetensors in bfloat16."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .corpus import END_OF_TEXT, END_OF_TURN, PAD, SPECIAL_TOKENS
from .drafters_layers import LayerSizes
from .drafters_models import Drafter, Eagle, Eagle3, FrozenKvMtp, HyperEagle, Mtp, Target
from .model import INITIALIZER_RANGE, RMS_NORM_EPS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def describe(model: Drafter, sizes: LayerSizes, vocab_size: int, context_len: int) -> dict[str, Any]:
    """config.json of `model`."""
    architecture, own = _own_fields(model)
    return {
        "architectures": [architecture],
        "model_type": "hyper_llama" if own.get("hc_mult") else "llama",
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": context_len,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": isinstance(model, Target | FrozenKvMtp),
        "torch_dtype": "bfloat16",
        "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "eos_token_id": [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        **own,
    }


def _own_fields(model: Drafter) -> tuple[str, dict[str, Any]]:
    """The architecture, and the fields that only this layout has or fills."""
    match model:
        case Target(num_streams=1):
            return "LlamaForCausalLM", {"num_hidden_layers": len(model.model.layers)}
        case Target():
            return "HyperLlamaForCausalLM", {"num_hidden_layers": len(model.model.layers), "hc_mult": model.num_streams}
        case Eagle():
            return "LlamaForCausalLMEagle", {"num_hidden_layers": 1}
        case HyperEagle():
            return "HyperLlamaForCausalLMEagle", {"num_hidden_layers": 1, "hc_mult": model.num_streams}
        case Eagle3():
            return "LlamaForCausalLMEagle3", {
                "num_hidden_layers": 1,
                "draft_vocab_size": len(model.d2t),
                "eagle_aux_hidden_state_layer_ids": model.aux_layers,
            }
        case Mtp():
            names = list(model.model.layers)
            return "LlamaForCausalLMNextN", {
                "num_hidden_layers": int(names[0]),
                "num_nextn_predict_layers": len(names),
                "mtp_chained": model.chained,
            }
        case FrozenKvMtp():
            return "FrozenKvMtpForCausalLM", {
                "num_hidden_layers": len(model.target_layers),
                "backbone_hidden_size": model.post_projection.out_features,
                "target_layers": model.target_layers,
            }


def save(model: Drafter, config: dict[str, Any], folder: Path, tokenizer_from: Path | None = None) -> None:
    """Write the directory; complete models (Target) take the tokenizer's files of the folder `tokenizer_from`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name: (value.detach().bfloat16() if value.is_floating_point() else value.detach()).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, folder / name)


def load(folder: Path) -> Drafter:
    """The model of a directory that `save` wrote (or the demo target), with float32 parameters, for evaluation."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    model = build(config, weights.get("d2t"))
    model.load_state_dict({name: v.float() if v.is_floating_point() else v for name, v in weights.items()})
    return model.eval().requires_grad_(requires_grad=False)


def load_target(folder: Path) -> Target:
    """Load the complete model of a directory. Raises ValueError if the directory holds a drafter."""
    model = load(folder)
    if not isinstance(model, Target):
        raise ValueError(f"{folder} holds a drafter of the class {type(model).__name__}, not a complete model")
    return model


def layer_sizes(config: dict[str, Any]) -> LayerSizes:
    """The sizes of a config.json."""
    return LayerSizes(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=config["rope_theta"],
    )


def build(config: dict[str, Any], d2t: torch.Tensor | None = None) -> Drafter:
    """A model with fresh weights for a config.json; EAGLE-3 needs its `d2t` [draft_vocab_size] int64."""
    sizes, vocab_size, num_layers = layer_sizes(config), config["vocab_size"], config["num_hidden_layers"]
    match config["architectures"][0]:
        case "LlamaForCausalLM" | "HyperLlamaForCausalLM":
            return Target(sizes, vocab_size, num_layers, config.get("hc_mult") or 1)
        case "LlamaForCausalLMEagle":
            return Eagle(sizes)
        case "LlamaForCausalLMEagle3":
            assert d2t is not None
            draft_ids = d2t + torch.arange(len(d2t))
            return Eagle3(sizes, config["eagle_aux_hidden_state_layer_ids"], vocab_size, draft_ids)
        case "LlamaForCausalLMNextN":
            return Mtp(sizes, num_layers, config["num_nextn_predict_layers"], config["mtp_chained"])
        case "FrozenKvMtpForCausalLM":
            return FrozenKvMtp(sizes, config["backbone_hidden_size"], config["target_layers"], vocab_size)
        case "HyperLlamaForCausalLMEagle":
            return HyperEagle(sizes, config["hc_mult"])
        case unknown:
            raise ValueError(f"no demo drafter has the architecture {unknown}")
