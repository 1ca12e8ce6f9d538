"""Fields of a `ModelShape` from a Hugging Face config, read by name: transformers itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Decoders whose blocks this file knows: softmax attention, then a gated ffn or experts.
DENSE = ("gemma2", "gemma3", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
SPARSE = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
# Decoders that tie head and embedding unless their config says otherwise.
TIED = ("gemma2", "gemma3", "gemma3_text")
# Layers per pattern of windows, and which of them see all keys, for configs without a list of layers.
PATTERNS = {"gemma2": (2, 1), "gemma3": (6, 5), "gemma3_text": (6, 5), "gpt_oss": (2, 1)}


class _Config:
    """A config's entries by name, and the names that were missing."""

    def __init__(self, entries: Mapping[str, Any], kind: str) -> None:
        self.entries, self.kind = entries, kind
        self.missing: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these entries that exists and is not None."""
        return next((self.entries[n] for n in names if self.entries.get(n) is not None), default)

    def need(self, *names: str) -> Any:
        """As `get`; a missing entry is noted, and 1 stands in for it until `check`."""
        value = self.get(*names)
        if value is None:
            self.missing.append(" or ".join(names))
        return 1 if value is None else value

    def check(self) -> None:
        """Raise ValueError naming all missing entries."""
        if self.missing:
            raise ValueError(
                f"the config of model_type {self.kind!r} lacks {', '.join(self.missing)}; "
                "give a full config, or build a ModelShape"
            )


def fields(config: object) -> dict[str, Any]:
    """Arguments of `ModelShape`. Raises ValueError for a config of another architecture, or one that lacks entries."""
    entries = _entries(config)
    outer = str(entries.get("model_type", ""))
    name = entries.get("_name_or_path") or entries.get("name_or_path") or outer
    entries = _entries(entries.get("text_config") or entries)
    kind = str(entries.get("model_type") or outer)
    if kind not in DENSE + SPARSE:
        known = ", ".join(sorted(DENSE + SPARSE))
        raise ValueError(f"model_type {kind!r} is not known; known: {known}; or build a ModelShape")
    c = _Config(entries, kind)
    values: dict[str, Any] = {
        "name": str(name),
        "hidden": c.need("hidden_size"),
        "layers": c.need("num_hidden_layers"),
        "heads": c.need("num_attention_heads"),
        "vocab": c.need("vocab_size"),
        "dtype": str(c.get("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch."),
        "tied": bool(c.get("tie_word_embeddings", default=kind in TIED)),
    }
    values |= _heads(c, values) | (_experts(c, values) if kind in SPARSE else {"ffn": c.need("intermediate_size")})
    values["windows"] = _windows(c, values["layers"])
    c.check()
    return values


def _entries(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ValueError(f"expected a Hugging Face config or its dict, got {type(config).__name__}")
    return dict(to_dict())


def _heads(c: _Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Key heads and dims. In models with low-rank projections, every query head has its own keys."""
    if c.kind.startswith("deepseek"):
        rope = c.need("qk_rope_head_dim")
        return {
            "kv_heads": values["heads"],
            "dim": c.need("qk_nope_head_dim") + rope,
            "v_dim": c.need("v_head_dim"),
            "rope_dim": rope,
            "kv_rank": c.need("kv_lora_rank"),
            "q_rank": c.get("q_lora_rank"),
        }
    return {
        "kv_heads": c.get("num_key_value_heads", default=values["heads"]),
        "dim": c.get("head_dim", default=values["hidden"] // values["heads"]),
    }


def _experts(c: _Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a sparse model; layers without experts must come first."""
    separate = c.kind not in ("gpt_oss", "mixtral")
    experts = {
        "experts": c.need("num_local_experts", "num_experts", "n_routed_experts"),
        "active_experts": c.need("num_experts_per_tok", "experts_per_token"),
        "expert_ffn": c.need("moe_intermediate_size" if separate else "intermediate_size"),
    }
    shared = c.get("n_shared_experts", default=0)
    if c.get("shared_expert_intermediate_size"):
        shared, left = divmod(c.get("shared_expert_intermediate_size"), experts["expert_ffn"])
        if left:
            raise ValueError("shared_expert_intermediate_size must be a multiple of moe_intermediate_size")
    step, dense = c.get("decoder_sparse_step", default=1), set(c.get("mlp_only_layers", default=()))
    dense |= set(range(c.get("first_k_dense_replace", default=0)))
    if step != 1 or dense != set(range(len(dense))):
        raise ValueError(
            f"dense layers among layers with experts (decoder_sparse_step {step}, mlp_only_layers {sorted(dense)}) "
            "are not known except as the first layers; build a ModelShape"
        )
    return experts | {
        "shared_experts": shared,
        "dense_layers": len(dense),
        "ffn": c.need("intermediate_size") if dense else 0,
    }


def _windows(c: _Config, layers: int) -> tuple[int | None, ...]:
    """Keys to the left of its own that each layer's query sees; transformers' `sliding_window` is one more."""
    size = c.get("sliding_window")
    kinds = c.get("layer_types")
    if size is None or c.get("use_sliding_window") is False:
        unknown = set(kinds or ()) - {"full_attention"}
        if unknown:
            raise ValueError(
                f"layer_types {sorted(unknown)} need a sliding_window, or are not known; build a ModelShape"
            )
        return (None,)
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types {sorted(unknown)} are not known; build a ModelShape")
        windows = tuple(size - 1 if kind == "sliding_attention" else None for kind in kinds)
    elif c.kind in PATTERNS:
        period, full = PATTERNS[c.kind]
        period = c.get("sliding_window_pattern", default=period)
        full = min(full, period - 1)
        windows = tuple(None if layer % period == full else size - 1 for layer in range(layers))
    elif c.kind.startswith("qwen"):
        first = c.get("max_window_layers", default=0)
        windows = tuple(size - 1 if layer >= first else None for layer in range(layers))
    else:
        windows = (size - 1,) * layers
    # The shortest cycle is equivalent to the list of all layers.
    for period in range(1, len(windows)):
        if all(window == windows[at % period] for at, window in enumerate(windows)):
            return windows[:period]
    return windows
