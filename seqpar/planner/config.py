"""Fields of a `ModelShape` from a Hugging Face config, read by name: transformers itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seqpar.plan.recurrence import RecurrentLayer

# Decoders whose blocks this file knows: softmax attention, then a gated ffn or experts.
DENSE = ("gemma2", "gemma3", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
SPARSE = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
# Decoders with recurrent layers, alone or among attention.
DELTA = ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")
SELECTIVE = ("falcon_mamba", "jamba", "mamba")
CONVOLVED = ("lfm2", "lfm3")
HYBRID = DELTA + MAMBA + SELECTIVE + CONVOLVED + ("minimax", "recurrent_gemma")
UNATTENDED = ("falcon_mamba", "mamba", "mamba2")  # alone
# What a layer holds, by its name in a list of layer types: attention, a recurrence, an ffn alone.
ATTENTION = ("attention", "full_attention", "sliding_attention")
RECURRENT = ("conv", "linear_attention", "mamba")
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
# Decoders that tie head and embedding unless their config says otherwise.
TIED = ("gemma2", "gemma3", "gemma3_text", "lfm2", "lfm3", "recurrent_gemma")
NORMALISED = ("gemma3", "olmo_hybrid", "qwen3")  # how the names begin of decoders that normalise queries and keys
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
    if kind not in DENSE + SPARSE + HYBRID:
        known = ", ".join(sorted(DENSE + SPARSE + HYBRID))
        raise ValueError(f"model_type {kind!r} is not known; known: {known}; or build a ModelShape")
    c = _Config(entries, kind)
    types = _types(c) if kind in HYBRID else None
    layers = c.need("num_hidden_layers") if types is None else len(types)
    values: dict[str, Any] = {
        "name": str(name),
        "hidden": c.need("hidden_size"),
        "layers": layers,
        "vocab": c.need("vocab_size"),
        "dtype": str(c.get("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch."),
        "tied": bool(c.get("tie_word_embeddings", "tie_embedding", default=kind in TIED)),
    }
    if kind.startswith(NORMALISED):
        values["qk_norm"] = True
    if types is not None:
        values |= _recurrent(c, values, types)
    if kind in UNATTENDED:  # no attention: its sizes are those of the states
        layer = values["recurrent"]
        values |= dict(heads=layer.heads, kv_heads=1, dim=layer.key_dim, ffn=0, ffn_layers=0)
    else:
        values["heads"] = c.need("num_attention_heads")
        values |= _heads(c, values) | (_experts(c, values) if _sparse(c) else {"ffn": _ffn(c)})
        values["windows"] = _windows(c, None if types is None else [t for t in types if t in ATTENTION], layers)
    if kind == "nemotron_h":
        values |= _alone(c, types or [])
    c.check()
    return values


def _types(c: _Config) -> list[str]:
    """What each layer of a hybrid model holds."""
    if c.get("hybrid_override_pattern") is not None and c.get("layers_block_type", "layer_types") is None:
        return [PATTERN.get(letter, letter) for letter in c.get("hybrid_override_pattern")]
    types = c.get("layers_block_type", "layer_types")
    linear = c.get("linear_attn_config", default={})
    layers = range(c.need("num_hidden_layers")) if types is None else range(len(types))
    if "full_attn_layers" in linear:  # numbered from 1
        return ["full_attention" if n + 1 in linear["full_attn_layers"] else "linear_attention" for n in layers]
    if types is not None:
        return list(types)
    if c.kind == "falcon_h1":
        return ["hybrid"] * len(layers)
    if c.kind in UNATTENDED:
        return ["mamba"] * len(layers)
    if c.kind == "jamba":
        period, offset = c.get("attn_layer_period", default=8), c.get("attn_layer_offset", default=4)
        return ["attention" if n % period == offset else "mamba" for n in layers]
    if c.kind == "recurrent_gemma":
        kinds = c.get("block_types", default=("recurrent", "recurrent", "attention"))
        named = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        return [named.get(kind, kind) for kind in (kinds[n % len(kinds)] for n in layers)]
    if c.kind.startswith("qwen3"):
        every = c.get("full_attention_interval", default=4)
        return ["linear_attention" if (n + 1) % every else "full_attention" for n in layers]
    if c.kind == "bamba":
        return ["attention" if n in c.get("attn_layer_indices", default=()) else "mamba" for n in layers]
    if c.kind == "lfm2":
        return ["attention" if n in c.get("full_attn_idxs", default=layers) else "conv" for n in layers]
    c.need("layer_types")
    return []


def _recurrent(c: _Config, values: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """The recurrent layer of a hybrid model, and how many layers have it, attention, and an ffn."""
    unknown = set(types) - {*ATTENTION, *RECURRENT, "hybrid", "mlp", "moe"}
    if unknown:
        raise ValueError(f"layer types {sorted(unknown)} of {c.kind!r} are not known; build a ModelShape")
    hidden, linear = values["hidden"], c.get("linear_attn_config", default={})
    if c.kind in ("bailing_hybrid", "kimi_linear"):
        layer = RecurrentLayer.kimi_delta(
            hidden,
            heads=linear.get("num_heads") or c.need("linear_num_heads"),
            dim=linear.get("head_dim") or c.need("linear_head_dim"),
            taps=linear.get("short_conv_kernel_size") or c.need("linear_conv_kernel_dim"),
        )
        if c.kind == "bailing_hybrid":  # whose decay and gate are products of the input, of no low rank
            layer = replace(layer, projections=hidden * (6 * layer.heads * layer.key_dim + layer.heads))
    elif c.kind in DELTA:
        layer = RecurrentLayer.gated_delta(
            hidden, heads=c.need("linear_num_value_heads"), groups=c.need("linear_num_key_heads"),
            key_dim=c.need("linear_key_head_dim"), value_dim=c.need("linear_value_head_dim"),
            taps=c.need("linear_conv_kernel_dim"),
        )  # fmt: skip
    elif c.kind in CONVOLVED:
        layer = RecurrentLayer.short_convolution(hidden, taps=c.need("conv_L_cache"))
    elif c.kind in SELECTIVE:
        rank = c.get("mamba_dt_rank", "time_step_rank", default="auto")
        inner = c.get("mamba_expand", "expand", default=2) * hidden
        layer = RecurrentLayer.mamba(
            hidden, inner=c.get("intermediate_size", default=inner) if c.kind in UNATTENDED else inner,
            state=c.need("mamba_d_state", "state_size"), rank=-(-hidden // 16) if rank == "auto" else rank,
            taps=c.need("mamba_d_conv", "conv_kernel"),
        )  # fmt: skip
    elif c.kind == "recurrent_gemma":
        layer = RecurrentLayer.rg_lru(
            hidden, width=c.get("lru_width", default=hidden), heads=c.need("num_attention_heads"),
            taps=c.need("conv1d_width"),
        )  # fmt: skip
    elif c.kind == "minimax":
        heads = c.need("num_attention_heads")
        layer = RecurrentLayer.lightning(hidden, heads=heads, dim=c.get("head_dim", default=hidden // heads))
    else:
        heads = c.need("mamba_n_heads", "mamba_num_heads", "num_heads")
        inner = c.get("mamba_d_ssm", default=c.get("mamba_expand", "expand", default=2) * hidden)
        dim = c.get("mamba_d_head", "mamba_head_dim", *(["head_dim"] if c.kind == "mamba2" else []), default="auto")
        layer = RecurrentLayer.mamba2(
            hidden, heads=heads, head_dim=inner // heads if dim == "auto" else dim,
            groups=c.need("mamba_n_groups", "n_groups"), state=c.need("mamba_d_state", "ssm_state_size", "state_size"),
            taps=c.need("mamba_d_conv", "conv_kernel"),
        )  # fmt: skip
    both = types.count("hybrid")
    recurrent = both + sum(t in RECURRENT for t in types)
    attention = both + sum(t in ATTENTION for t in types)
    return {
        "recurrent": layer if recurrent else None,
        "recurrent_layers": recurrent,
        "attention_layers": None if attention + recurrent == len(types) else attention,
        "output_gate": c.kind.startswith("qwen3"),
    }


def _alone(c: _Config, types: list[str]) -> dict[str, Any]:
    """The layers of Nemotron-H that are an ffn or experts alone, without a gate."""
    ffns, experts = types.count("mlp"), types.count("moe")
    if experts and (ffns or c.get("moe_latent_size") is not None):
        raise ValueError(
            f"{ffns} layers with an ffn and {experts} with experts, or experts of a latent size, are not known; "
            "build a ModelShape"
        )
    return {"ffn_layers": ffns + experts, "gated": False}


def _ffn(c: _Config) -> int:
    """The inner size of an ffn."""
    size: int = c.need("shared_intermediate_size" if c.kind == "granitemoehybrid" else "intermediate_size")
    if c.kind == "lfm2" and c.get("block_auto_adjust_ff_dim", default=True):
        size = int(c.get("block_ffn_dim_multiplier", default=1.0) * (2 * size // 3))
        multiple = c.get("block_multiple_of", default=256)
        size = -(-size // multiple) * multiple
    return size // 2 if c.kind == "recurrent_gemma" else size  # its config counts gate and up together


def _sparse(c: _Config) -> bool:
    """Whether a model has experts."""
    if c.kind == "granitemoehybrid":
        return bool(c.get("num_local_experts", default=0))
    if c.kind == "nemotron_h":
        return "moe" in _types(c)
    if c.kind == "jamba":
        return int(c.get("num_experts", default=16)) > 1
    return c.kind in (*SPARSE, "bailing_hybrid", "kimi_linear", "minimax", "qwen3_5_moe_text", "qwen3_next")


def _entries(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ValueError(f"expected a Hugging Face config or its dict, got {type(config).__name__}")
    return dict(to_dict())


def _heads(c: _Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Key heads and dims. In models with low-rank projections, every query head has its own keys."""
    if c.kind.startswith("deepseek") or c.kind in ("bailing_hybrid", "glm4_moe_lite", "kimi_linear"):
        rope = c.need("qk_rope_head_dim")
        return {
            "kv_heads": values["heads"],
            "dim": c.need("qk_nope_head_dim") + rope,
            "v_dim": c.need("v_head_dim"),
            "rope_dim": rope,
            "kv_rank": c.need("kv_lora_rank"),
            "q_rank": c.get("q_lora_rank"),
            "latents": True,
        }
    return {
        "kv_heads": c.get("num_key_value_heads", default=values["heads"]),
        "dim": c.get("head_dim", default=values["hidden"] // values["heads"]),
    }


def _experts(c: _Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a sparse model; layers without experts must come first."""
    separate = c.kind not in ("gpt_oss", "granitemoehybrid", "jamba", "minimax", "mixtral")
    experts = {
        "experts": c.need("num_local_experts", "num_experts", "n_routed_experts"),
        "active_experts": c.need("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
        "expert_ffn": c.need("moe_intermediate_size" if separate else "intermediate_size"),
    }
    shared = c.get("n_shared_experts", "num_shared_experts", default=0)
    names = "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
    if size := c.get(*names):
        shared, left = divmod(size, experts["expert_ffn"])
        if left:
            raise ValueError(
                f"shared experts of {size} must be as large as some of {experts['expert_ffn']}; build a ModelShape"
            )
    step, dense = c.get("decoder_sparse_step", default=1), set(c.get("mlp_only_layers", default=()))
    dense |= set(range(c.get("first_k_dense_replace", default=0)))
    dense |= {n for n, kind in enumerate(c.get("mlp_layer_types", default=())) if kind == "dense"}
    if c.kind == "jamba":  # dense layers are counted wherever they are
        step, offset = c.get("expert_layer_period", default=2), c.get("expert_layer_offset", default=1)
        dense = {n for n in range(values["layers"]) if n % step != offset}
    elif step != 1 or dense != set(range(len(dense))):
        raise ValueError(
            f"dense layers among layers with experts (decoder_sparse_step {step}, mlp_only_layers {sorted(dense)}) "
            "are not known except as the first layers; build a ModelShape"
        )
    return experts | {
        "shared_experts": shared,
        "dense_layers": len(dense),
        "ffn": c.need("intermediate_size") if dense else 0,
    }


def _windows(c: _Config, kinds: list[str] | None, layers: int) -> tuple[int | None, ...]:
    """Keys to the left of its own that each layer's query sees; transformers' `sliding_window` is one more.

    kinds: of the layers with attention, for hybrid models.
    """
    size = c.get("sliding_window", "attention_window_size")
    kinds = c.get("layer_types") if kinds is None else kinds
    if size is None or c.get("use_sliding_window") is False:
        unknown = set(kinds or ()) - {"attention", "full_attention"}
        if unknown:
            raise ValueError(
                f"layer_types {sorted(unknown)} need a sliding_window, or are not known; build a ModelShape"
            )
        return (None,)
    if kinds is not None:
        unknown = set(kinds) - set(ATTENTION)
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
