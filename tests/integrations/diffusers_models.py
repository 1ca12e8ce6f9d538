"""Small models of diffusers and the inputs of one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")


transformer_flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")


TEXT, SAMPLES = 5, 2
GRID = (3, 5)  # of an image: 15 tokens, which 2 and 4 do not divide
VIDEO = (3, 2, 5)

# settings that copies of these models share
LIKE_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
}  # fmt: skip
LIKE_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 12,
    "num_attention_heads": 3, "joint_attention_dim": 8, "axes_dims_rope": (4, 4, 4),
}  # fmt: skip


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ids(height: int, width: int, axes: int) -> Tensor:
    grid = torch.zeros(height, width, axes)
    grid[..., 1], grid[..., 2] = torch.arange(height)[:, None], torch.arange(width)
    return grid.reshape(height * width, axes).double()


def flux(text: int = TEXT, samples: int = SAMPLES, grid: tuple[int, int] = GRID) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=12, num_attention_heads=3,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 4), guidance_embeds=True,
    )  # fmt: skip
    return model, {
        "hidden_states": random(samples, grid[0] * grid[1], 4, seed=1),
        "encoder_hidden_states": random(samples, text, 8, seed=2), "pooled_projections": random(samples, 8, seed=3),
        "timestep": torch.linspace(0.3, 0.7, samples).double(), "guidance": torch.full((samples,), 3.5).double(),
        "img_ids": ids(*grid, 3), "txt_ids": torch.zeros(text, 3).double(),
    }  # fmt: skip


def flux2(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, timestep_guidance_channels=8, axes_dims_rope=(4, 4, 4, 4), mlp_ratio=2.0,
    )  # fmt: skip
    return model, {
        "hidden_states": random(samples, 15, 4, seed=1), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "timestep": torch.linspace(0.3, 0.7, samples).double(), "guidance": torch.full((samples,), 3.5).double(),
        "img_ids": ids(*GRID, 4).expand(samples, -1, -1), "txt_ids": torch.zeros(samples, text, 4).double(),
    }  # fmt: skip


def qwen(text: int = TEXT, samples: int = SAMPLES, masked: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=8, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    valid = torch.ones(samples, text)
    if masked:
        valid[0, -2:], valid[1, 1] = 0, 0
    return model, {
        "hidden_states": random(samples, 15, 4, seed=1), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "encoder_hidden_states_mask": valid, "timestep": torch.linspace(0.3, 0.7, samples).double(),
        "img_shapes": [(1, *GRID)] * samples,
    }  # fmt: skip


def wan(
    text: int = TEXT, samples: int = SAMPLES, tokenwise: bool = False, image: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        **LIKE_WAN,
        image_dim=8 if image else None, added_kv_proj_dim=24 if image else None,
    )  # fmt: skip
    # beside embeddings of an image, text has the length that the model takes for granted
    more = {"encoder_hidden_states_image": random(samples, image, 8, seed=5)} if image else {}
    text = 512 if image else text
    f, h, w = VIDEO
    shape = (samples, f * h * w) if tokenwise else (samples,)
    return model, {
        "hidden_states": random(samples, 4, f, 2 * h, 2 * w, seed=1),
        "encoder_hidden_states": random(samples, text, 8, seed=2), "timestep": random(*shape, seed=4).abs() * 500,
    } | more  # fmt: skip


def ltx(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=2, caption_channels=8,
    )  # fmt: skip
    valid = torch.ones(samples, text)
    valid[0, -1] = 0 if text > 1 else 1
    f, h, w = VIDEO
    return model, {
        "hidden_states": random(samples, f * h * w, 4, seed=1), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, text, 8, seed=2), "encoder_attention_mask": valid,
        "num_frames": f, "height": h, "width": w,
    }  # fmt: skip


def video_of(samples: int, channels: int = 4) -> Tensor:
    f, h, w = VIDEO
    return random(samples, channels, f, 2 * h, 2 * w, seed=1)


def chrono(text: int = TEXT, samples: int = SAMPLES, image: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.ChronoEditTransformer3DModel(
        **LIKE_WAN, image_dim=8,
        added_kv_proj_dim=24,
    )  # fmt: skip
    return model, {
        "hidden_states": video_of(samples), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, 512, 8, seed=2),
        "encoder_hidden_states_image": random(samples, image, 8, seed=5),
    }  # fmt: skip


def vace(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.WanVACETransformer3DModel(
        **LIKE_WAN | {"num_layers": 3}, vace_layers=[0, 2],
        vace_in_channels=6,
    )  # fmt: skip
    f, h, w = VIDEO
    return model, {
        "hidden_states": video_of(samples), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, text, 8, seed=2),
        "control_hidden_states": random(samples, 6, f, 2 * h, 2 * w, seed=6),
        "control_hidden_states_scale": torch.tensor([0.5, 2.0]).double(),
    }  # fmt: skip


def ovis(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.OvisImageTransformer2DModel(
        **LIKE_FLUX,
    )
    return model, _image_and_text(text, samples)


def longcat(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.LongCatImageTransformer2DModel(
        **LIKE_FLUX,
        pooled_projection_dim=8,
    )
    return model, _image_and_text(text, samples)


def bria(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.BriaTransformer2DModel(
        **LIKE_FLUX,
    )
    return model, _image_and_text(text, samples)


def skyreels(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SkyReelsV2Transformer3DModel(
        **LIKE_WAN, inject_sample_info=True,
    )  # fmt: skip
    return model, {
        "hidden_states": video_of(samples), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, text, 8, seed=2), "fps": [0, 1][:samples],
    }  # fmt: skip


def _image_and_text(text: int, samples: int) -> dict[str, Any]:
    return {
        "hidden_states": random(samples, 15, 4, seed=1), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "timestep": torch.linspace(0.3, 0.7, samples).double(), "img_ids": ids(*GRID, 3),
        "txt_ids": torch.zeros(text, 3).double(),
    }  # fmt: skip


def cogvideox(text: int = TEXT, samples: int = SAMPLES, rotary: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """CogVideoX-5B, which turns keys, or CogVideoX-2B, which adds positions to text and patches."""
    f, h, w = VIDEO
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=8,
        num_layers=2, sample_width=2 * w, sample_height=2 * h, sample_frames=4 * f - 3, patch_size=2,
        max_text_seq_length=text, use_rotary_positional_embeddings=rotary,
    )  # fmt: skip
    angles = random(f * h * w, 16, seed=7)
    return model, {
        "hidden_states": video_of(samples).transpose(1, 2), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "timestep": random(samples, seed=4).abs() * 500,
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }  # fmt: skip


def hunyuan(text: int = TEXT, samples: int = SAMPLES, masked: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=8, pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 4),
    )  # fmt: skip
    valid = torch.ones(samples, text, dtype=torch.long)
    if masked:
        valid[0, -2:] = 0
    return model, {
        "hidden_states": video_of(samples), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "encoder_attention_mask": valid, "pooled_projections": random(samples, 8, seed=3),
        "timestep": random(samples, seed=4).abs() * 500, "guidance": torch.full((samples,), 3.5).double(),
    }  # fmt: skip


def sd3(text: int = TEXT, samples: int = SAMPLES) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=2,
        joint_attention_dim=8, caption_projection_dim=24, pooled_projection_dim=8, out_channels=4, pos_embed_max_size=8,
        qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": random(samples, 4, 6, 10, seed=1), "encoder_hidden_states": random(samples, text, 8, seed=2),
        "pooled_projections": random(samples, 8, seed=3), "timestep": random(samples, seed=4).abs() * 500,
    }  # fmt: skip


def ltx2(
    text: int = TEXT, samples: int = SAMPLES, audio: int = 7, newer: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """LTX-2, or the settings of LTX-2.3: gates, prompts modulated by time, angles by halves, guided samples."""
    more: dict[str, Any] = {
        "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
        "rope_type": "split", "perturbed_attn": True, "use_keyframes_abs_pos_embedding": True,
    }  # fmt: skip
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=8, pos_embed_max_pos=4, base_height=64,
        base_width=64, **more if newer else {},
    )  # fmt: skip
    valid = torch.ones(samples, text)
    valid[0, -1] = 0 if text > 1 else 1
    f, h, w = VIDEO
    inputs = {
        "hidden_states": random(samples, f * h * w, 4, seed=1), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, text, 8, seed=2), "encoder_attention_mask": valid,
        "audio_hidden_states": random(samples, audio, 6, seed=6),
        "audio_encoder_hidden_states": random(samples, text, 8, seed=3),
        "num_frames": f, "height": h, "width": w, "audio_num_frames": audio,
    }  # fmt: skip
    if newer:
        inputs |= {
            "timestep": random(samples, f * h * w, seed=4).abs() * 500, "sigma": random(samples, seed=5).abs() * 500,
            "audio_timestep": random(samples, audio, seed=7).abs() * 500, "use_cross_timestep": True,
            "spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.arange(samples).double(),
            "video_keyframes_mask": random(samples, f * h * w, 1, seed=8),
        }  # fmt: skip
    return model, inputs


def helios(
    text: int = TEXT, samples: int = SAMPLES, history: bool = True, amplified: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.HeliosTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=16,
        num_layers=2, rope_dim=(4, 4, 4), is_amplify_history=amplified, guidance_cross_attn=not amplified,
    )  # fmt: skip
    f, h, w = VIDEO
    past = {"short": 2, "mid": 2, "long": 5} if history else {}
    inputs = {
        "hidden_states": video_of(samples), "timestep": random(samples, seed=4).abs() * 500,
        "encoder_hidden_states": random(samples, text, 8, seed=2),
        "indices_hidden_states": torch.arange(9, 9 + f).expand(samples, -1),
    }  # fmt: skip
    for seed, (age, frames) in enumerate(past.items()):
        inputs[f"latents_history_{age}"] = random(samples, 4, frames, 2 * h, 2 * w, seed=10 + seed)
        inputs[f"indices_latents_history_{age}"] = torch.arange(frames).expand(samples, -1)
    return model, inputs


def minimax(text: int = TEXT, samples: int = SAMPLES, audio: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    """MiniMax H3, whose rows of text, video and audio are packed in an order of the caller's."""
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=16,
        in_channels=2, audio_in_channels=3, text_dim=8, freq_dim=8, time_embed_hidden_dim=8, time_embed_dim=8,
        rope_freq_dim=2,
    )  # fmt: skip
    counts = {"video": 15, "text": text, "audio": audio}
    whole = sum(counts.values())
    order = torch.randperm(whole, generator=torch.Generator().manual_seed(5))
    video, texts, audios = (part.sort().values for part in order.split(list(counts.values())))
    tags = torch.zeros(whole, dtype=torch.long)
    tags[texts], tags[audios] = 1, 2
    return model, {
        "hidden_states": random(samples, 15, 8, seed=1), "audio_hidden_states": random(samples, audio, 3, seed=6),
        "encoder_hidden_states": random(samples, text, 8, seed=2), "timestep": torch.tensor([0.0, 0.7]).double(),
        "timestep_indices": torch.arange(whole) % 2, "token_tags": tags,
        "position_ids": random(whole, 3, seed=7).abs() * 9, "video_indices": video, "audio_indices": audios,
        "text_indices": texts,
    }  # fmt: skip


