"""The layers of the demo drafters in plain torch: attention in three forms, decoder layers, hyper-connections.

Tensor names are those of docs/drafter_checkpoints.md. All sequences are [batch, seq_len, size]; nothing here keeps KV
in pages. Training unrolls a recurrent drafter: it drafts several steps from every row at once. The row r from which a
draft starts is its *anchor*, and step s of that draft is at position r + s. The step attends to the rows up to r, as
step 0 computed them, and to the steps 1..s of its own anchor (EAGLE-3's training-time test).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .model import RMS_NORM_EPS

KeyValue = tuple[Tensor, Tensor]  # each [batch, num_kv_heads, seq_len, head_dim], keys already rotated


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one decoder layer; rope_theta is the base of the rotary wave lengths."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0


class Attention(nn.Module):
    """Causal attention; `input_size` is the width that q, k and v read (EAGLE-3 reads two states side by side)."""

    def __init__(self, sizes: LayerSizes, input_size: int | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        width = input_size or sizes.hidden_size
        self.q_proj = nn.Linear(width, sizes.num_heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(width, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(width, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, steps: list[KeyValue] | None = None) -> Tensor:
        """Attend over x [batch, seq_len, input_size] itself, or, when `steps` holds earlier steps, as an unrolled step.

        positions [seq_len] int64. This step's keys and values are appended to `steps`."""
        q = rotate(_heads(self.q_proj(x), self.sizes), positions, self.sizes)
        k = rotate(_heads(self.k_proj(x), self.sizes), positions, self.sizes)
        v = _heads(self.v_proj(x), self.sizes).to(k.dtype)
        if steps:
            out = _attend_unrolled(q, [*steps, (k, v)])
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if steps is not None:
            steps.append((k, v))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class QueryAttention(nn.Module):
    """Attention with queries only: row r attends to the rows up to r of the target's keys and values."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, kv: KeyValue) -> Tensor:
        """x [batch, num_rows, hidden_size]: the first num_rows rows, or, when num_rows is 1, the last row of `kv`."""
        q = rotate(_heads(self.q_proj(x), self.sizes), positions, self.sizes)
        num_rows = q.shape[2]
        k, v = kv if num_rows == 1 else (kv[0][:, :, :num_rows], kv[1][:, :, :num_rows])
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=num_rows > 1, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer; EAGLE's first layer has no norm at its input."""

    def __init__(self, sizes: LayerSizes, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(sizes.hidden_size) if has_input_norm else nn.Identity()
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = rms_norm(sizes.hidden_size)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, positions: Tensor, steps: list[KeyValue] | None = None) -> Tensor:
        """[batch, seq_len, hidden_size] to the same; `steps` as in Attention."""
        x = x + self.self_attn(self.input_layernorm(x), positions, steps)
        return x + self.mlp(self.post_attention_layernorm(x))


class QueryLayer(nn.Module):
    """A pre-norm Llama layer whose attention is a QueryAttention."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(sizes.hidden_size)
        self.self_attn = QueryAttention(sizes)
        self.post_attention_layernorm = rms_norm(sizes.hidden_size)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, positions: Tensor, kv: KeyValue) -> Tensor:
        """[batch, num_rows, hidden_size] to the same; `kv` as in QueryAttention."""
        x = x + self.self_attn(self.input_layernorm(x), positions, kv)
        return x + self.mlp(self.post_attention_layernorm(x))


class HyperConnection(nn.Module):
    """Static hyper-connection (Zhu et al. 2024, arXiv 2409.19606) of one branch to the residual streams."""

    def __init__(self, num_streams: int, site: int) -> None:
        super().__init__()
        self.read = nn.Parameter(F.one_hot(torch.tensor(site % num_streams), num_streams).float())  # [num_streams]
        self.write = nn.Parameter(torch.ones(num_streams))  # [num_streams]
        self.mix = nn.Parameter(torch.eye(num_streams))  # [from, to]

    def collapse(self, streams: Tensor) -> Tensor:
        """The branch's input: [..., num_streams, hidden_size] to [..., hidden_size]."""
        return torch.einsum("...sh,s->...h", streams, self.read.to(streams.dtype))

    def expand(self, streams: Tensor, y: Tensor) -> Tensor:
        """The new streams [..., num_streams, hidden_size], from the old and the branch's output [..., hidden_size]."""
        mixed = torch.einsum("...sh,st->...th", streams, self.mix.to(streams.dtype))
        return mixed + self.write.to(streams.dtype)[:, None] * y.to(streams.dtype)[..., None, :]


class HyperLayer(DecoderLayer):
    """A Llama layer over residual streams [batch, seq_len, num_streams, hidden_size]."""

    def __init__(self, sizes: LayerSizes, num_streams: int, index: int) -> None:
        super().__init__(sizes)
        self.attn_hc = HyperConnection(num_streams, 2 * index)
        self.ffn_hc = HyperConnection(num_streams, 2 * index + 1)

    def forward(self, x: Tensor, positions: Tensor, steps: list[KeyValue] | None = None) -> Tensor:
        """Streams to streams; `steps` as in Attention."""
        y = self.self_attn(self.input_layernorm(self.attn_hc.collapse(x)), positions, steps)
        x = self.attn_hc.expand(x, y)
        y = self.mlp(self.post_attention_layernorm(self.ffn_hc.collapse(x)))
        return self.ffn_hc.expand(x, y)


def rms_norm(size: int) -> nn.RMSNorm:
    """RMSNorm with the demo models' epsilon."""
    return nn.RMSNorm(size, eps=RMS_NORM_EPS)


def initialize(model: nn.Module) -> None:
    """Matrices like the demo model's: normal, branches' outputs zero, so that each block starts as the identity."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2 and not name.endswith(".mix"):
            std = 0.02 if "embed" in name else 0.5 * parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std)


def rotate(heads: Tensor, positions: Tensor, sizes: LayerSizes) -> Tensor:
    """Rotary positions in halves: heads [batch, num_heads, seq_len, head_dim], positions [seq_len] int64."""
    exponents = -torch.arange(0, sizes.head_dim, 2, device=heads.device).float() / sizes.head_dim
    angles = torch.outer(positions.float(), sizes.rope_theta**exponents).repeat(1, 2)  # [seq_len, head_dim]
    first, second = heads.chunk(2, dim=-1)
    return (heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()).to(heads.dtype)


def _heads(x: Tensor, sizes: LayerSizes) -> Tensor:
    """[batch, seq_len, num_heads x head_dim] to [batch, num_heads, seq_len, head_dim]."""
    return x.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)


def _attend_unrolled(q: Tensor, steps: list[KeyValue]) -> Tensor:
    """Each anchor's query over the rows of step 0 up to the anchor, and over the anchor's own later steps."""
    groups = q.shape[1] // steps[0][0].shape[1]
    keys = [k.repeat_interleave(groups, dim=1) for k, _ in steps]
    values = [v.repeat_interleave(groups, dim=1) for _, v in steps]
    scale, seq_len = q.shape[-1] ** -0.5, q.shape[2]
    is_future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
    rows = (q * scale @ keys[0].mT).masked_fill(is_future, float("-inf"))  # [batch, num_heads, anchor, row]
    own = torch.stack([(q * scale * k).sum(-1) for k in keys[1:]], dim=-1)  # [batch, num_heads, anchor, step]
    weights = torch.cat((rows, own.to(rows.dtype)), dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :seq_len] @ values[0]
    for step, value in enumerate(values[1:]):
        out = out + weights[..., seq_len + step, None] * value
    return out
