"""The models that have recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from seqpar.integrations.diffusers.forward import SharedForward
from seqpar.integrations.diffusers.recipe import ModelRecipe, tokens_of
from seqpar.integrations.diffusers.wrappers import (
    sharing_history,
    sharing_history_norm,
    sharing_packed,
    sharing_packed_norm,
    sharing_patches,
    sharing_rows,
    sharing_text_and_patches,
    sharing_text_angles,
    sharing_tuple,
)


def _timesteps(
    run: SharedForward, arguments: dict[str, Any], flat: bool = False, name: str = "timestep", stream: str = "image"
) -> dict[str, Any]:
    """The timesteps: one, one per sample, or one per token of a stream. flat: whether a model takes any shape."""
    timestep, samples = arguments[name], run.sizes.samples
    if flat:
        timestep = timestep.reshape(samples, -1) if timestep.numel() % samples == 0 else timestep.flatten()
    if timestep.dim() == 2 and timestep.shape[1] != 1:
        return {name: run.rows(timestep, 1, stream)}
    if timestep.numel() not in (1, samples):
        raise ValueError(
            f"diffusers: {name} {list(timestep.shape)}, expected one, {samples} of the samples, or "
            f"{[samples, *run.sizes.of((stream,))]} of the tokens"
        )
    return {}


def _timesteps_of_both(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The timesteps of video and audio, which are the video's if none are given, and the noise levels of samples."""
    for name in ("sigma", "audio_sigma"):
        if (level := arguments.get(name)) is not None and level.numel() != run.sizes.samples:
            raise ValueError(f"diffusers: {name} {list(level.shape)}, expected {run.sizes.samples} of the samples")
    audio = arguments.get("audio_timestep")
    arguments["audio_timestep"] = arguments["timestep"] if audio is None else audio
    return _timesteps(run, arguments, flat=True) | _timesteps(run, arguments, True, "audio_timestep", "audio")


