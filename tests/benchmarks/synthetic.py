"""Checkpoints of real sizes without downloads, for benchmarks and tests: random weights, or a planted text.

    python -m synthetic llama-3.1-8b DIR                                                   # random
    python -m synthetic llama-3.1-8b DIR --planted --acceptance 0.8     # and a head in DIR/eagle3-0.8

Tensors are drawn one by one, on the GPU where there is one, and never more than a shard of them is held. The same seed
gives the same values on the same kind of device. Text is `t17 t4 ...`, one word a token.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.checkpoint import TensorSpec
from baton.engine.model_config import ModelConfig
from baton.engine.weights import tensor_specs

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5}

ARCHITECTURES: dict[str, dict[str, Any]] = {  # what config.json says beside the fields that all share
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
}
_SHARED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None}

SHARD_BYTES = 4 << 30
_LOGIT_SPREAD = 3.0  # standard deviation of random logits

Named = Iterable[tuple[str, Tensor]]


def write_random(directory: Path, fields: dict[str, Any], *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> Path:
    """A model of random weights; `fields` as ARCHITECTURES has them, with `dtype`. Returns `directory`."""
    config = write_config(directory, fields)
    specs, dtype = tensor_specs(config), getattr(torch, config.checkpoint_dtype)
    drawn = ((spec.name, random_tensor(spec, config, seed).to(dtype)) for spec in specs)
    write_shards(directory, drawn, shard_bytes)
    write_tokenizer(directory, config.vocab_size)
    return directory


def write_config(directory: Path, fields: dict[str, Any], architecture: str | None = None) -> ModelConfig:
    """config.json, read back (as `architecture`). Raises ModelError for what Baton does not compute."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_SHARED | fields, indent=2) + "\n")
    return ModelConfig.from_dir(directory, architecture)


def random_tensor(spec: TensorSpec, config: ModelConfig, seed: int) -> Tensor:
    """float32, on the GPU where there is one. Norms are near one, matrices keep the scale of what they multiply, and
    all that sublayers add to the residual stream is as large as the embedding. Logits spread by a few units, so that
    the next token is neither certain nor arbitrary; where the embedding is the head too, the sublayers must outweigh
    it, or every token would be followed by itself."""
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


def standard_normal(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Independent of which tensors were drawn before."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
    return torch.randn(tuple(shape), generator=generator, device=device)


def write_shards(directory: Path, tensors: Named, shard_bytes: int = SHARD_BYTES) -> None:
    """model-*.safetensors of at most `shard_bytes` (a larger tensor has a file of its own), and their index."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(tensors, shard_bytes), 1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=2) + "\n")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Words `t0`, `t1`, ... of as many ids; every other word is read as `t0`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


def _shards(tensors: Named, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held = sum(each.nbytes for each in shard.values())
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.cpu().contiguous()
    yield shard


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", metavar="ARCH", choices=ARCHITECTURES, help=", ".join(ARCHITECTURES))
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="fewer or more layers than the original has")
    parser.add_argument("--planted", action="store_true", help="a text that is known in advance (planted_text.py)")
    heads = "EAGLE-3 heads beside a planted model, in DIR/eagle3-A: shares of tokens that they propose right"
    parser.add_argument("--acceptance", type=float, nargs="+", default=[], metavar="A", help=heads)
    options = parser.parse_args(arguments)
    if options.acceptance and not options.planted:
        parser.error("--acceptance needs --planted")
    fields = ARCHITECTURES[options.architecture] | {"dtype": options.dtype}
    if options.layers is not None:
        fields["num_hidden_layers"] = options.layers
    if options.planted:
        from planted import write_planted
        from planted_eagle3 import write_planted_eagle3

        model = write_planted(options.directory, fields, seed=options.seed)
        for share in options.acceptance:
            write_planted_eagle3(options.directory / f"eagle3-{share:g}", model, share, seed=options.seed)
    else:
        write_random(options.directory, fields, seed=options.seed)
    print(f"wrote {options.directory}")


if __name__ == "__main__":
    main()
