"""The architectures of transformers that people train, tiny and random, by group.

A config is made small by the names that configs use for one thing (`SIZES`); what is particular stands in the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import seqpar.integrations.transformers  # noqa: F401  registers attn_implementation="seqpar"

VOCABULARY = 61

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "intermediate_size": 48,
    "ffn_hidden_size": 48, "n_inner": 48, "ffn_dim": 48, "hidden_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "d_ff": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "max_position_embeddings": 128, "n_positions": 128,
    "max_seq_len": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "sliding_window": 6,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "shared_expert_intermediate_size": 16, "rotary_dim": 4, "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "dropout": 0.0, "hidden_dropout": 0.0, "classifier_dropout": 0.0, "activation_dropout": 0.0,
    "residual_dropout": 0.0, "router_jitter_noise": 0.0, "attn_dropout": 0.0,
    "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_ssm": 64, "mamba_chunk_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


class Architecture(NamedTuple):
    """One row.

    kind: the config's model type. head: the suffix of the class, or its name. positions: where the position_ids start
    that this model does not make itself, or None. inside: the parts of a composite config that are shrunk too.
    training: whether it is in training; one model draws at random there, whatever its dropout is. of_all: whether the
    loss is not a sum over documents, each by itself.
    """

    kind: str
    group: str
    config: dict[str, Any] = {}
    head: str = "ForCausalLM"
    positions: int | None = None
    inside: tuple[str, ...] = ()
    training: bool = True
    of_all: bool = False


BOTH = ["sliding_attention", "full_attention"]
HYBRID = ["linear_attention", "full_attention"]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 1.3, 2.0, 3.0], "partial_rotary_factor": 1.0,
}  # fmt: skip


def _many(group: str, kinds: str, **options: Any) -> dict[str, Architecture]:
    return {kind: Architecture(kind, group, **options) for kind in kinds.split()}


DENSE = _many(
    "dense",
    "llama qwen2 qwen3 mistral ministral3 gemma gemma2 gemma3_text gemma3n_text gemma4_text phi phi3 gpt2 gpt_neox "
    "gpt_bigcode opt starcoder2 cohere cohere2 olmo2 olmo3 smollm3 glm4 granite stablelm nemotron exaone4 ernie4_5 "
    "seed_oss hunyuan_v1_dense minicpm3 youtu modernbert-decoder gptj gpt_neo bloom mpt falcon codegen",
)
DENSE |= {
    "opt-positions": Architecture("opt", "dense", positions=0),
    "llama3-rope": Architecture("llama", "dense", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    "llama-yarn": Architecture("llama", "dense", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama-dynamic": Architecture(
        "llama", "dense", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}, of_all=True
    ),
    "phi3-longrope": Architecture(
        "phi3", "dense", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": None},
        of_all=True,
    ),
    "falcon-alibi": Architecture("falcon", "dense", {"alibi": True}),
}  # fmt: skip
EXPERTS = _many(
    "experts",
    "mixtral qwen2_moe qwen3_moe gpt_oss deepseek_v2 deepseek_v3 glm4_moe olmoe phimoe granitemoe llama4_text "
    "minimax_m2 ernie4_5_moe hunyuan_v1_moe deepseek_v32 dbrx glm4_moe_lite longcat_flash mistral4 axk1 glm_moe_dsa "
    "axk2",
)
EXPERTS["phimoe"] = Architecture("phimoe", "experts", training=False)  # draws experts
EXPERTS["mixtral-balance-loss"] = Architecture(
    "mixtral", "experts", {"output_router_logits": True, "router_aux_loss_coef": 0.7}, of_all=True
)
ENCODERS = _many(
    "encoder",
    "bert distilbert albert electra modernbert eurobert nomic_bert esm roberta xlm-roberta deberta-v2 longformer",
    head="ForMaskedLM",
)  # fmt: skip
ENCODERS |= {
    "roberta-positions": Architecture("roberta", "encoder", head="ForMaskedLM", positions=1),
    "xlm-roberta-positions": Architecture("xlm-roberta", "encoder", head="ForMaskedLM", positions=1),
    "bert-tokens": Architecture("bert", "encoder", head="ForTokenClassification"),
    "llama-tokens": Architecture("llama", "encoder", {"classifier_dropout": 0.0}, head="ForTokenClassification"),
    "llama-sequence": Architecture("llama", "encoder", head="ForSequenceClassification"),
    "bert-sequence": Architecture("bert", "encoder", head="ForSequenceClassification"),
    "modernbert-sequence": Architecture("modernbert", "encoder", head="ForSequenceClassification"),
    "qwen3-base": Architecture("qwen3", "encoder", head="Model"),
    "bert-base": Architecture("bert", "encoder", head="Model"),
    "xlm-roberta-base": Architecture("xlm-roberta", "encoder", head="Model"),
}
HYBRIDS = _many(
    "hybrid",
    "qwen3_next qwen3_5_text falcon_h1 mamba falcon_mamba mamba2 jamba bamba nemotron_h lfm2 recurrent_gemma zamba "
    "zamba2 minimax olmo_hybrid "
    "granitemoehybrid kimi_linear bailing_hybrid qwen3_5_moe_text lfm2_moe lfm3 rwkv xlstm",
)
SEEN = {"image": 51, "video": 52, "start": 53, "end": 54}  # tokens that stand for images, and around them
ID, INDEX = {"image_token_id": SEEN["image"]}, {"image_token_index": SEEN["image"]}
GRIDS = ID | {"video_token_id": SEEN["video"], "vision_start_token_id": SEEN["start"],
              "vision_end_token_id": SEEN["end"]}  # fmt: skip
IMAGES = {
    kind: Architecture(kind, "vision-language", config, "ForConditionalGeneration", None,
                       ("text_config", "vision_config"))
    for kind, config in {
        "llava": INDEX, "mistral3": INDEX, "internvl": ID, "llama4": INDEX, "qwen2_5_vl": GRIDS, "qwen3_vl": GRIDS,
        "gemma3": INDEX | {"mm_tokens_per_image": 4, "boi_token_index": 53, "eoi_token_index": 54},
        "paligemma": INDEX | {"projection_dim": 32}, "smolvlm": ID, "mistral_large4": INDEX,
    }.items()
}  # fmt: skip
# not in the table, but tried with images: built like others
MORE_IMAGES = {
    kind: Architecture(kind, "vision-language", config, "ForConditionalGeneration", None,
                       ("text_config", "vision_config"))
    for kind, config in {
        "qwen2_vl": GRIDS, "qwen3_vl_moe": GRIDS, "qwen3_5": GRIDS, "idefics3": ID,
        "aya_vision": INDEX | {"downsample_factor": 1}, "cohere2_vision": ID | {"downsample_factor": 1},
    }.items()
}  # fmt: skip
OTHERS = _many("encoder-decoder", "t5 bart mbart marian m2m_100", head="ForConditionalGeneration")
OTHERS["t5gemma"] = Architecture(
    "t5gemma", "encoder-decoder", head="ForConditionalGeneration", inside=("encoder", "decoder")
)
OTHERS |= {
    "whisper": Architecture("whisper", "audio", head="ForConditionalGeneration"),
    "wav2vec2": Architecture("wav2vec2", "audio", head="ForCTC"),
} | _many("vision", "vit dinov2 siglip_vision_model", head="Model")

TABLE = {**DENSE, **EXPERTS, **ENCODERS, **HYBRIDS, **IMAGES, **OTHERS}

# what `SIZES` cannot know of a kind
MLA = {"head_dim": "unset", "num_key_value_heads": 4}
# so many heads that no two scores tie
INDEXED = MLA | {
    "index_n_heads": 24, "index_head_dim": 16, "index_topk": 4, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
MAMBA = {"n_heads": 4, "num_heads": 4}
VISION = {"depth": 2, "image_size": 28, "patch_size": 14, "num_key_value_heads": "unset", "head_dim": "unset"}
LARGE = VISION | {"image_size": 56}
PARTICULAR: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": BOTH, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        "intermediate_size": [48, 48, 48, 48], "num_hidden_layers": 4, "layer_types": BOTH * 2,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "moe_intermediate_size": "unset", "num_experts": "unset",
    },
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
                           "layer_types": BOTH, "num_key_value_heads": "unset"},
    "modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
                   "layer_types": BOTH, "local_attention": 6},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "falcon": {
        "head_dim": "unset", "num_key_value_heads": "unset", "num_kv_heads": 2, "new_decoder_architecture": True,
    },
    "codegen": {"n_ctx": 128, "n_head": 4},
    "deepseek_v2": {"head_dim": "unset", "first_k_dense_replace": 1, "num_key_value_heads": 4, "qk_rope_head_dim": 8},
    "deepseek_v3": {"head_dim": "unset", "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe_lite": MLA | {"mlp_layer_types": ["dense", "sparse"]},
    "longcat_flash": {
        "head_dim": 8, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2, "num_key_value_heads": 4,
    },
    "minicpm3": MLA, "mistral4": MLA, "youtu": MLA, "axk1": MLA,
    "deepseek_v32": INDEXED | {"first_k_dense_replace": 1, "mlp_layer_types": "unset"},
    "glm_moe_dsa": INDEXED | {
        "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "axk2": INDEXED | {"gated_norm_rank": 4},
    "mistral_large4_text": INDEXED | {
        "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
        "indexer_types": ["full", "shared", "full", "full"], "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1], "q_lora_rank": "unset", "n_group": 1,
    },
    "bailing_hybrid": {
        "layer_types": HYBRID, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": "unset",
    },
    "glm4_moe": {"first_k_dense_replace": 1},
    "llama4_text": {
        "intermediate_size_mlp": 48, "attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0], "moe_layers": [1], "pad_token_id": 0, "floor_scale": 4,
    },
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_key_value_heads": "unset",
    },
    "qwen3_next": {"layer_types": HYBRID, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False,
              "num_experts": 1, "num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mtp_layers_block_type": "unset",
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "conv_kernel": 3,
        "chunk_size": 8, "use_mamba_kernels": False, "num_hidden_layers": "unset",
        "moe_shared_expert_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": "unset", "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"],
                        "num_key_value_heads": 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8,
        "mamba_ngroups": 1, "use_mamba_kernels": False, "attention_hidden_size": 64, "attention_head_dim": 16,
        "adapter_rank": 4, "num_key_value_heads": 4, "num_query_groups": "unset", "kv_channels": "unset",
        "head_dim": "unset",
    },
    "granitemoehybrid": {"layer_types": HYBRID, "shared_intermediate_size": 48, "num_local_experts": 0,
                         "position_embedding_type": "rope"},
    "kimi_linear": {
        "layer_types": HYBRID, "mlp_layer_types": ["dense", "dense"], "linear_head_dim": 8, "linear_num_heads": 2,
        "num_experts_per_token": 2, "q_lora_rank": "unset", "head_dim": "unset", "num_key_value_heads": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mamba": {"state_size": 8, "time_step_rank": 4, "use_mambapy": False},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "use_mambapy": False},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_dt_rank": 4,
              "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "head_dim": "unset"},
    "minimax": {"layer_types": HYBRID, "block_size": 8},
    "xlstm": {"v_head_dim": "unset", "head_dim": "unset", "num_blocks": 2},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False},
    "longformer": {"attention_window": 4},
    "wav2vec2": {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_dim": (8, 8),
                 "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
                "decoder_start_token_id": 1},
    "vit": {"image_size": 28, "patch_size": 14},
    "dinov2": {"image_size": 28, "patch_size": 14, "mlp_ratio": 2},
    "siglip_vision_model": VISION, "clip_vision_model": VISION, "internvl_vision": LARGE,
    "pixtral": LARGE | {"head_dim": 8}, "idefics3_vision": LARGE, "smolvlm_vision": LARGE,
    "llama4_vision_model": LARGE | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
                                    "projector_output_dim": 32},
    "qwen2_5_vl_vision": {"depth": 2, "out_hidden_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                          "fullatt_block_indexes": [1], "patch_size": 4, "window_size": 16},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "qwen3_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "qwen3_vl_vision": {"depth": 2, "out_hidden_size": 32, "hidden_size": 32, "intermediate_size": 48,
                        "num_heads": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
                        "patch_size": 4},
    "t5gemma_module": {"layer_types": BOTH},
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2,
                        "patch_size": 4},
}  # fmt: skip
PARTICULAR["qwen2_vl_text"] = PARTICULAR["qwen3_vl_moe_text"] = PARTICULAR["qwen3_vl_text"]
PARTICULAR["qwen3_vl_moe_vision"] = PARTICULAR["qwen3_vl_vision"]
PARTICULAR["qwen3_5_vision"] = PARTICULAR["qwen3_vl_vision"] | {"deepstack_visual_indexes": "unset"}


def config_of(row: Architecture) -> transformers.PreTrainedConfig:
    """The small config of a row."""
    kind = CONFIG_MAPPING[row.kind]
    return _small(kind, PARTICULAR.get(row.kind, {}) | row.config, row.inside)


def _small(kind: type[Any], more: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:
    default = kind()
    own = {name: value for name, value in SIZES.items() if name in default.__dict__}
    for name in inside:
        part = getattr(default, name)
        own[name] = _small(type(part), PARTICULAR.get(part.model_type, {})).to_dict()
    given = {name: value for name, value in {**own, **more}.items() if not isinstance(value, str) or value != "unset"}
    config = kind(**given)
    config._experts_implementation = "eager"  # the grouped products of experts have no fp64
    return config


def class_of(row: Architecture) -> type[Any]:
    """The model class of a row."""
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "ForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING, "ForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING,
        "ForTokenClassification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "ForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "Model": auto.MODEL_MAPPING,
        "ForCTC": auto.MODEL_FOR_CTC_MAPPING,
    }  # fmt: skip
    kind = CONFIG_MAPPING[row.kind]
    for table in (
        tables.get(row.head),
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    ):
        if table is not None and kind in table:
            return table[kind]
    raise KeyError(f"{row.kind}{row.head}")


def build(
    row: Architecture, attention: str = "eager", dtype: torch.dtype = torch.float64
) -> transformers.PreTrainedModel:
    """The model of a row, in training, with weights at which attention matters."""
    torch.manual_seed(7)
    model = class_of(row)._from_config(config_of(row), attn_implementation=attention)
    for name, parameter in model.named_parameters():
        norm = "norm" in name.lower() and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if norm and "gemma" not in row.kind else 0.0, 0.2)
    model = (model.double() if dtype is torch.float64 else model.float()).train(row.training)
    for module in model.modules():
        if type(module).__name__ == "MiniMaxLightningAttention":  # whose tables were made in fp32
            tables = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = tables
    return model