def _rotary(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The angles of this rank's rows, cosines and sines."""
    angles = arguments.get("image_rotary_emb")
    return {} if angles is None else {"image_rotary_emb": tuple(run.rows(x, 0, "image") for x in angles)}


def _cut(sizes: Sequence[int], patch: Sequence[int]) -> int:
    """The number of patches."""
    return math.prod(n // p for n, p in zip(sizes, patch[-len(sizes) :], strict=True))


def _patches(model: nn.Module, arguments: Mapping[str, Any]) -> int:
    """The tokens of latents [B, C, (frames,) height, width]."""
    config: Any = model.config
    patch = config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    return _cut(arguments["hidden_states"].shape[2:], patch)


def _patches_of_frames(model: nn.Module, arguments: Mapping[str, Any]) -> int:
    """The tokens of latents [B, frames, C, height, width]."""
    return _patches(model, {"hidden_states": arguments["hidden_states"].transpose(1, 2)})


def _history(model: nn.Module, arguments: Mapping[str, Any]) -> int:
    """The tokens of past latents [B, C, frames, height, width], in patches that are larger the older they are."""
    config: Any = model.config
    count = 0
    for name, factor in (("short", 1), ("mid", 2), ("long", 4)):
        x = arguments.get(f"latents_history_{name}")
        if x is not None and arguments.get(f"indices_latents_history_{name}") is not None:
            # the older ones are padded to whole patches of one frame and two by two
            steps = (1, 1, 1) if factor == 1 else (factor, 2 * factor, 2 * factor)
            padded = [-(-n // step) * step for n, step in zip(x.shape[2:], steps, strict=True)]
            count += _cut(padded, [factor * p for p in config.patch_size])
    return count


_TEXT_AND_IMAGE = {"hidden_states": (1, "image"), "encoder_hidden_states": (1, "text")}
_IDS = {"img_ids": (-2, "image"), "txt_ids": (-2, "text")}
_TEXT_AND_PATCHES = {"encoder_hidden_states": (1, "text")}

_WAN = ModelRecipe(
    processors=("WanAttnProcessor",), shared={}, joint=("image",), cross=("attn2",), counts={"image": _patches},
    change=_timesteps, modules={"rope": partial(sharing_tuple, 1), "patch_embedding": sharing_patches},
    whole=("timestep", "encoder_hidden_states", "encoder_hidden_states_image", "attention_kwargs"),
)  # fmt: skip

RECIPES = {
    "FluxTransformer2DModel": ModelRecipe(
        processors=("FluxAttnProcessor",), shared=_TEXT_AND_IMAGE | _IDS, text="encoder_hidden_states",
        whole=("pooled_projections", "timestep", "guidance", "joint_attention_kwargs"),
    ),
    "BriaTransformer2DModel": ModelRecipe(
        processors=("BriaAttnProcessor",), shared=_TEXT_AND_IMAGE | _IDS, text="encoder_hidden_states",
        whole=("pooled_projections", "timestep", "guidance", "attention_kwargs"),
    ),
    "LongCatImageTransformer2DModel": ModelRecipe(
        processors=("LongCatImageAttnProcessor",), shared=_TEXT_AND_IMAGE | _IDS, text="encoder_hidden_states",
        whole=("timestep", "guidance"),
    ),
    "OvisImageTransformer2DModel": ModelRecipe(
        processors=("OvisImageAttnProcessor",), shared=_TEXT_AND_IMAGE | _IDS, text="encoder_hidden_states",
        whole=("timestep", "joint_attention_kwargs"),
    ),
    "Flux2Transformer2DModel": ModelRecipe(
        processors=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"), shared=_TEXT_AND_IMAGE | _IDS,
        text="encoder_hidden_states", whole=("timestep", "guidance", "joint_attention_kwargs"),
    ),
    "QwenImageTransformer2DModel": ModelRecipe(
        processors=("QwenDoubleStreamAttnProcessor2_0",), shared=_TEXT_AND_IMAGE, text="encoder_hidden_states",
        mask="encoder_hidden_states_mask", modules={"pos_embed": sharing_text_angles},
        settings={"zero_cond_t": (False,)},
        whole=("timestep", "img_shapes", "guidance", "attention_kwargs", "additional_t_cond"),
    ),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(
        _WAN, modules={**_WAN.modules, "vace_patch_embedding": sharing_patches},
        whole=(*_WAN.whole, "control_hidden_states", "control_hidden_states_scale"),
    ),
    "ChronoEditTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": replace(
        _WAN, processors=("SkyReelsV2AttnProcessor",), whole=(*_WAN.whole, "fps"),
        settings={"num_frame_per_block": (1,)},
    ),
    "CogVideoXTransformer3DModel": ModelRecipe(
        processors=("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"), shared=_TEXT_AND_PATCHES,
        text="encoder_hidden_states", counts={"image": _patches_of_frames}, change=_rotary,
        modules={"patch_embed": sharing_text_and_patches},
        whole=("timestep", "timestep_cond", "ofs", "image_rotary_emb", "attention_kwargs"),
    ),
    "HunyuanVideoTransformer3DModel": ModelRecipe(
        processors=("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0"), shared={}, text="encoder_hidden_states",
        cross=("context_embedder",), mask="encoder_attention_mask", masks=True, joint=("image", "text"),
        counts={"image": _patches},
        modules={
            "rope": partial(sharing_tuple, 0), "x_embedder": partial(sharing_rows, "image"),
            "context_embedder": partial(sharing_rows, "text"),
        },
        whole=("timestep", "encoder_hidden_states", "pooled_projections", "guidance", "attention_kwargs"),
        settings={"image_condition_type": (None, "latent_concat")},
    ),
    "SD3Transformer2DModel": ModelRecipe(
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"), shared=_TEXT_AND_PATCHES,
        text="encoder_hidden_states", joint=("image", "text"),
        counts={"image": _patches},
        modules={"pos_embed": partial(sharing_rows, "image")},
        whole=("timestep", "pooled_projections", "joint_attention_kwargs", "skip_layers"),
        settings={"dual_attention_layers": ((), [])},
    ),
    "LTXVideoTransformer3DModel": ModelRecipe(
        processors=("LTXVideoAttnProcessor",), shared={"hidden_states": (1, "image")}, joint=("image",),
        cross=("attn2",), modules={"rope": partial(sharing_tuple, 1)}, change=partial(_timesteps, flat=True),
        whole=(
            "timestep", "encoder_hidden_states", "encoder_attention_mask", "num_frames", "height", "width",
            "rope_interpolation_scale", "video_coords", "attention_kwargs",
        ),
    ),
    "LTX2VideoTransformer3DModel": ModelRecipe(
        processors=("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"), joint=("image",),
        shared={
            "hidden_states": (1, "image"), "video_keyframes_mask": (1, "image"), "audio_hidden_states": (1, "audio"),
        },
        attends={
            "audio_attn1": (("audio",), ("audio",)), "audio_to_video_attn": (("image",), ("audio",)),
            "video_to_audio_attn": (("audio",), ("image",)),
        },
        cross=("attn2", "audio_attn2"), exits={"proj_out": "image", "audio_proj_out": "audio"},
        counts={"image": tokens_of("hidden_states"), "audio": tokens_of("audio_hidden_states")},
        modules={
            "rope": partial(sharing_tuple, -2), "cross_attn_rope": partial(sharing_tuple, -2),
            "audio_rope": partial(sharing_tuple, -2, stream="audio"),
            "cross_attn_audio_rope": partial(sharing_tuple, -2, stream="audio"),
        },
        change=_timesteps_of_both,
        whole=(
            "encoder_hidden_states", "audio_encoder_hidden_states", "timestep", "audio_timestep", "sigma",
            "audio_sigma", "encoder_attention_mask", "audio_encoder_attention_mask", "num_frames", "height", "width",
            "fps", "audio_num_frames", "video_coords", "audio_coords", "isolate_modalities",
            "spatio_temporal_guidance_blocks", "perturbation_mask", "use_cross_timestep", "attention_kwargs",
        ),
    ),
    "HeliosTransformer3DModel": ModelRecipe(
        processors=("HeliosAttnProcessor",), shared={}, joint=("history", "image"), cross=("attn2",),
        counts={"image": _patches, "history": _history},
        modules={"blocks.*": sharing_history, "norm_out": sharing_history_norm},
        whole=(
            "timestep", "encoder_hidden_states", "indices_hidden_states", "attention_kwargs",
            *(f"{what}_history_{age}" for what in ("indices_latents", "latents") for age in ("short", "mid", "long")),
        ),
    ),
    "MiniMaxH3Transformer3DModel": ModelRecipe(
        processors=("MiniMaxH3AttnProcessor",), shared={}, joint=("image",), cross=("token_refiner",),
        counts={"image": tokens_of("position_ids", 0)}, exits={"proj_out": "image", "audio_proj_out": "image"},
        modules={
            "rope": partial(sharing_tuple, 0), "transformer_blocks.*": sharing_packed, "norm_out": sharing_packed_norm,
        },
        whole=(
            "audio_hidden_states", "encoder_hidden_states", "timestep", "timestep_indices", "token_tags",
            "position_ids", "video_indices", "audio_indices", "text_indices", "attention_kwargs",
        ),
    ),
}  # fmt: skip