MODELS: dict[str, Callable[..., tuple[nn.Module, dict[str, Any]]]] = {
    "flux": flux, "flux2": flux2, "qwen": qwen, "qwen masked": partial(qwen, masked=True), "wan": wan,
    "wan tokenwise": partial(wan, tokenwise=True), "wan image": partial(wan, image=3), "ltx": ltx, "vace": vace,
    "chrono": chrono, "ovis": ovis, "longcat": longcat, "cogvideox": cogvideox,
    "cogvideox 2b": partial(cogvideox, rotary=False), "hunyuan": hunyuan, "sd3": sd3,
    "hunyuan masked": partial(hunyuan, masked=True), "bria": bria, "skyreels": skyreels, "ltx2": ltx2,
    "ltx2 newer": partial(ltx2, newer=True), "helios": helios, "helios alone": partial(helios, history=False),
    "helios amplified": partial(helios, amplified=True), "minimax": minimax,
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name](**sizes)
    for parameter in model.parameters():  # some start at zero, and with them the gradients of the others
        nn.init.normal_(parameter, std=0.2)
    cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return model.to(dtype), cast


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output, of a model with several all of them side by side, and the loss."""
    several = model(**inputs, return_dict=False)
    out = several[0] if len(several) == 1 else torch.cat([x.flatten(1) for x in several], 1)
    target = random(*out.shape, seed=9).to(out.dtype)
    return out.detach(), (out - target).square().mean()
