"""A model's sizes against what its authors publish, and configs of Hugging Face against both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqpar.plan.traffic import HeadShape
from seqpar.planner import Hardware, ModelShape, plan_batch
from seqpar.planner.cost import Weights
from seqpar.planner.presets import PRESETS

# Published totals and active parameters in billions, as the models' cards and reports give them.
PUBLISHED = {
    "llama-8b": (8.03, 8.03),
    "llama-70b": (70.6, 70.6),
    "llama-405b": (405.9, 405.9),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9),
    "gemma3-27b": (27.0, 27.0),
    "deepseek-v3": (671.0, 37.0),
    "gpt-7b": (6.7, 6.7),
    "gpt-13b": (12.9, 12.9),
    "wlb-550m": (0.55, 0.55),
}


def outside_matrices(shape: ModelShape) -> int:
    """Parameters of the embeddings, the head and the norms."""
    return shape.vocab * shape.hidden * (1 if shape.tied else 2) + norms_of(shape) * shape.hidden


def norms_of(shape: ModelShape) -> int:
    """One before each attention, recurrence and ffn, and the last one."""
    return shape.attention_count + shape.recurrent_layers + shape.ffn_count + 1


def active_parameters(shape: ModelShape) -> int:
    """Parameters that compute a token: two operations each, and those outside the matrices."""
    return shape.linear_flops // 2 + outside_matrices(shape)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = ModelShape.preset(name)
    assert shape.name == name
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.015)
    assert active_parameters(shape) == pytest.approx(active * 1e9, rel=0.02)


def test_parameters_of_llama_are_exact() -> None:
    assert ModelShape.preset("llama-8b").parameters == 8_030_261_248
    assert ModelShape.preset("llama-70b").parameters == 70_553_706_496


@pytest.mark.parametrize("name", PRESETS)
def test_operations_follow_from_the_matrices(name: str) -> None:
    shape = ModelShape.preset(name)
    matrices = shape.parameters - outside_matrices(shape)
    assert (shape.linear_flops == 2 * matrices) == (shape.experts == shape.active_experts)
    assert shape.head_flops == 2 * shape.vocab * shape.hidden
    assert sum(layers for _, layers in shape.window_groups()) == shape.attention_count


def test_pairs_and_rows_count_values_of_their_own_dim() -> None:
    deepseek = ModelShape.preset("deepseek-v3")
    assert deepseek.pair_flops == 2 * 128 * (192 + 128)
    assert replace(deepseek, latents=False).row_bytes == 128 * (192 + 128) * 2
    assert ModelShape.preset("llama-8b").pair_flops == 4 * 32 * 128
    assert replace(ModelShape.preset("llama-8b"), dtype="float32").row_bytes == 8 * 256 * 4


def test_latents_are_sent_and_kept_and_expanded_wherever_they_are_seen() -> None:
    latents = ModelShape.preset("deepseek-v3")
    keys = replace(latents, latents=False)
    assert latents.row_bytes == (512 + 64) * 2 and latents.key_heads == 1
    assert latents.expand_flops == 2 * 512 * 128 * (128 + 128) and keys.expand_flops == 0
    assert latents.trained_flops == keys.trained_flops + 61 * latents.expand_flops
    assert keys.activation_bytes - latents.activation_bytes == 61 * 2 * 128 * (192 + 128)
    assert latents.parameters == keys.parameters and latents.linear_flops == keys.linear_flops
    for recompute, products in (("none", 4), ("full", 5)):
        machine = Hardware.preset("h100")
        of, without = (Weights.of(replace(s, recompute=recompute), machine) for s in (latents, keys))
        more = products * latents.expand_flops / machine.linear_rate / of.second
        assert abs(of.both.key - without.both.key - more) <= 2
        assert of.inside.key * keys.row_bytes == pytest.approx(without.inside.key * latents.row_bytes, rel=0.01)
    assert [ModelShape.preset(n).row_bytes for n in ("deepseek-v2-lite", "glm-4.7-flash", "kimi-linear-48b-a3b")] == [
        1152
    ] * 3
    with pytest.raises(ValueError, match="latents need kv_rank"):
        replace(ModelShape.preset("tiny"), latents=True)


def test_a_plan_of_latents_predicts_their_bytes() -> None:
    plan = plan_batch([3000, 100], 2, model="deepseek-v3", hardware="h100")
    shape = HeadShape(**plan.forecast.call)
    assert shape.latent == (512, 64) and shape.kv_heads == 1
    sent = sum(plan.bytes(rank, **plan.forecast.call) for rank in range(2))
    rows = sum(len(step.pos) for rank in range(2) for step in plan.steps(rank, row_bytes=1152) if not step.local)
    assert (plan.widths > 1).any() or sent == rows * 1152


def test_windows_take_turns() -> None:
    assert ModelShape.preset("gemma3-27b").window_groups() == [(1023, 52), (None, 10)]
    assert ModelShape.preset("llama-8b").window_groups() == [(None, 32)]


def test_activations_are_korthikantis_without_dropout() -> None:
    shape = ModelShape.preset("gpt-7b")
    # 34 bytes of a layer less two masks of one byte, and one float32 per head.
    assert shape.activation_bytes == 32 * (32 * 4096 + 4 * 32)
    # FlexSP measured 4.48 MB a token for this model, dropout's masks and its head included.
    assert shape.activation_bytes == pytest.approx(4.48e6, rel=0.07)


@pytest.mark.parametrize("name", PRESETS)
def test_recomputing_more_keeps_less(name: str) -> None:
    none, attention, full = (
        replace(ModelShape.preset(name), recompute=r).activation_bytes for r in ("none", "attention", "full")
    )
    assert none > attention > full > 0


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    shape = replace(ModelShape.preset("gpt-7b"), recompute="full")
    one = 32 * 4096 + 4 * 32
    assert shape.activation_bytes == 31 * 2 * 4096 + one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
        ({"windows": (1 << 70,)}, "integers of at least 0, or None, at most 2147483647, got"),
        ({"hidden": 4096.0}, "hidden must be an integer"),
        ({"kv_heads": 5}, "heads 32 must be a multiple of kv_heads 5"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"windows": ()}, "windows must name at least one"),
        ({"ffn": 0}, "32 layers are dense"),
        ({"active_experts": 1}, "1 active of 0 experts"),
        ({"experts": 4}, "needs active_experts and expert_ffn"),
        ({"shared_experts": 1}, "but experts is 0"),
        ({"experts": 4, "active_experts": 1, "expert_ffn": 8, "dense_layers": 33}, "33 dense layers of 32"),
        ({"rope_dim": 64}, "kv_rank, which is None"),
    ],
)
def test_sizes_that_no_model_has_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"ModelShape 'llama-8b': .*{message}"):
        replace(ModelShape.preset("llama-8b"), **change)


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "torch_dtype": "float32",
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "sliding_window": None, "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "tie_word_embeddings": False, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN15_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "vocab_size": 151936, "tie_word_embeddings": False, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
PHI3_MINI = {
    "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "sliding_window": 2047,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama-8b"),
        (QWEN3_8B, "qwen3-8b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x7b"),
        (GEMMA3, "gemma3-27b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_published_config_is_the_preset(config: dict, preset: str) -> None:
    assert ModelShape.from_config(config, name=preset) == ModelShape.preset(preset)


@pytest.mark.parametrize(
    ("config", "total", "active", "groups"),
    [
        (GEMMA2_9B, 9.24, 9.24, [(4095, 21), (None, 21)]),
        (MISTRAL_7B, 7.24, 7.24, [(4095, 32)]),
        (GPT_OSS_120B, 116.8, 5.7, [(127, 18), (None, 18)]),
        (DEEPSEEK_V2_LITE, 15.7, 2.66, [(None, 27)]),
        (QWEN15_MOE, 14.3, 2.69, [(None, 24)]),
        (PHI3_MINI, 3.82, 3.82, [(2046, 32)]),
    ],
    ids=["gemma2-9b", "mistral-7b", "gpt-oss-120b", "deepseek-v2-lite", "qwen1.5-moe", "phi3-mini"],
)
def test_parameters_and_windows_of_a_config(config: dict, total: float, active: float, groups: list) -> None:
    shape = ModelShape.from_config(config)
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert active_parameters(shape) == pytest.approx(active * 1e9, rel=0.01)
    assert shape.window_groups() == groups


def test_a_config_may_be_an_object() -> None:
    class Config:
        def to_dict(self) -> dict:
            return LLAMA | {"_name_or_path": "meta-llama/Llama-3.1-8B"}

    assert ModelShape.from_config(Config()).name == "meta-llama/Llama-3.1-8B"
    assert ModelShape.from_config(Config(), recompute="full").recompute == "full"


def test_windows_of_late_layers() -> None:
    some = QWEN3_8B | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 12}
    assert ModelShape.from_config(some).window_groups() == [(None, 12), (511, 24)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known; known: bailing_hybrid, bamba, .*qwen3_moe"),
        ({"vocab_size": None, "hidden_size": None}, "model_type 'llama' lacks hidden_size, vocab_size"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"sliding_window": 9, "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
    ],
)
def test_configs_that_cannot_be_read_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(LLAMA | change)


def test_dense_layers_among_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="except as the first layers"):
        ModelShape.from_config(QWEN3_MOE | {"mlp_only_layers": [5]})
    with pytest.raises(ValueError, match="Hugging Face config or its dict, got int"):
        ModelShape.from_config(3)


def test_a_config_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k not in ("model_type", "torch_dtype")})
    assert ModelShape.from_config(config, name="llama-8b").parameters == ModelShape.preset("llama-8b").parameters
    for kind in ("Mistral", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma2", "DeepseekV3", "GptOss"):
        shape = ModelShape.from_config(getattr(transformers, f"{kind}Config")())
        assert shape.parameters > shape.vocab * shape.hidden
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=12, sliding_window=64)
    assert ModelShape.from_config(gemma).window_groups() == [(63, 10), (None, 2)]
