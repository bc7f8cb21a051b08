"""The sizes and settings of one decoder-only model, as read from its config.json (read_config.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...kernels.formats import ALIGNMENT, SCALE_BYTES, SwigluClamp, update_width
from ...metadata.errors import ConfigError
from ...metadata.handoff.schema.kv_layout import pool_of
from ...metadata.wire.node_info import FurtherPool, KvPlane, PoolLayout
from ..config import KvDtype, StateDtype
from .quantization import Quantization

if TYPE_CHECKING:
    from ...metadata.handoff.schema.hidden_layout import HiddenDtype

CheckpointDtype = Literal["float32", "bfloat16", "float16"]
RopeType = Literal["default", "linear", "llama3", "yarn", "proportional"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn", "proportional")
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]  # how a router makes scores of its product
INDEX = "index"  # the further pool of index keys
DELTA_ROWS, DELTA_UPDATES, DELTA_STATES = "delta_rows", "delta_updates", "delta_states"  # pools of the delta rule
LONGEST_PAGE = 4096  # tokens
PAGE_TOKENS = 16  # of a page of models that do not ask for more
INDEX_PAGE_TOKENS = 64  # the same of models with indexers: an index key is small, and short runs of them read slowly
DELTA_BLOCK = 64  # tokens of a block of the delta rule, if pages do not divide it (`delta_block`)
WINDOW_POOL = "window"  # name of the pool of KV of layers with a window, if it is not that of the others
VALUES, WINDOW_VALUES = "values", "window_values"  # pools of values that are narrower than keys


class EntryNames(NamedTuple):
    """Names of two further pools: of entries, and of the rows that they are made of."""

    entries: str
    inputs: str


ENTRY_POOLS = {  # by the kind of layer (`CompressedConfig.kinds`), and those of its indexer
    INDEX: EntryNames(INDEX, "index_inputs"),
    "sparse": EntryNames("sparse_entries", "sparse_inputs"),
    "heavy": EntryNames("heavy_entries", "heavy_sums"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of rotary position embeddings, which engine/attention/attention.py computes. Fields that a `rope_type`
    does not use keep their defaults, so that equal embeddings compare equal."""

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn, proportional: how far the context was stretched
    original_context_len: int = 0  # llama3, yarn, query_beta: tokens of context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a frequency is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a frequency is divided by `factor`
    truncate: bool = True  # yarn: round the borders between the two to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    query_beta: float = 0.0  # every type: how much queries behind the original context grow; 0: not at all
    share: float = 1.0  # proportional: the first pairs of a head, which are rotated


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return yarn's factor for a config.json that does not name one (section 3.4 of the paper)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a model."""

    num_experts: int
    num_active: int  # experts of a token
    inner_size: int  # hidden units of an expert
    norm_topk_prob: bool  # the weights of a token's experts sum to one
    layers: tuple[int, ...]  # layers with experts; the others are dense
    scoring: Scoring = "softmax"
    has_bias: bool = False  # of scores, for the choice alone
    num_groups: int = 1  # of neighbouring experts
    num_active_groups: int = 1  # groups that the experts of a token are in
    num_ranking: int = 1  # largest scores of a group, whose sum ranks it
    scaling: float = 1.0  # of the output
    shared_size: int = 0  # hidden units for all tokens, beside the experts
    clamp: SwigluClamp | None = None  # of an expert's gate; None: it is a plain SwiGLU
    is_stacked: bool = False  # the checkpoint has the weights of all experts in one tensor
    hash_layers: tuple[int, ...] = ()  # layers whose experts follow from the token's id, by a table


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA): all heads have keys and values of one latent per token.

    Attention reads latents as they lie in pages. The single KV head of the model is a latent and, behind it, the part
    of a key that is rotated. `num_kv_heads` and `head_dim` of the model describe this head."""

    rank: int  # numbers of a latent; attention returns as many per head
    query_rank: int | None  # numbers of the latent of queries; None: queries are a product of the hidden state
    plain_dim: int  # numbers of a query that are not rotated
    rope_dim: int  # numbers of a query, and of a key, that are rotated
    value_dim: int  # numbers of a head's value
    is_interleaved: bool  # the checkpoint has numbers that are rotated together side by side; else in two halves
    scale: float  # of scores


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The indexers of a model with sparse attention (DSA, DeepSeek-V3.2): which tokens a token attends to.

    A layer with an indexer keeps a key per token, in the further pool INDEX. Its queries choose the `num_picks` tokens
    of the best scores. The layers behind it, up to the next one with an indexer, attend to the same tokens."""

    num_heads: int
    head_dim: int
    num_picks: int  # tokens that a token attends to, at most
    is_interleaved: bool  # the checkpoint has numbers that are rotated together side by side; else in two halves


