"""Signs in a transformers config that layers see other rows outside attention.

The config is all there is when a model was loaded with ``attn_implementation="seqpar"`` without `seqpar.parallelize`,
which also looks at the modules and tries the model on a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from seqpar.private.transformers import SLICES_MASKS, can_set_attention, is_stateful

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATE = "it carries a state from token to token (a recurrent or state space model)"
INDEXED_LAYERS = {"indexed_attention"}  # which choose their keys
HYBRID_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "mlp", "moe"}  # of models with recurrent layers
CROSS = "it has cross-attention (an encoder and a decoder)"
NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"
EDITED, EDITING = "its attention edits its mask, which is the handle of a plan here", {"doge"}
ASKED = "output_router_logits"
LONGEST_POSITION = ("dynamic", "longrope")  # rotary types whose angles depend on the longest position
# The inputs that the towers of each kind take, under these names in most models; with further inputs, by the
# signature of get_*_features.
MEDIA = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}

# The names under which configs of transformers, or of models' own code, have their sizes. Most name them as the first
# of each, or map that name to theirs by ``attribute_map``.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads", "attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")


class PlanState(NamedTuple):
    """The properties of a model that plans depend on and that may change: recomputation, and the device type."""

    recomputed: bool
    device: str


def mixing_layers(config: PreTrainedConfig, *, recurrent: bool = False, shared: bool = False) -> list[str]:
    """The parts of a (text) config's model that see rows of other ranks outside attention; empty if none is known.

    recurrent: whether seqpar computes its recurrent layers, so that they are not among those parts. shared: whether it
    shares out the batch, so that balance losses, the longest position, places and chosen keys are those of all ranks.
    """
    reasons = []
    model = _class_of(type(config))
    if is_stateful(model, False) and not recurrent:
        reasons.append(STATE)
    served = ATTENTION_LAYERS | (HYBRID_LAYERS if recurrent else set()) | (INDEXED_LAYERS if shared else set())
    if other := set(getattr(config, "layer_types", None) or ()) - served:
        reasons.append(f"it has layers of types {sorted(other)}")
    if getattr(config, "token_dropout", False) and not shared:
        reasons.append("its embeddings are scaled by the share of mask tokens in a row (token_dropout=True)")
    for kind, place in _ropes(config):
        if by_longest(kind, config) and not shared:
            reasons.append(f"its rotary embedding {place} depends on the longest position of a rank's rows ({kind})")
    tuned = getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", ()))
    if tuned and not shared:
        reasons.append("queries are scaled by their place in a rank's rows (attn_temperature_tuning=True)")
    return reasons


def _class_of(kind: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The base model of a class of configs; None if transformers has none, or does not export the one that it names."""
    try:
        return MODEL_MAPPING.get(kind, None)  # type: ignore[no-any-return]
    except ValueError:
        return None


@cache
def slices_masks(kind: type[PreTrainedConfig]) -> bool:
    """Whether models of such configs slice masks [1, 1, rows, keys], as Gemma 4 does before layers that share keys."""
    return hasattr(_class_of(kind), SLICES_MASKS)


def unserved_attention(config: PreTrainedConfig) -> list[str]:
    """Why a registered attention function cannot serve a config's model, although transformers accepts the name."""
    reasons = []
    model = _class_of(type(config))
    if model is not None and not can_set_attention(model)():
        reasons.append(NO_INTERFACE)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        reasons.append(CROSS)
    if config.model_type in EDITING:
        reasons.append(EDITED)
    return reasons


def text_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model of tokens inside a model of images or sound; any other model itself."""
    # a class with another head may have the default, "text", though its base model takes images
    kinds = [each.input_modalities for each in (model, model.base_model)]
    mixed = any("text" in each for each in kinds if not isinstance(each, str))
    if not mixed or model.config.get_text_config() is model.config:
        return model
    text = model
    while isinstance(inner := text.get_decoder(), PreTrainedModel) and inner is not text:
        text = inner
    return text


@cache
def takes_any(kind: type[PreTrainedModel]) -> bool:
    """Whether a class's forward takes any keyword."""
    return any(each.kind is each.VAR_KEYWORD for each in signature(kind.forward).parameters.values())


def caching(model: PreTrainedModel) -> dict[str, Any]:
    """The keyword that stops a model from making a cache, if it can make one."""
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}


def hiding(model: PreTrainedModel) -> dict[str, Any]:
    """The keyword that stops a model from returning hidden states, if its config asks for them."""
    asked = any(config.output_hidden_states for config in (model.config, model.config.get_text_config()))
    return {"output_hidden_states": False} if asked else {}


def nested(old: PreTrainedConfig, new: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """A config and its nested configs, each with its counterpart in another config."""
    yield old, new
    for name, value in old.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            yield from nested(value, new.__dict__[name])


def by_longest(kind: object, config: Any) -> bool:
    """Whether the angles of a rotary type depend on the longest position; PhiMoE's do for every type but one."""
    scaled = "long_mscale" in (getattr(config, "rope_parameters", None) or {})
    return kind in LONGEST_POSITION or (scaled and kind != "default")


def _ropes(config: PreTrainedConfig) -> Iterable[tuple[str, str]]:
    """Rotary types, and the place of each in the config."""
    said: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for name, value in [("", said), *said.items()]:
        if isinstance(value, dict) and "rope_type" in value:
            yield value["rope_type"], name or "of all layers"
