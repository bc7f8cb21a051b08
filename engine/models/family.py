"""A model family: how its models are read, and what its config.json means. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoint.config_file import ConfigFile
from ..checkpoint.model_config import (
    CompressedConfig,
    DeltaConfig,
    ExpertsConfig,
    Further,
    Gemma4Config,
    IndexConfig,
    LatentConfig,
    ModelConfig,
)
from ..checkpoint.quantization import ScaleName

if TYPE_CHECKING:
    from ..checkpoint.weights import Weights
    from ..layers.decoder import DecoderLayer
    from .decoder import DecoderModel

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # spellings of one key of config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family that Baton serves. Settings that differ between families are fields."""

    architecture: str  # as config.json names it
    reader: str  # MODULE.FUNCTION in this folder, which `read` imports
    model_type: str  # as config.json names it
    text_types: tuple[str, ...] = ()  # model_type of a text_config whose text is computed as by this family
    qkv_bias: bool | None = None  # None: config.json's attention_bias decides
    has_out_bias: bool = True  # attention_bias is also that of the output projection
    qk_norm: bool | Literal["use_qk_norm"] = False  # a key of config.json: that decides
    has_wide_norms: bool = False
    has_sinks: bool = False
    norm_offset: float | None = None  # of weights of norms, which then multiply in float32; None: weights as they are
    window_theta_name: str = "rope_local_base_freq"  # the field beside the rotary settings that has it
    window_theta: float | None = None  # of rotary embeddings in layers with a window; None: as in the others
    score_scale: float | Literal["query_pre_attn_scalar"] | None = None  # a key of config.json: 1 / sqrt of its value
    rotary_share: float | None = None  # of a head that is rotated, if config.json does not say; None: always all
    has_rotary: bool = True  # False: no layer rotates queries and keys
    may_have_mlp_bias: bool = False
    may_cap_logits: bool = False  # by final_logit_softcapping
    scale_name: ScaleName | None = None  # of the scales of blocks in FP8, if it is none of the usual ones
    may_pack_experts: bool = False  # as expert_dtype says
    scales_queries: bool = False  # by their positions, as llama_4_scaling_beta among the rotary settings says
    window: Literal["refused", "all_layers", "by_layer", "by_type"] = "refused"  # by_type: as layer_types says
    needs: tuple[str, ...] = ()  # keys whose default is not certain, so that it must not be guessed; a|b: one of both
    inert: tuple[str, ...] = ()  # keys of config.json that change nothing of this family's text, whatever their value
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keys whose only served value is this one
    has_streams: bool = False  # hc_mult residual streams (hyper-connections)
    hands_over_collapsed: bool = False  # it has streams, but drafters get the one state that they collapse to
    read_experts: Callable[[ConfigFile], ExpertsConfig | None] | None = None  # None: it has no mixtures of experts
    read_latent: Callable[[ConfigFile], LatentConfig] | None = None  # None: heads have keys and values of their own
    read_index: Callable[[ConfigFile], IndexConfig | None] | None = None  # None: it has no indexers
    read_compressed: Callable[[ConfigFile], CompressedConfig] | None = None  # None: attention sees tokens alone
    read_gemma4: Callable[[ConfigFile], Gemma4Config] | None = None
    respell: Callable[[ConfigFile], None] | None = None  # renames fields of published files
    value_dim: Callable[[ConfigFile, int], int | None] | None = None  # of a value, by that of a key; None: as wide
    window_head_factor: int = 1  # KV heads of layers with a window, by those of the others
    read_delta: Callable[[ConfigFile], DeltaConfig] | None = None  # None: all layers have attention
    has_output_gate: bool = False  # queries come with a gate of what they attend to
    read_further: Callable[[ConfigFile], tuple[Further, ...]] | None = None  # None: it has no pool beside that of KV
    mtp_layer_reader: str | None = None  # as `reader`, for a prediction layer; None: as Llama's
    predicts_in_window: bool = False  # prediction layers are dense, and else as the layers with a window
    own_mtp: tuple[str, ...] = ("model.layers.", "model.mtp_layers.")  # prediction layers in its checkpoints begin so

    @property
    def read(self) -> Callable[[ModelConfig, Weights], DecoderModel]:
        """The function that reads a model. The same call lists the tensors and loads them."""
        return _imported(self.reader)

    @property
    def read_mtp_layer(self) -> Callable[[ModelConfig, Weights, str, int], DecoderLayer] | None:
        """The function that reads a prediction layer; None: it is as Llama's."""
        return None if self.mtp_layer_reader is None else _imported(self.mtp_layer_reader)


def _imported(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(import_module(f".{module}", __package__), function)
