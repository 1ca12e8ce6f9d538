"""Models of the table under short names, with what pipelines ask of them besides, and the inputs of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from tests.integrations.diffusers_classes import Options, x
from tests.integrations.diffusers_classes import made as made_of

TEXT, SAMPLES, TOKENS = 5, 2, 30  # tokens of a video


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mask(b: int, text: int, hidden: int, dtype: torch.dtype = torch.double) -> Tensor:
    """Which tokens of a text are seen: all but the last ones of the first sample."""
    flags = torch.ones(b, text, dtype=dtype)
    flags[0, text - hidden :] = 0
    return flags


def with_gaps(b: int, text: int) -> Options:
    flags = mask(b, text, 2)
    flags[1, 1] = 0
    return {"encoder_hidden_states_mask": flags}


def of_image(b: int, text: int) -> Options:
    """Embeddings of an image; beside them text has the length that the model takes for granted."""
    return {"encoder_hidden_states": x(b, 512, 8), "encoder_hidden_states_image": x(b, 3, 8)}


def guided(b: int, text: int) -> Options:
    """What LTX-2.3 takes: times of tokens, and guided samples."""
    return {
        "timestep": 500 * x(b, TOKENS).abs(), "sigma": 500 * x(b).abs(), "use_cross_timestep": True,
        "audio_timestep": 500 * x(b, 11).abs(), "spatio_temporal_guidance_blocks": [1],
        "perturbation_mask": torch.arange(b).double(), "video_keyframes_mask": x(b, TOKENS, 1),
    }  # fmt: skip


def without_history(b: int, text: int) -> Options:
    ages = [f"latents_history_{age}" for age in ("short", "mid", "long")]
    return dict.fromkeys([*ages, *(f"indices_{age}" for age in ages)])


def padded(name: str, hidden: int) -> Callable[[int, int], Options]:
    return lambda b, text: {name: mask(b, text, min(hidden, text - 1), torch.long)}


def plain(b: int, text: int) -> Options:
    return {}


NEWER: Options = {
    "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "rope_type": "split", "perturbed_attn": True, "use_keyframes_abs_pos_embedding": True,
}  # fmt: skip

# name -> class, more arguments of its constructor, more inputs for so many samples and words of text
MODELS: dict[str, tuple[str, Options, Callable[[int, int], Options]]] = {
    "flux": ("FluxTransformer2DModel", {"num_single_layers": 2}, plain),
    "flux2": ("Flux2Transformer2DModel", {}, plain),
    "qwen": ("QwenImageTransformer2DModel", {}, lambda b, text: {"encoder_hidden_states_mask": mask(b, text, 0)}),
    "qwen masked": ("QwenImageTransformer2DModel", {}, with_gaps),
    "wan": ("WanTransformer3DModel", {"cross_attn_norm": True}, plain),
    "wan tokenwise": ("WanTransformer3DModel", {}, lambda b, text: {"timestep": 500 * x(b, TOKENS).abs()}),
    "wan image": ("WanTransformer3DModel", {"image_dim": 8, "added_kv_proj_dim": 24}, of_image),
    "ltx": ("LTXVideoTransformer3DModel", {}, padded("encoder_attention_mask", 1)),
    "vace": ("WanVACETransformer3DModel", {}, plain),
    "chrono": ("ChronoEditTransformer3DModel", {}, plain),
    "ovis": ("OvisImageTransformer2DModel", {}, plain),
    "longcat": ("LongCatImageTransformer2DModel", {}, plain),
    "cogvideox": ("CogVideoXTransformer3DModel", {}, plain),
    "cogvideox 2b": (
        "CogVideoXTransformer3DModel", {"use_rotary_positional_embeddings": False},
        lambda b, text: {"image_rotary_emb": None}),
    "hunyuan": ("HunyuanVideoTransformer3DModel", {}, padded("encoder_attention_mask", 0)),
    "sd3": ("SD3Transformer2DModel", {}, plain),
    "hunyuan masked": ("HunyuanVideoTransformer3DModel", {}, padded("encoder_attention_mask", 2)),
    "bria": ("BriaTransformer2DModel", {}, plain),
    "skyreels": ("SkyReelsV2Transformer3DModel", {}, plain),
    "ltx2": ("LTX2VideoTransformer3DModel", {}, padded("encoder_attention_mask", 1)),
    "ltx2 newer": ("LTX2VideoTransformer3DModel", NEWER, guided),
    "helios": ("HeliosTransformer3DModel", {"guidance_cross_attn": True}, plain),
    "helios alone": ("HeliosTransformer3DModel", {"guidance_cross_attn": True}, without_history),
    "helios amplified": ("HeliosTransformer3DModel", {"is_amplify_history": True}, plain),
    "minimax": ("MiniMaxH3Transformer3DModel", {}, plain),
}  # fmt: skip


def made(
    name: str, dtype: torch.dtype = torch.float64, *, samples: int = SAMPLES, text: int = TEXT, audio: int = 7
) -> tuple[Any, Options]:  # fmt: skip
    """A model with random weights, and inputs of one call."""
    kind, options, more = MODELS[name]
    if "cogvideox" in name:
        options = options | {"max_text_seq_length": text}
    model, inputs = made_of(kind, samples, dtype, **options)
    inputs = packed(text, audio) if name == "minimax" else inputs | more(samples, text)
    inputs = {key: resized(value, {7: text, 11: audio}) for key, value in inputs.items()}
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return model, cast


def resized(value: Any, sizes: dict[int, int]) -> Any:
    """An input with as many tokens of text and audio as the caller wants. sizes: of the table -> of the caller."""
    if isinstance(value, int):
        return sizes.get(value, value)
    for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        value = value.narrow(dim, 0, sizes.get(size, size))
    return value


def packed(text: int, audio: int) -> Options:
    """Inputs of MiniMax H3, whose rows of text, video and audio are packed in an order of the caller's."""
    counts = 15, text, audio
    whole = sum(counts)
    video, words, sounds = (rows.sort().values for rows in torch.randperm(whole).split(counts))
    tags = torch.zeros(whole, dtype=torch.long)
    tags[words], tags[sounds] = 1, 2
    return {
        "hidden_states": x(SAMPLES, 15, 8), "audio_hidden_states": x(SAMPLES, audio, 3),
        "encoder_hidden_states": x(SAMPLES, text, 8), "timestep": torch.tensor([0.0, 0.7]).double(),
        "timestep_indices": torch.arange(whole) % 2, "token_tags": tags, "position_ids": 9 * x(whole, 3).abs(),
        "video_indices": video, "audio_indices": sounds, "text_indices": words,
    }  # fmt: skip


def loss_of(model: nn.Module, inputs: Options) -> tuple[Tensor, Tensor]:
    """The output, of a model with several all of them side by side, and the loss."""
    several = model(**inputs, return_dict=False)
    out = several[0] if len(several) == 1 else torch.cat([each.flatten(1) for each in several], 1)
    target = random(*out.shape, seed=9).to(out.dtype)
    return out.detach(), (out - target).square().mean()
