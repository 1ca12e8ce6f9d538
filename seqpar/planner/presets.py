"""Sizes of published models, as fields of `ModelShape`.

They are the published configurations. WLB-LLM (Wang et al. 2025, OSDI) only says 550M parameters: a Llama of that size
stands in.
"""

from __future__ import annotations

from typing import Any

from seqpar.plan.recurrence import RecurrentLayer

Fields = dict[str, Any]


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, ffn: int, vocab: int, **more: Any) -> Fields:
    return {
        "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "dim": dim, "ffn": ffn,
        "vocab": vocab, **more,
    }  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> Fields:
    """Meta 2024, The Llama 3 Herd of Models, table 3."""
    return _sizes(hidden, layers, heads, 8, 128, ffn, 128_256)


def _gpt(hidden: int, layers: int, heads: int) -> Fields:
    """Sizes of GPT as in FlexSP's experiments (Wang et al. 2025, section 6.1), with GPT-2's vocabulary."""
    return _sizes(hidden, layers, heads, heads, 128, 4 * hidden, 50_257, gated=False, tied=True)


def _experts(experts: int, active: int, shared: int, ffn: int, *, dense: int = 0) -> Fields:
    return {
        "experts": experts, "active_experts": active, "shared_experts": shared, "expert_ffn": ffn,
        "dense_layers": dense,
    }  # fmt: skip


def _latents(v_dim: int, q_rank: int | None = None) -> Fields:
    return {"q_rank": q_rank, "kv_rank": 512, "rope_dim": 64, "v_dim": v_dim, "latents": True}


def _recurrent(layer: RecurrentLayer, layers: int) -> Fields:
    return {"recurrent": layer, "recurrent_layers": layers}


PRESETS: dict[str, Fields] = {
    "llama-8b": _llama(4096, 32, 32, 14_336),
    "llama-70b": _llama(8192, 80, 64, 28_672),
    "llama-405b": _llama(16_384, 126, 128, 53_248),
    "qwen3-8b": _sizes(4096, 36, 32, 8, 128, 12_288, 151_936, qk_norm=True),
    "qwen3-30b-a3b": _sizes(
        2048, 48, 32, 4, 128, 0, 151_936, experts=128, active_experts=8, expert_ffn=768, qk_norm=True
    ),
    "mixtral-8x7b": _sizes(4096, 32, 32, 8, 128, 0, 32_000, experts=8, active_experts=2, expert_ffn=14_336),
    # five layers that see the last 1,024 tokens, including the query's own, then one that sees all
    "gemma3-27b": _sizes(
        5376, 62, 32, 16, 128, 21_504, 262_208, windows=(1023,) * 5 + (None,), tied=True, qk_norm=True
    ),
    "deepseek-v3": _sizes(7168, 61, 128, 128, 192, 18_432, 129_280)
    | _experts(256, 8, 1, 2048, dense=3)
    | _latents(128, q_rank=1536),
    # DeepSeek-AI 2024, DeepSeek-V2, appendix B.1
    "deepseek-v2-lite": _sizes(2048, 27, 16, 16, 192, 10_944, 102_400)
    | _experts(64, 6, 2, 1408, dense=1)
    | _latents(128),
    # what transformers' Glm4MoeLiteConfig has by default, which is GLM-4.7-Flash
    "glm-4.7-flash": _sizes(2048, 47, 20, 20, 256, 10_240, 154_880)
    | _experts(64, 4, 1, 1536, dense=1)
    | _latents(256, q_rank=768),
    # what transformers' Qwen3NextConfig has by default: three layers of four have the gated delta rule
    "qwen3-next-80b-a3b": _sizes(2048, 48, 16, 2, 256, 0, 151_936, output_gate=True, qk_norm=True)
    | _experts(512, 10, 1, 512)
    | _recurrent(RecurrentLayer.gated_delta(2048, heads=32, groups=16, key_dim=128, value_dim=128, taps=4), 36),
    # what transformers' KimiLinearConfig has by default, and the checkpoint's 7 layers of attention
    "kimi-linear-48b-a3b": _sizes(2304, 27, 32, 32, 192, 9216, 163_840)
    | _experts(256, 8, 1, 1024, dense=1)
    | _latents(128)
    | _recurrent(RecurrentLayer.kimi_delta(2304, heads=32, dim=128, taps=4), 20),
    # NVIDIA 2025, Nemotron-H, table 1: of 52 layers 24 are Mamba-2, 24 an ffn and 4 attention
    "nemotron-h-8b": _sizes(4096, 52, 32, 8, 128, 21_504, 131_072, gated=False, attention_layers=4, ffn_layers=24)
    | _recurrent(RecurrentLayer.mamba2(4096, heads=128, head_dim=64, groups=8, state=128, taps=4), 24),
    # the model card of IBM's Granite 4.0 H Small (2025): 4 attention layers of 40, 72 experts and shared ones
    "granite-4.0-h-small": _sizes(4096, 40, 32, 8, 128, 0, 100_352, tied=True)
    | _experts(72, 10, 2, 768)
    | _recurrent(RecurrentLayer.mamba2(4096, heads=128, head_dim=64, groups=1, state=128, taps=4), 36),
    "gpt-7b": _gpt(4096, 32, 32),
    "gpt-13b": _gpt(5120, 40, 40),
    "gpt-30b": _gpt(6656, 60, 52),
    "wlb-550m": _sizes(1536, 16, 12, 12, 128, 4096, 32_000),
    "tiny": _sizes(128, 2, 4, 2, 32, 352, 257),
}
