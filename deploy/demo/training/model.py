"""The demo model for training: the Llama architecture in plain torch, without a KV cache.

Parameters have the names of Hugging Face's LlamaForCausalLM, so `state_dict` is the checkpoint. The input embedding is
also the output projection. Architecture: Touvron et al. 2023 (RMSNorm, SwiGLU, rotary positions in halves).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .corpus import END_OF_TEXT, END_OF_TURN, PAD, SPECIAL_TOKENS

RMS_NORM_EPS = 1e-5
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model; counts, except rope_theta (the base of the rotary wave lengths)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rope_theta: float = 10000.0


class Llama(nn.Module):
    """Causal language model; `dropout` is the share of each branch's output zeroed in training."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config, dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = INITIALIZER_RANGE if "embed" in name else 0.5 * parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # each block starts as the identity

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq_len, vocab_size] for input_ids [batch, seq_len] int64."""
        assert input_ids.ndim == 2 and input_ids.shape[1] <= self.config.context_len, input_ids.shape
        return F.linear(self.model(input_ids), self.model.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of each token after the first; windows [batch, seq_len + 1] int64."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class _Trunk(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, dropout) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = _rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)  # [context_len, head_dim] float32
        self.register_buffer("sin", sin, persistent=False)  # [context_len, head_dim] float32

    def forward(self, input_ids: Tensor) -> Tensor:
        seq_len = input_ids.shape[1]
        hidden_states = self.embed_tokens(input_ids)  # [batch, seq_len, hidden_size]
        for layer in self.layers:
            hidden_states = layer(hidden_states, self.cos[:seq_len], self.sin[:seq_len])
        return self.norm(hidden_states)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=RMS_NORM_EPS)
        self.mlp = _Mlp(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden_states = hidden_states + self.dropout(self.self_attn(self.input_layernorm(hidden_states), cos, sin))
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, _ = hidden_states.shape
        q, k, v = (
            projection(hidden_states).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [batch, num_heads or num_kv_heads, seq_len, head_dim]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.num_groups, dim=1), v.repeat_interleave(self.num_groups, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, seq_len, -1))


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def _rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.context_len).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in halves; the product is formed in float32 and returned in the dtype of `heads`."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def save_model(model: Llama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16) in Hugging Face form."""
    config = model.config
    eos_ids = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)]
    ids: dict[str, Any] = {
        "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "eos_token_id": eos_ids,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.context_len,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path) -> Llama:
    """The model that `save_model` wrote, with float32 parameters that hold the bfloat16 values."""
    described = json.loads((folder / "config.json").read_text())
    config = ModelConfig(
        vocab_size=described["vocab_size"],
        hidden_size=described["hidden_size"],
        intermediate_size=described["intermediate_size"],
        num_layers=described["num_hidden_layers"],
        num_heads=described["num_attention_heads"],
        num_kv_heads=described["num_key_value_heads"],
        head_dim=described["head_dim"],
        context_len=described["max_position_embeddings"],
        rope_theta=described["rope_theta"],
    )
    model = Llama(config)
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model.eval()
