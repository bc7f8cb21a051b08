"""GLM-4.5: attention that rotates a part of each head, dense layers first, then experts beside one for all tokens."""

from __future__ import annotations

from ..config_file import ConfigFile
from ..model_config import ExpertsConfig
from .family import ModelFamily
from .mixtures import read_deepseek_experts, read_mixture_layer
from .qwen3_moe import read_qwen3_moe


def _read_experts(raw: ConfigFile) -> ExpertsConfig:
    return read_deepseek_experts(raw, "sigmoid")


GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    read=read_qwen3_moe,
    has_out_bias=False,
    qk_norm="use_qk_norm",
    rotary_share=0.5,
    needs=(
        "num_key_value_heads",
        "head_dim",
        "first_k_dense_replace",
        "norm_topk_prob",
        "n_group",
        "topk_group",
        "rms_norm_eps",
    ),
    read_experts=_read_experts,
    read_mtp_layer=read_mixture_layer,
    own_mtp=("model.layers.",),
)
