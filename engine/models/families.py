"""The model families that Baton serves. Imports no torch: config.json is checked before anything big is loaded.

A family is a declaration here, and functions that read its weights in a file beside it.
"""

from __future__ import annotations

from functools import partial

from ..checkpoint.read_attention import (
    read_delta,
    read_gemma4,
    read_index,
    read_index_keys,
    read_latent,
    respell_mimo,
    value_dim,
)
from ..checkpoint.read_compressed import (
    read_compressed,
    read_entry_experts,
    read_entry_index,
    read_entry_pools,
    respell_deepseek_v4,
)
from ..checkpoint.read_experts import (
    read_gemma4_experts,
    read_glm_experts,
    read_gpt_oss_experts,
    read_latent_experts,
    read_minimax_experts,
    read_mistral4_experts,
    read_qwen3_experts,
    read_shared_qwen_experts,
    read_v2_experts,
    respell_qwen3_5,
)
from .family import ModelFamily

_SUMS = ("head_dim", "qk_head_dim")  # of widths that are read
_LATENT_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT_NEEDS = (*_LATENT_WIDTHS, "first_k_dense_replace")
_QWEN_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # drafters read the tensors
_QWEN_FIXED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
_INDEX_NEEDS = ("index_topk", "index_head_dim", "index_n_heads")

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    model_type="llama",
    reader="llama.read_llama",
    text_types=("llama",),
    may_have_mlp_bias=True,
)
MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    model_type="mistral",
    reader="llama.read_llama",
    text_types=("mistral",),
    qkv_bias=False,
    window="all_layers",
    needs=("num_key_value_heads", "sliding_window"),
)
MINISTRAL3 = ModelFamily(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    reader="llama.read_llama",
    text_types=("ministral3",),
    qkv_bias=False,
    scales_queries=True,
    window="all_layers",
    needs=("num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps"),
)
QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    reader="llama.read_llama",
    text_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    qkv_bias=True,
    window="by_layer",
    needs=("num_key_value_heads",),
    inert=("attention_bias", "dual_chunk_attention_config"),  # transformers reads neither
)
QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    reader="llama.read_llama",
    text_types=("qwen3", "qwen3_vl_text"),
    qk_norm=True,
    window="by_layer",
    needs=("num_key_value_heads", "head_dim"),
)
QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    reader="mixtures.read_qwen3_moe",
    qk_norm=True,
    needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    fixed={"use_qk_norm": True},
    read_experts=read_qwen3_experts,
    own_mtp=(),
)
GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    reader="mixtures.read_qwen3_moe",
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
    read_experts=read_glm_experts,
    mtp_layer_reader="mixtures.read_mixture_layer",
    own_mtp=("model.layers.",),
)
MINIMAX_M2 = ModelFamily(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    reader="mixtures.read_minimax_m2",
    qkv_bias=False,
    has_wide_norms=True,
    rotary_share=1.0,
    needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "rope_parameters|rope_theta"),
    inert=("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    fixed={
        "layernorm_full_attention_alpha": 1.0,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 1.0,
        "layernorm_mlp_beta": 1.0,
        "norm_topk_prob": True,
        "qk_norm_type": "per_layer",
        "routed_scaling_factor": 1.0,
        "swa_rope_theta": -1.0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    read_experts=read_minimax_experts,
    own_mtp=("model.layers.",),
)
GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    reader="gpt_oss.read_gpt_oss",
    has_sinks=True,
    window="by_type",
    needs=(
        "rope_parameters|rope_scaling",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "layer_types",
        "num_experts_per_tok",
        "rms_norm_eps",
        "swiglu_limit",
    ),
    inert=("initial_context_length",),  # rope_scaling has it
    read_experts=read_gpt_oss_experts,
    own_mtp=(),
)
GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    reader="gemma.read_gemma3",
    text_types=("gemma3_text",),
    qk_norm=True,
    norm_offset=1.0,
    window="by_type",
    window_theta=10_000.0,
    score_scale="query_pre_attn_scalar",
    may_cap_logits=True,
    fixed={
        "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
    own_mtp=(),
)
GEMMA4 = ModelFamily(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    reader="gemma.read_gemma4",
    text_types=("gemma4_text",),
    qk_norm=True,
    norm_offset=0.0,
    window="by_type",
    window_theta=10_000.0,
    score_scale=1.0,
    may_cap_logits=True,
    needs=("layer_types", "rope_parameters"),
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    read_experts=read_gemma4_experts,
    read_gemma4=read_gemma4,
    own_mtp=(),
)
MIMO_V2_FLASH = ModelFamily(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    reader="gpt_oss.read_mimo",
    text_types=("mimo_v2_flash",),
    has_out_bias=False,
    has_sinks=True,
    rotary_share=0.334,
    window="by_type",
    window_theta=10_000.0,
    window_theta_name="swa_rope_theta",
    window_head_factor=2,
    respell=respell_mimo,
    value_dim=value_dim,
    needs=("num_key_value_heads", "head_dim", "v_head_dim", "norm_topk_prob", "attention_value_scale"),
    inert=("attention_chunk_size",),
    fixed={"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True},
    read_experts=partial(read_latent_experts, scoring="sigmoid"),
    mtp_layer_reader="gpt_oss.read_mimo_mtp_layer",
    predicts_in_window=True,
    own_mtp=("model.mtp.",),
)
_DELTA_NEEDS = (
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
QWEN3_NEXT = ModelFamily(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    reader="qwen_next.read_qwen_next",
    qk_norm=True,
    norm_offset=1.0,
    rotary_share=0.25,
    has_output_gate=True,
    needs=(*_DELTA_NEEDS, "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    inert=_QWEN_MTP,
    read_experts=read_shared_qwen_experts,
    read_delta=read_delta,
    mtp_layer_reader="qwen_next.read_next_mtp_layer",
    own_mtp=("mtp",),
)
QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    reader="qwen_next.read_qwen3_5",
    text_types=("qwen3_5_text",),
    qk_norm=True,
    norm_offset=1.0,
    rotary_share=0.25,
    has_output_gate=True,
    needs=_DELTA_NEEDS,
    inert=_QWEN_MTP,
    fixed=_QWEN_FIXED,
    read_delta=read_delta,
    mtp_layer_reader="qwen_next.read_next_mtp_layer",
    own_mtp=("mtp",),
)
QWEN3_5_MOE = ModelFamily(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    reader="qwen_next.read_qwen3_5",
    text_types=("qwen3_5_moe_text",),
    qk_norm=True,
    norm_offset=1.0,
    rotary_share=0.25,
    has_output_gate=True,
    needs=(*_DELTA_NEEDS, "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    inert=_QWEN_MTP,
    fixed=_QWEN_FIXED,
    respell=respell_qwen3_5,
    read_experts=partial(read_shared_qwen_experts, norms=True),
    read_delta=read_delta,
    mtp_layer_reader="qwen_next.read_next_mtp_layer",
    own_mtp=("mtp",),
)
DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    reader="deepseek.read_deepseek",
    needs=_LATENT_NEEDS,
    inert=(*_SUMS, "n_group", "topk_group"),  # of topk_method greedy; other methods read them
    read_experts=read_v2_experts,
    read_latent=read_latent,
    own_mtp=(),
)
DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    reader="deepseek.read_deepseek",
    text_types=("deepseek_v3", "kimi_k2"),  # Kimi-K2.5's, in the words of two releases
    needs=(*_LATENT_NEEDS, "norm_topk_prob", "routed_scaling_factor"),
    inert=_SUMS,
    read_experts=partial(read_latent_experts, scoring="sigmoid"),
    read_latent=read_latent,
    mtp_layer_reader="deepseek.read_deepseek_mtp_layer",
    own_mtp=("model.layers.",),
)
GLM4_MOE_LITE = ModelFamily(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    reader="deepseek.read_deepseek",
    needs=(
        *_LATENT_WIDTHS,
        "first_k_dense_replace|mlp_layer_types",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
    ),
    inert=_SUMS,
    read_experts=partial(read_latent_experts, scoring="sigmoid"),
    read_latent=read_latent,
    mtp_layer_reader="deepseek.read_deepseek_mtp_layer",
    own_mtp=("model.layers.",),
)
MISTRAL4 = ModelFamily(
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    reader="deepseek.read_deepseek",
    text_types=("mistral4",),
    scales_queries=True,
    needs=(*_LATENT_NEEDS, "norm_topk_prob", "rope_parameters"),
    inert=_SUMS,
    read_experts=read_mistral4_experts,
    read_latent=read_latent,
    own_mtp=(),
)
DEEPSEEK_V32 = ModelFamily(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    reader="deepseek.read_deepseek",
    needs=(
        *_LATENT_WIDTHS,
        *_INDEX_NEEDS,
        "first_k_dense_replace|mlp_layer_types",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
    ),
    inert=_SUMS,
    read_experts=partial(read_latent_experts, scoring="sigmoid"),
    read_latent=read_latent,
    read_index=partial(read_index, is_interleaved=False),
    read_further=read_index_keys,
    mtp_layer_reader="deepseek.read_deepseek_mtp_layer",
    own_mtp=("model.layers.",),
)
GLM_MOE_DSA = ModelFamily(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    reader="deepseek.read_deepseek",
    needs=(
        *_LATENT_WIDTHS,
        *_INDEX_NEEDS,
        "first_k_dense_replace|mlp_layer_types",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
    ),
    inert=(  # indexer_types has the first three; drafts may share picks, which changes no text
        "index_topk_freq",
        "index_topk_pattern",
        "index_skip_topk_offset",
        "index_share_for_mtp_iteration",
        *_SUMS,
    ),
    fixed={"moe_router_dtype": "float32"},
    read_experts=partial(read_latent_experts, scoring="sigmoid"),
    read_latent=read_latent,
    read_index=partial(read_index, is_interleaved=True),
    read_further=partial(read_index_keys, may_share=True),
    mtp_layer_reader="deepseek.read_deepseek_mtp_layer",
    own_mtp=("model.layers.",),
)
DEEPSEEK_V4 = ModelFamily(
    architecture="DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    reader="deepseek_v4.read_deepseek_v4",
    qkv_bias=False,
    has_out_bias=False,
    has_sinks=True,
    norm_offset=0.0,
    window="all_layers",
    has_streams=True,
    scale_name="scale",
    may_pack_experts=True,
    respell=respell_deepseek_v4,
    needs=(
        *_INDEX_NEEDS,
        "compress_ratios|layer_types",
        "hc_mult",
        "head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "num_key_value_heads",
        "o_groups",
        "o_lora_rank",
        "q_lora_rank",
        "rope_parameters|rope_scaling",
        "routed_scaling_factor",
        "sliding_window",
        "swiglu_limit",
    ),
    inert=(  # of another drafter
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
    ),
    fixed={"norm_topk_prob": True, "topk_method": "noaux_tc"},
    read_experts=read_entry_experts,
    read_index=read_entry_index,
    read_compressed=read_compressed,
    read_further=read_entry_pools,
    mtp_layer_reader="deepseek_v4.read_deepseek_v4",
    own_mtp=("mtp.",),
)

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GLM4_MOE,
        MINIMAX_M2,
        GPT_OSS,
        GEMMA3,
        GEMMA4,
        MIMO_V2_FLASH,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE_LITE,
        MISTRAL4,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        DEEPSEEK_V4,
    )
}
