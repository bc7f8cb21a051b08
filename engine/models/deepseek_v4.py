"""DeepSeek-V4: residual streams with weights of each token, attention to windows and entries, and mixtures of experts.

s_0 .. s_(S-1) = embedding[input_ids], each;  the layers are those of layers/stream_decoder.py
handoff = [s_0 ; .. ; s_(S-1)];   hidden = norm(collapse(s));   logits = lm_head(hidden)

The prediction layer (MTP) reads and returns all streams:

s_a = e_proj(enorm(E(t))) + h_proj(hnorm(h_a)) for every stream a;  one layer with a window alone;  g = [s_0 ; ..]
logits = target's lm_head(norm(collapse(s)))

transformers writes some tensors under other names than the published files have (`_name`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.products.norm import Norm, rms_norm
from ...kernels.streams.streams import PendingStreams, StreamRules, StreamWeights, end_streams, written
from ...metadata.errors import ModelError
from ..attention.attention import RotaryEmbedding, begin_attention, inverse_frequencies
from ..attention.compressed import CompressedAttention, EntryPool, WindowHeads
from ..attention.context import AttentionContext
from ..checkpoint.checkpoint import TensorSpec
from ..checkpoint.model_config import ENTRY_POOLS, INDEX, CompressedConfig, ModelConfig
from ..checkpoint.weights import Weights
from ..layers.compressed_attention import Compressor, EntryIndexer, GroupedOut, WindowedAttention
from ..layers.stream_decoder import StreamLayer
from ..products.base import HEADS_IN, HEADS_OUT, VOCAB
from ..products.groups import read_groups
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools
from .decoder import DecoderModel, Embedding, LmHead, TargetStates
from .head_file import HeadFile
from .mixtures import MixtureNames, read_mixture
from .mtp import load_layers
from .target_ends import TargetEnds
from .tensors import HeadTensors

_NAMES = MixtureNames(gate="w1", up="w3", down="w2", bias="gate.bias")


@dataclass(frozen=True, slots=True, eq=False)
class StreamStack:
    """Layers over residual streams. Auxiliary states are collapsed as the last one is."""

    layers: tuple[StreamLayer, ...]
    head: StreamWeights
    norm: Norm  # [hidden_size]
    hc_mult: int
    hands_over_collapsed: bool
    rules: StreamRules

    def __call__(
        self, input_ids: Tensor, embedded: Tensor, context: AttentionContext, aux_layers: Sequence[int]
    ) -> TargetStates:
        assert isinstance(context, CompressedAttention), context
        pending = PendingStreams(embedded.unsqueeze(1).expand(-1, self.hc_mult, -1))
        aux: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                streams, aux[index] = end_streams(pending, self.head, self.rules)
                pending = PendingStreams(streams)
            pending = layer(pending, input_ids, context)
        streams, collapsed = end_streams(pending, self.head, self.rules)
        aux[len(self.layers)] = collapsed
        final = rms_norm(collapsed, *self.norm)
        handoff = final if self.hands_over_collapsed else streams.flatten(1)
        return TargetStates(final, handoff, [aux[index] for index in aux_layers])


def read_deepseek_v4(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of DeepSeek-V4 and build its layers."""
    vocab_size, size = config.vocab_size, config.hidden_size
    embedding = Embedding(weights.tensor(_name(weights, "embed.weight", "model.embed_tokens.weight"), vocab_size, size))
    layers = _name(weights, "layers.0.attn_norm.weight", "model.layers.0.attn_norm.weight").removesuffix(
        "0.attn_norm.weight"
    )
    head = weights.linear("head", vocab_size, size, bias=False, split=VOCAB)
    stack = StreamStack(
        tuple(_read_layer(config, weights, f"{layers}{index}", index) for index in range(config.num_layers)),
        _read_site(weights, config, ("hc_head", "model.hc_head.hc"), config.hc_mult, num_scales=1),
        _read_norm(config, weights, size, "norm.weight", "model.norm.weight"),
        config.hc_mult,
        config.hands_over_collapsed,
        _rules(config),
    )
    return DecoderModel(weights.own(config), embedding, stack, LmHead(head, weights.ranks.vocab(vocab_size)))


def _name(weights: Weights, *spellings: str) -> str:
    """Return the name that the checkpoint has for a tensor; the first one if it has none."""
    return next((each for each in spellings if weights.has(each)), spellings[0])