Kind = Literal["window", "sparse", "heavy"]  # of a layer that sees a window: none, chosen or all entries behind it


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Attention to a window and to entries that stand for several tokens each, and the streams around it
    (DeepSeek-V4). engine/attention/compressed.py says where entries lie."""

    kinds: tuple[Kind, ...]  # by layer
    window: int  # tokens that a token sees, itself included
    sparse_rate: int  # tokens of an entry of sparse layers, whose indexers choose
    heavy_rate: int  # the same of heavy layers
    rope: RopeConfig  # of sparse and heavy layers; the model's own is that of the others
    rope_dim: int  # numbers of a head that are rotated, the last ones
    query_rank: int  # numbers of the latent of queries
    num_groups: int  # of heads, each with a product of its own in the output projection
    group_rank: int  # numbers that each of these gives
    num_sinkhorn_steps: int
    hc_eps: float

    @property
    def page_unit(self) -> int:
        """Tokens whose multiple a page must hold, so that no entry lies in two pages."""
        rates = {"window": 1, "sparse": self.sparse_rate, "heavy": self.heavy_rate}
        return math.lcm(*(rates[kind] for kind in self.kinds))


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Parts that only Gemma 4 has."""

    num_shared_layers: int  # the last layers, which read the KV of the last one of their kind before
    has_wide_shared_mlp: bool  # their feed-forward layers have twice the hidden units
    values_are_keys: bool  # of layers without a window: values are keys before their norm and rotation
    input_size: int  # numbers that each layer gets for each token, beside the residual stream; 0: none
    input_vocab_size: int  # of the table of these numbers


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """The layers with a window, if they differ from those without one."""

    rope: RopeConfig
    num_kv_heads: int
    head_dim: int
    has_pool: bool  # of its own, because its heads are others: in the whole model, whatever a rank has of them


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The layers with a gated delta rule in place of attention (kernels/state/delta_rule.py)."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int  # each key head belongs to as many of them, which are neighbours
    key_dim: int  # of a head
    value_dim: int
    num_taps: int  # rows that a convolution reads
    decay_dim: int = 1  # numbers by which a state decays: 1, or `key_dim`
    longest_path: int = 0  # tokens that a tree of drafts may bring at once; 0: drafts are chains
    state_dtype: StateDtype = "float32"  # of states in pages

    @property
    def num_shared(self) -> int:
        """Number of value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Numbers of a key head and its value heads that are convolved."""
        return 2 * self.key_dim + self.num_shared * self.value_dim

    def products(self, hidden_size: int) -> int:
        """Return the number of weights in the matrices of one layer. If states decay by channel, gates and decays have
        low ranks of `key_dim`."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        if self.decay_dim == 1:
            gates_and_decays = hidden_size * (values + self.num_value_heads)
        else:
            gates_and_decays = self.key_dim * (2 * hidden_size + keys + values)
        return hidden_size * (2 * keys + 2 * values + self.num_value_heads) + gates_and_decays

    @property
    def further(self) -> tuple[Further, ...]:
        """The pools of these layers: a row of inputs and one of updates per token, and a state per block of tokens."""
        heads = self.num_key_heads
        updates = update_width(self.key_dim, self.value_dim, self.num_shared, self.decay_dim)
        state = self.num_shared * self.value_dim * self.key_dim
        width = self.num_channels + self.num_shared * (1 + self.decay_dim)
        pools = (
            Further(DELTA_ROWS, self.layers, width, heads),
            Further(DELTA_UPDATES, self.layers, updates, heads, "float32"),
            Further(DELTA_STATES, self.layers, state, heads, self.state_dtype, per_block=True),
        )
        reach = {"num_read": self.num_taps - 1, "longest_path": self.longest_path}
        return tuple(replace(each, is_tail=True, **reach) for each in pools)


def delta_block(page_size: int) -> int:
    """Return the number of tokens of a block of the delta rule: at most 64, and whole blocks in a page. So a page that
    is full has all states that stand in it, and nobody writes it any more."""
    return math.gcd(page_size, DELTA_BLOCK)


@dataclass(frozen=True, slots=True)
class Further:
    """A pool that a model has beside that of its KV, with the same page numbers. engine/attention/pool_rows.py says how
    layers reach it."""

    name: str
    layers: tuple[int, ...]  # of the model, that store something in it, by their place in the pool
    width: int  # numbers per token of a head, or per block of tokens
    num_heads: int = 1  # if there are fewer than ranks, several ranks hold the same head
    dtype: Literal["float32", "bfloat16", "float16", "int64"] | None = None  # None: of the model's attention
    per_block: bool = False  # the rows of a block have `width` numbers together
    is_tail: bool = False  # layers read their own block, the block before it, and `num_read` rows before their own one
    num_read: int = 0  # rows that layers read back, their own included, if not by blocks; 0: all
    longest_block: int = DELTA_BLOCK  # tokens of a block, if pages do not divide it
    longest_path: int = 0  # of a tail: tokens whose blocks layers read beside, since no forward wrote their states
    num_kept: int = 0  # of `num_read` and the rows of a round: a page has so many rows, written in turn; 0: all

    def block(self, page_size: int) -> int:
        """Return the number of tokens of a block: whole blocks lie in a page. So a page that is full has all states
        that stand in it, and nobody writes it any more."""
        return math.gcd(page_size, self.longest_block)

    def row_width(self, page_size: int) -> int:
        """Return the numbers of one head in the row of a token."""
        return -(-self.width // self.block(page_size)) if self.per_block else self.width

    def window(self, page_size: int) -> int:
        """Return how many positions layers read back, their own included; 0: all."""
        if not self.is_tail:
            return self.num_read
        block = self.block(page_size)
        return block + -(-self.longest_path // block) * block + max(block, self.num_read)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool  # q, k and v projections have biases
    attention_bias: bool  # the attention's output projection has one
    mlp_bias: bool
    qk_norm: bool  # q and k are normalised per head before rotation
    sliding_window: tuple[int | None, ...]  # per layer: a query sees this many positions, itself included; None: all
    checkpoint_dtype: CheckpointDtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hc_mult: int = 1  # residual streams; 1 where config.json says none, null, 0 or 1
    hands_over_collapsed: bool = False  # the family has streams and hands the collapsed state to drafters
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None  # of the linear layers
    rotary_dim: int | None = None  # the first numbers of a head, which are rotated; None: all
    has_wide_norms: bool = False  # q and k are normalised over all heads together before rotation
    latent: LatentConfig | None = None  # None: heads have keys and values of their own
    has_sinks: bool = False  # each query head has a score without a value
    index: IndexConfig | None = None  # None: a token attends to all tokens before it
    norm_offset: float | None = None  # norms multiply in float32, by weight + this; None: in the model's dtype
    score_scale: float | None = None  # of scores, which the weights of the queries' norm hold; None: by head_dim
    window: WindowConfig | None = None  # None: layers with a window are as the others
    gemma4: Gemma4Config | None = None
    softcap: float | None = None  # logits are cap * tanh(logits / cap)
    has_tail: bool = False  # the pool of layers with a window has tail pages
    tail_rows: int = 0  # of a draft beside a target with tail pages: all its KV lies there, and so many rows are read
    further: tuple[Further, ...] = ()  # pools beside that of KV
    compressed: CompressedConfig | None = None  # None: attention sees tokens alone
    delta: DeltaConfig | None = None  # None: all layers have attention
    has_output_gate: bool = False  # the projection of queries also gives a gate of what a head attends to
    value_scale: float = 1.0  # by which values are multiplied
    predicts_in_window: bool = False  # prediction layers are dense, and else as the layers with a window
    value_dim: int | None = None  # of a value in pages, if it is narrower than a key: values have a pool of their own

    @property
    def spec_hidden_size(self) -> int:
        """Width of all residual streams side by side; with one stream, `hidden_size`."""
        from ...metadata.handoff.schema.hidden_layout import (
            spec_hidden_size,  # imports torch, which a configuration does not
        )

        return spec_hidden_size(self.hidden_size, self.hc_mult)

    @property
    def handoff_hidden_size(self) -> int:
        """Width of the state that the target hands to a drafter: all streams, or the state that they collapse to."""
        return self.hidden_size if self.hands_over_collapsed else self.spec_hidden_size

    @property
    def refuses_trees(self) -> str | None:
        """The reason, in words, why drafts must be chains; None if they may be trees."""
        if self.compressed is not None:
            return "makes entries by position, and tokens of a tree share positions"
        if self.delta is not None and self.delta.state_dtype != "float32":
            return f"keeps states in {self.delta.state_dtype}, and paths of a tree pass edges before states are rounded"
        return None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values are as wide)."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotated_size(self) -> int:
        """Width of the end of a head that rotary embeddings are for: a whole head, or the end of a latent's."""
        if self.compressed is not None:
            return self.compressed.rope_dim
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores of attention."""
        return self.head_dim**-0.5 if self.latent is None else self.latent.scale

    @property
    def has_cut_heads(self) -> bool:
        """Whether heads are in FP8, with scales of blocks of 128 rows, and cut the blocks or have several, and are
        rotated in part. Rows of a head that are put into another order would leave their block."""
        is_in_blocks = self.quantization is not None and self.quantization.weight_scale == "blocks"
        return is_in_blocks and self.rotary_dim is not None and 128 % self.head_dim > 0

    @property
    def num_shared_layers(self) -> int:
        """Number of the last layers, which read the KV of the last one of their kind before."""
        return 0 if self.gemma4 is None else self.gemma4.num_shared_layers

    @property
    def query_factor(self) -> float:
        """Factor of queries that makes `softmax_scale` that of the scores."""
        return 1.0 if self.score_scale is None else self.score_scale / self.softmax_scale

    @property
    def has_window_pool(self) -> bool:
        """Whether the KV of layers with a window has a pool of its own."""
        return self.window is not None and self.window.has_pool

    @property
    def of_attention(self) -> ModelConfig:
        """The configuration of the layers that have KV. Layers with a delta rule are left out."""
        if self.delta is None:
            return self
        num_layers = len(self._stored(is_windowed=False))
        return replace(self, num_layers=num_layers, sliding_window=(None,) * num_layers, delta=None)

    @property
    def tail_window(self) -> int:
        """Positions that the layers with tail pages see, their own included; 0: there are no such layers."""
        return max(filter(None, self.sliding_window), default=0) if self.has_tail else 0

    def page_size(self, asked: int | None) -> int:
        """Return the number of tokens of a page: `asked` by the operator, or what suits the model. Raises ConfigError
        if pages of that length cannot hold the model's state."""
        unit = 1 if self.compressed is None else self.compressed.page_unit
        if asked is None:
            of_delta = PAGE_TOKENS if self.delta is None else DELTA_BLOCK
            least = max(of_delta, PAGE_TOKENS if self.index is None else INDEX_PAGE_TOKENS)
            return -(-least // unit) * unit
        if not 1 <= asked <= LONGEST_PAGE:
            raise ConfigError(f"page_size {asked} is out of range: use 1 to {LONGEST_PAGE} tokens")
        if asked % unit:
            raise ConfigError(
                f"page_size is {asked}, but {self.architecture} makes entries of {unit} tokens, which lie in one page; "
                f"use --page-size {unit} or a multiple, or leave it out"
            )
        return asked

    def with_tail(self) -> ModelConfig:
        """Return the configuration with tail pages, if some layers read back a little way, and others see all
        positions."""
        if any(each.is_tail or each.num_read for each in self.further):
            return replace(self, has_tail=True)
        is_mixed = None in self.sliding_window and set(self.sliding_window) != {None}
        if not is_mixed or self.latent is not None:
            return self
        window = self.window or WindowConfig(self.rope, self.num_kv_heads, self.head_dim, has_pool=True)
        return replace(self, window=replace(window, has_pool=True), has_tail=True)

    def beside(self, target: ModelConfig, num_ahead: int) -> ModelConfig:
        """Return the configuration of prediction layers beside `target`. If all of them have a window, their KV lies in
        the target's tail pages, if it has some. `num_ahead`: rows before the next token that they run again."""
        if None in self.sliding_window or not target.with_tail().has_tail:
            return self
        return replace(self, tail_rows=max(filter(None, self.sliding_window)) + num_ahead)

    def with_trees(self, longest_path: int) -> ModelConfig:
        """Return the configuration for trees of drafts that bring at most `longest_path` tokens at once. Layers with a
        delta rule then read back as many tokens more, in whole blocks."""
        if self.delta is None:
            return self
        delta = replace(self.delta, longest_path=longest_path)
        return replace(self, delta=delta, further=delta.further)

    def with_states(self, dtype: StateDtype) -> ModelConfig:
        """Return the configuration with recurrent states in `dtype`. Raises ConfigError if the model has none, and they
        are asked for."""
        if self.delta is None:
            if dtype != "float32":
                raise ConfigError(
                    f"state_dtype is {dtype}, but {self.architecture} has no recurrent states; leave --state-dtype out"
                )
            return self
        delta = replace(self.delta, state_dtype=dtype)
        return replace(self, delta=delta, further=delta.further)

    def by_window(self) -> tuple[ModelConfig, ModelConfig]:
        """Return the configurations by which attention computes layers that see all positions, and those with a
        window. Each has the layers of its pool."""
        window = self.window
        assert window is not None, "all layers are alike"
        sizes = [len(self._stored(is_windowed=each)) for each in (False, True)]
        plain = replace(self, window=None, gemma4=None, has_tail=False)
        unbounded = replace(plain, num_layers=sizes[0], sliding_window=(None,) * sizes[0])
        windows = (max(filter(None, self.sliding_window), default=None),) * sizes[1]
        heads = {"num_kv_heads": window.num_kv_heads, "head_dim": window.head_dim}
        return unbounded, replace(plain, num_layers=sizes[1], sliding_window=windows, rope=window.rope, **heads)

    def kv_place(self, layer: int) -> int:
        """Return the index of a layer's KV in its pool: of its own, or of that which it shares."""
        is_windowed = self.sliding_window[layer] is not None
        stored = self._stored(is_windowed=is_windowed)
        alike = [each for each in stored if (self.sliding_window[each] is not None) == is_windowed]
        return stored.index(layer if layer in stored else alike[-1])

    def _stored(self, *, is_windowed: bool) -> list[int]:
        """Return the layers that have KV of their own in the pool of such layers."""
        stored = range(self.num_layers - self.num_shared_layers)
        return [
            each
            for each in stored
            if (self.delta is None or each not in self.delta.layers)
            and (not self.has_window_pool or (self.sliding_window[each] is not None) == is_windowed)
        ]

    def place(self, name: str, layer: int) -> int | None:
        """Return the index of a layer in the further pool `name`; None: the layer stores nothing in it."""
        layers = next(each.layers for each in self.further if each.name == name)
        return layers.index(layer) if layer in layers else None

    def pool(self, dtype: HiddenDtype, kv_dtype: KvDtype = "auto", page_size: int = DELTA_BLOCK) -> PoolLayout:
        """Return the description of the model's KV pool and of those beside it, for attention in `dtype`. Raises
        ConfigError for latents, entries or narrow values in FP8."""
        if kv_dtype == "fp8" and (unlike := self._unlike_kv):
            raise ConfigError(
                f"kv_dtype is fp8, but {self.architecture} has {unlike}, which are kept in the model's type; use "
                "--kv-dtype auto"
            )
        names = ("latent",) if self.latent is not None else ("k",) if self._unlike_kv else ("k", "v")

        def planes(config: ModelConfig) -> tuple[KvPlane, ...]:
            heads, width = config.num_kv_heads, config.head_dim
            if kv_dtype == "fp8":
                return tuple(KvPlane(name, heads, width, "float8_e4m3fn", SCALE_BYTES, ALIGNMENT) for name in names)
            return tuple(KvPlane(name, heads, width, dtype) for name in names)

        further = [
            FurtherPool(
                each.name,
                len(each.layers),
                (KvPlane(each.name, each.num_heads, each.row_width(page_size), each.dtype or dtype),),
                each.window(page_size) if self.has_tail else 0,
                each.num_kept if self.has_tail and each.num_kept < page_size else 0,
            )
            for each in self.further
        ]
        kinds, window = self.by_window() if self.has_window_pool else (self.of_attention,), self.tail_window
        further += [FurtherPool(WINDOW_POOL, kind.num_layers, planes(kind), window) for kind in kinds[1:]]
        if self.value_dim is not None:
            further += [
                FurtherPool(name, kind.num_layers, (KvPlane("v", kind.num_kv_heads, self.value_dim, dtype),), seen)
                for name, kind, seen in zip((VALUES, WINDOW_VALUES), kinds, (self.tail_rows, window), strict=False)
            ]
        num_layers, own = kinds[0].num_layers, planes(kinds[0])
        if self.compressed is not None and self.has_tail:  # keys are read in a window alone, so entries come first
            further.append(FurtherPool(WINDOW_POOL, num_layers, own, window))
            first = further.pop(0)
            num_layers, own = first.num_layers, first.planes
        return pool_of(num_layers, dtype, own, tuple(further), self.tail_rows)

    def of_prediction_layers(self, num_layers: int) -> ModelConfig:
        """Return the configuration of `num_layers` prediction layers. They are like the model's layers that see all
        positions; if `predicts_in_window`, or beside entries, they are like those with a window."""
        further = () if self.delta else tuple(replace(each, layers=tuple(range(num_layers))) for each in self.further)
        if self.compressed is not None:
            windows = replace(self.compressed, kinds=("window",) * num_layers)
            experts = None if self.experts is None else replace(self.experts, hash_layers=())
            sees = (windows.window,) * num_layers
            return replace(
                self, num_layers=num_layers, sliding_window=sees, further=(), compressed=windows, experts=experts
            )
        windows, kind = (None,) * num_layers, self
        if self.predicts_in_window:
            kind = replace(self if self.window is None else self.by_window()[1], experts=None)
            windows = kind.sliding_window[:1] * num_layers
        return replace(kind, num_layers=num_layers, sliding_window=windows, further=further, delta=None)

    @property
    def _unlike_kv(self) -> str | None:
        """The contents of the KV pool, in words; None: keys and values of one width."""
        if self.compressed is not None:
            return "keys that are also values"
        if self.latent is not None:
            return "latents for keys and values"
        return None if self.value_dim is None else "values narrower than keys"

    def rounds_coarsely(self, dtype: HiddenDtype, kv_dtype: KvDtype = "auto") -> bool:
        """Return whether a difference of the last bit of `dtype` may become a much larger one: by the choice of another
        expert, of another of two FP8 numbers, or of two numbers of a state in bfloat16."""
        if self.quantization is not None and self.quantization.rounding != "none":
            return True
        has_short_states = self.delta is not None and self.delta.state_dtype != "float32"
        return kv_dtype == "fp8" or (has_short_states if dtype == "float32" else self.experts is not None)

    @property
    def layer_products(self) -> int:
        """Number of weights in the matrices of one layer by which a token is multiplied."""
        experts = self.experts
        inner_size = self.intermediate_size
        if experts is not None:
            inner_size = experts.num_active * experts.inner_size + experts.shared_size
        return self.attention_products + 3 * self.hidden_size * inner_size

    @property
    def attention_products(self) -> int:
        """The same of the attention layer. Layers with a delta rule are averaged with those that have attention."""
        if self.delta is not None:
            rest = self.of_attention
            of_delta = len(self.delta.layers) * self.delta.products(self.hidden_size)
            return (of_delta + rest.num_layers * rest.attention_products) // self.num_layers
        latent, compressed = self.latent, self.compressed
        if compressed is not None:
            of_queries = compressed.query_rank * (self.hidden_size + self.q_size) + self.hidden_size * self.head_dim
            return of_queries + compressed.group_rank * (self.q_size + compressed.num_groups * self.hidden_size)
        if latent is None:
            return self.hidden_size * ((2 + self.has_output_gate) * self.q_size + 2 * self.kv_size)
        query_dim = latent.plain_dim + latent.rope_dim
        if latent.query_rank is None:
            queries = self.hidden_size * self.num_heads * query_dim
        else:
            queries = latent.query_rank * (self.hidden_size + self.num_heads * query_dim)
        of_heads = self.num_heads * latent.rank * (latent.plain_dim + latent.value_dim)
        out = self.num_heads * latent.value_dim * self.hidden_size
        return queries + self.hidden_size * self.kv_size + of_heads + out + self._index_products

    @property
    def _index_products(self) -> int:
        """The same of the indexers, spread over all layers."""
        index, latent = self.index, self.latent
        if index is None or latent is None or latent.query_rank is None:
            return 0
        of_one = latent.query_rank * index.num_heads * index.head_dim + self.hidden_size * (
            index.head_dim + index.num_heads
        )
        return of_one * sum(self.place(INDEX, layer) is not None for layer in range(self.num_layers)) // self.num_layers
