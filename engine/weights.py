"""Checkpoint files to tensors: which names a model needs, in which shapes, and how they are fused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash

from ..metadata.errors import ModelError
from .checkpoint import Checkpoint, TensorSpec, safetensors_files, tensor_digests
from .layers import Linear
from .model_config import ModelConfig
from .progress import Progress


@dataclass(frozen=True, slots=True, eq=False)
class StreamSite:
    """Weights by which one branch of a layer reads the residual streams and adds to them (models/hyper_llama.py)."""

    read: torch.Tensor  # [hc_mult]
    write: torch.Tensor  # [hc_mult]
    mix: torch.Tensor  # [hc_mult, hc_mult], from, to


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; q, k, v and gate, up are fused by rows in that order."""

    attention_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size -> q_size + 2 * kv_size
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    attention_out: Linear  # q_size -> hidden_size
    mlp_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size -> 2 * intermediate_size
    down: Linear  # intermediate_size -> hidden_size
    attention_site: StreamSite | None = None  # both None with one residual stream
    mlp_site: StreamSite | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole decoder. With tied embeddings `lm_head` multiplies by `embedding`."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden_size]
    lm_head: Linear  # hidden_size -> vocab_size


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of a checkpoint of this configuration, by its Hugging Face name."""
    hidden = config.hidden_size
    specs = [
        TensorSpec("model.embed_tokens.weight", (config.vocab_size, hidden)),
        TensorSpec("model.norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", (config.vocab_size, hidden)))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        specs += [TensorSpec(f"{prefix}.{name}", shape) for name, shape in layer_tensors(config)]
    return specs


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Weights:
    """Read, check, convert and fuse. `progress(bytes_done, bytes_total)` is called after each fused tensor.

    Raises ModelError for files or tensors that are missing, damaged, or of a wrong shape or kind."""
    checkpoint = Checkpoint(model_dir)
    specs = tensor_specs(config)
    total = checkpoint.check(specs)
    _refuse_unknown(checkpoint, config, specs)
    reader = TensorReader(checkpoint, {spec.name: spec for spec in specs}, dtype, device, total, progress)
    embedding = reader.fused("model.embed_tokens.weight")
    lm_head = Linear(embedding if config.tie_word_embeddings else reader.fused("lm_head.weight"), None)
    lm_head.pack()
    return Weights(
        embedding=embedding,
        layers=tuple(read_layer(reader, f"model.layers.{layer}", config) for layer in range(config.num_layers)),
        norm=reader.fused("model.norm.weight"),
        lm_head=lm_head,
    )


def fingerprint(model_dir: Path, config: ModelConfig | None = None) -> str:
    """32 hexadecimal digits that are equal for equal models, on every host and however the files are split: XXH3-128
    over the checked configuration and every tensor's name, dtype, shape and bytes. All bytes are read, at several GB/s
    from the page cache, else as fast as the disk gives them. `config`: as read already, for a drafter's head. Raises
    ModelError as loading does."""
    digest = xxhash.xxh3_128(json.dumps(asdict(config or ModelConfig.from_dir(model_dir)), sort_keys=True).encode())
    tensors = {name: value for path in safetensors_files(model_dir) for name, value in tensor_digests(path).items()}
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


@dataclass(slots=True)
class TensorReader:
    """Reads tensors that `checkpoint` was checked for, counting bytes for a progress line."""

    checkpoint: Checkpoint
    specs: dict[str, TensorSpec]
    dtype: torch.dtype
    device: torch.device
    bytes_total: int
    progress: Progress | None
    bytes_done: int = 0

    def fused(self, *names: str) -> torch.Tensor:
        """The named tensors, one below the other, in memory of their own."""
        shapes = [self.specs[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, out.split(rows), strict=True):
            tensor = self.checkpoint.read(name)
            part.copy_(tensor)
            self.bytes_done += tensor.nbytes
        if self.progress is not None:
            self.progress(self.bytes_done, self.bytes_total)
        return out

    def linear(self, prefix: str, *parts: str, bias: bool) -> Linear:
        weight = self.fused(*(f"{prefix}.{part}.weight" for part in parts))
        linear = Linear(weight, self.fused(*(f"{prefix}.{part}.bias" for part in parts)) if bias else None)
        linear.pack()  # at once: a plain and a packed copy never exist of more than one layer
        return linear


def read_layer(
    reader: TensorReader, prefix: str, config: ModelConfig, attention_norm: torch.Tensor | None = None
) -> LayerWeights:
    """One layer by its names; `attention_norm` stands in where a drafter's layer has none."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        attention_norm=reader.fused(f"{prefix}.input_layernorm.weight") if attention_norm is None else attention_norm,
        qkv=reader.linear(attention, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias),
        q_norm=reader.fused(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=reader.fused(f"{attention}.k_norm.weight") if config.qk_norm else None,
        attention_out=reader.linear(attention, "o_proj", bias=config.attention_bias),
        mlp_norm=reader.fused(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=reader.linear(mlp, "gate_proj", "up_proj", bias=config.mlp_bias),
        down=reader.linear(mlp, "down_proj", bias=config.mlp_bias),
        attention_site=_read_site(reader, f"{prefix}.attn_hc") if config.hc_mult > 1 else None,
        mlp_site=_read_site(reader, f"{prefix}.ffn_hc") if config.hc_mult > 1 else None,
    )


def _read_site(reader: TensorReader, prefix: str) -> StreamSite:
    return StreamSite(*(reader.fused(f"{prefix}.{name}") for name in ("read", "write", "mix")))


def layer_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name within the layer, shape) of one layer's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    linears = (
        ("self_attn.q_proj", config.q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, config.q_size, config.attention_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, out_size, in_size, has_bias in linears:
        yield f"{name}.weight", (out_size, in_size)
        if has_bias:
            yield f"{name}.bias", (out_size,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    if config.hc_mult > 1:
        for site in ("attn_hc", "ffn_hc"):
            yield f"{site}.read", (config.hc_mult,)
            yield f"{site}.write", (config.hc_mult,)
            yield f"{site}.mix", (config.hc_mult, config.hc_mult)


def _refuse_unknown(checkpoint: Checkpoint, config: ModelConfig, specs: list[TensorSpec]) -> None:
    """A tensor inside our layers that we would not use means that our output would be wrong."""
    layers = tuple(f"model.layers.{layer}." for layer in range(config.num_layers))
    unknown = checkpoint.names - {spec.name for spec in specs}
    unknown = {name for name in unknown if name.startswith(layers) and not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise ModelError(
            f"{checkpoint.model_dir} has tensors that {config.architecture} does not use "
            f"({', '.join(sorted(unknown)[:3])}); is config.json that of another model?"
        )