def _read_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> StreamLayer:
    """Read one layer, which has keys in layer `index` of the pool."""
    size, num_shares = config.hidden_size, (2 + config.hc_mult) * config.hc_mult
    return StreamLayer(
        _read_site(weights, config, (f"{prefix}.hc_attn",), num_shares, num_scales=3),
        _read_norm(config, weights, size, f"{prefix}.attn_norm.weight"),
        _read_attention(config, weights, f"{prefix}.attn", index),
        _read_site(weights, config, (f"{prefix}.hc_ffn",), num_shares, num_scales=3),
        _read_norm(config, weights, size, f"{prefix}.ffn_norm.weight"),
        read_mixture(config, weights, f"{prefix}.ffn", _NAMES, _read_table(config, weights, prefix, index)),
        _rules(config),
    )


def _rules(config: ModelConfig) -> StreamRules:
    compressed = _compressed(config)
    return StreamRules(compressed.num_sinkhorn_steps, compressed.hc_eps, config.rms_norm_eps)


def _compressed(config: ModelConfig) -> CompressedConfig:
    assert config.compressed is not None, config
    return config.compressed


def _read_site(
    weights: Weights, config: ModelConfig, prefixes: tuple[str, ...], num_shares: int, *, num_scales: int
) -> StreamWeights:
    def read(name: str, *shape: int) -> Tensor:
        return weights.tensor(_name(weights, *(f"{each}_{name}" for each in prefixes)), *shape, dtype=torch.float32)

    fn = read("fn", num_shares, config.hc_mult * config.hidden_size)
    return StreamWeights(fn, read("base", num_shares), read("scale", num_scales))


def _read_norm(config: ModelConfig, weights: Weights, size: int, *names: str) -> Norm:
    return Norm(weights.tensor(_name(weights, *names), size, dtype=torch.float32), config.rms_norm_eps)


def _read_table(config: ModelConfig, weights: Weights, prefix: str, index: int) -> Tensor | None:
    """Read the experts of each token id, [vocab_size, num_active] int64; None: a router chooses in this layer. Raises
    ModelError for an expert that does not exist, which the first token with it would hit."""
    experts = config.experts
    assert experts is not None, config
    if index not in experts.hash_layers:
        return None
    spec = TensorSpec(f"{prefix}.ffn.gate.tid2eid", (config.vocab_size, experts.num_active), ("I64", "I32"))
    [stored] = weights.stored([spec])
    wrong = [] if stored.is_meta else stored[(stored < 0) | (stored >= experts.num_experts)].tolist()
    if wrong:
        raise ModelError(
            f"{spec.name} names expert {wrong[0]}, but the layer has {experts.num_experts} experts; copy the"
            " checkpoint again"
        )
    return stored.to(weights.device, torch.int64, copy=True)


def _read_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> WindowedAttention:
    compressed, size, head_dim = _compressed(config), config.hidden_size, config.head_dim
    kind, rank, width = compressed.kinds[index], compressed.query_rank, config.q_size
    rope = config.rope if kind == "window" else compressed.rope
    frequencies = inverse_frequencies(rope, compressed.rope_dim).to(weights.device)
    sinks = weights.tensor(f"{prefix}.attn_sink", config.num_heads, dtype=torch.float32)
    shard = weights.ranks.shard(HEADS_OUT)
    heads = WindowHeads(
        index,
        compressed.window,
        config.rms_norm_eps,
        _read_norm(config, weights, head_dim, f"{prefix}.kv_norm.weight", f"{prefix}.norm.weight"),
        frequencies,
        sinks if shard is None else shard.take(sinks, 0).clone(),
    )
    return WindowedAttention(
        weights.fused({f"{prefix}.wq_a": rank, f"{prefix}.wkv": head_dim}, size, bias=False),
        _read_norm(config, weights, rank, f"{prefix}.q_norm.weight"),
        weights.linear(f"{prefix}.wq_b", width, rank, bias=False, split=HEADS_OUT),
        heads,
        _read_out(config, weights, prefix),
        None
        if kind == "window"
        else _read_compressor(config, weights, f"{prefix}.compressor", kind, index, head_dim, frequencies),
        _read_indexer(config, weights, f"{prefix}.indexer", index, frequencies) if kind == "sparse" else None,
    )


def _read_out(config: ModelConfig, weights: Weights, prefix: str) -> GroupedOut:
    """Read the output projection."""
    compressed, num = _compressed(config), _compressed(config).num_groups * _compressed(config).group_rank
    source = weights.source(
        {f"{prefix}.wo_a": num}, config.q_size // compressed.num_groups, bias=False, split=HEADS_OUT
    )
    groups = read_groups(source, compressed.group_rank)
    return GroupedOut(groups, weights.linear(f"{prefix}.wo_b", config.hidden_size, num, bias=False, split=HEADS_IN))


def _read_compressor(
    config: ModelConfig, weights: Weights, prefix: str, kind: str, layer: int, width: int, frequencies: Tensor
) -> Compressor:
    """Read what makes the entries of `width` numbers of a layer. `kind`: the pools that have them."""
    compressed = _compressed(config)
    columns = width if kind == "heavy" else 2 * width  # windows of the others overlap
    rate = compressed.heavy_rate if kind == "heavy" else compressed.sparse_rate
    names = ENTRY_POOLS[kind]
    place = config.place(names.entries, layer)
    assert place is not None, (names, layer)
    kv_gate = weights.fused({f"{prefix}.wkv": columns, f"{prefix}.wgate": columns}, config.hidden_size, bias=False)
    bias = weights.tensor(f"{prefix}.ape", rate, columns, dtype=torch.float32)
    norm = _read_norm(config, weights, width, f"{prefix}.norm.weight")
    return Compressor(kv_gate, EntryPool(names.inputs, names.entries, place, bias, norm, frequencies))


def _read_indexer(config: ModelConfig, weights: Weights, prefix: str, layer: int, frequencies: Tensor) -> EntryIndexer:
    index, rank = config.index, _compressed(config).query_rank
    assert index is not None, config
    of_heads = weights.tensor(f"{prefix}.weights_proj.weight", index.num_heads, config.hidden_size, dtype=torch.float32)
    return EntryIndexer(
        index,
        _read_compressor(config, weights, f"{prefix}.compressor", INDEX, layer, index.head_dim, frequencies),
        weights.linear(f"{prefix}.wq_b", index.num_heads * index.head_dim, rank, bias=False),
        of_heads * (index.num_heads * index.head_dim) ** -0.5,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StreamMtpHead:
    """The prediction layer, a DraftHead (models/heads.py). Extend and recurrent states are both [num_tokens, hc_mult *
    hidden_size]."""

    config: ModelConfig  # of one layer
    rotary: RotaryEmbedding
    target: TargetEnds
    embedding_norm: Norm  # [hidden_size]
    hidden_norm: Norm  # [hidden_size], for each stream
    embedding_projection: Linear  # hidden_size -> hidden_size
    hidden_projection: Linear  # hidden_size -> hidden_size, for each stream
    layer: StreamLayer
    head: StreamWeights
    final_norm: Norm  # [hidden_size]
    logit_ids: None = None  # logits are of all tokens

    def forward(self, batch: ForwardBatch, pools: ModelPools, hidden: Tensor, *, is_extend: bool = True) -> Tensor:
        """States come back, and go in, in the same form in both phases."""
        del is_extend
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        assert isinstance(context, CompressedAttention), context
        embedded = rms_norm(self.target.embed(batch.input_ids), *self.embedding_norm)
        normed = rms_norm(hidden.reshape(-1, self.config.hidden_size), *self.hidden_norm)
        streams = self._streams(self.hidden_projection(normed).view(hidden.shape))
        streams = streams + self.embedding_projection(embedded).unsqueeze(1)
        return written(self.layer(PendingStreams(streams), batch.input_ids, context)).flatten(1)

    def logits(self, recurrent: Tensor, lens: Lens | None = None) -> Tensor:
        """Return the target's lm_head of the collapsed streams, normed by the layer's own norm."""
        _, collapsed = end_streams(PendingStreams(self._streams(recurrent)), self.head, self.layer.rules)
        return self.target.logits(rms_norm(collapsed, *self.final_norm), lens)

    def _streams(self, wide: Tensor) -> Tensor:
        return wide.unflatten(1, (self.config.hc_mult, self.config.hidden_size))


def load_stream_mtp(
    file: HeadFile, prefixes: tuple[str, ...], target: TargetEnds, ranks: Ranks = ONE_RANK
) -> tuple[StreamMtpHead, ...]:
    """Read the layers as `load_layers` (mtp.py) does."""
    return load_layers(file, prefixes, target, ranks, _load_mtp_layer, "emb.tok_emb.weight", "head.weight")


def _load_mtp_layer(
    source: HeadTensors, prefix: str, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds
) -> StreamMtpHead:
    size = config.hidden_size
    return StreamMtpHead(
        source.own(config),
        rotary,
        target,
        _read_norm(config, source, size, f"{prefix}.enorm.weight"),
        _read_norm(config, source, size, f"{prefix}.hnorm.weight"),
        source.linear(f"{prefix}.e_proj", size, size),
        source.linear(f"{prefix}.h_proj", size, size),
        _read_layer(config, source, prefix, 0),
        _read_site(source, config, (f"{prefix}.hc_head",), config.hc_mult, num_scales=1),
        _read_norm(config, source, size, f"{prefix}.norm.weight"),
    )
