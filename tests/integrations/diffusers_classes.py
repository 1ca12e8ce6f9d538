"""Small models of diffusers' transformers, one a class: arguments of its constructor, and inputs of a call.

Every image has 15 tokens, every video 30, every text 7, so that neither 2 nor 4 ranks divide them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import diffusers
import diffusers.models.transformers
import torch
from torch import Tensor, nn

TEXT, IMAGE, VIDEO = 7, (3, 5), (3, 2, 5)

Options = dict[str, Any]


def x(*shape: int) -> Tensor:
    """Random numbers of a shape."""
    return torch.randn(*shape, dtype=torch.float64)


def times(b: int) -> Tensor:
    """Another time for each sample."""
    return torch.linspace(0.3, 0.7, b).double()


def image(b: int, channels: int = 4) -> Tensor:
    """Latents of which patches of two by two are the tokens of `IMAGE`."""
    return x(b, channels, 2 * IMAGE[0], 2 * IMAGE[1])


def video(b: int, channels: int = 4) -> Tensor:
    """Latents of which patches of two by two are the tokens of `VIDEO`."""
    f, h, w = VIDEO
    return x(b, channels, f, 2 * h, 2 * w)


def valid(b: int, dtype: torch.dtype = torch.long, text: int = TEXT) -> Tensor:
    """Which tokens of a text are not padding: all but the last two of the first of several samples."""
    flags = torch.ones(b, text, dtype=dtype)
    flags[: b - 1, -2:] = 0
    return flags


def grid(size: tuple[int, ...], axes: int = 3) -> Tensor:
    """Places of tokens, [tokens, axes], in the last axes of them."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in size)).double()
    return torch.cat([torch.zeros(len(places), axes - len(size)).double(), places], 1)


def angles(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """The cosine and sine of rotary embeddings."""
    turn = x(tokens, size)
    return turn.cos(), turn.sin()


def tokens_and_text(b: int, **more: Any) -> Options:
    """What models of Flux's kind take."""
    return {
        "hidden_states": x(b, 15, 4), "encoder_hidden_states": x(b, TEXT, 8), "timestep": times(b),
        "img_ids": grid(IMAGE), "txt_ids": torch.zeros(TEXT, 3).double(),
    } | more  # fmt: skip


def video_and_text(b: int, **more: Any) -> Options:
    """What models of Wan's kind take."""
    return {"hidden_states": video(b), "timestep": 500 * times(b), "encoder_hidden_states": x(b, TEXT, 8)} | more


def image_and_text(b: int, **more: Any) -> Options:
    """What models of PixArt's kind take."""
    return {"hidden_states": image(b), "timestep": 500 * times(b), "encoder_hidden_states": x(b, TEXT, 8)} | more


def sizes(b: int) -> Options:
    """What CogView and its like take of an image."""
    size = torch.tensor([[6.0, 10.0]] * b).double()
    return {"original_size": size, "target_size": size, "crop_coords": 0 * size}


HEADS: Options = {"num_attention_heads": 2, "attention_head_dim": 12}
FLUX: Options = HEADS | {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 8,
    "axes_dims_rope": (4, 4, 4),
}  # fmt: skip
QWEN: Options = {key: value for key, value in FLUX.items() if key != "num_single_layers"} | {"out_channels": 4}
WAN: Options = HEADS | {
    "in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2,
}  # fmt: skip
HUNYUAN: Options = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
    "text_embed_dim": 8, "rope_axes_dim": (4, 4, 4),
}  # fmt: skip
COGVIDEO: Options = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
    "text_embed_dim": 8, "num_layers": 2, "sample_width": 10, "sample_height": 4, "sample_frames": 9,
    "max_text_seq_length": TEXT, "use_rotary_positional_embeddings": True,
}  # fmt: skip
COGVIEW: Options = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 2,
}  # fmt: skip
PIXART: Options = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 16, "patch_size": 2}
SANA: Options = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 8, "sample_size": 16,
}  # fmt: skip
JOY: Options = {
    "in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "text_dim": 8, "num_layers": 2,
    "rope_dim_list": [4, 4, 4],
}  # fmt: skip
LTX: Options = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16,
    "num_layers": 2, "caption_channels": 8,
}  # fmt: skip
LTX2: Options = LTX | {
    "audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8, "pos_embed_max_pos": 4, "base_height": 64, "base_width": 64,
}  # fmt: skip

# class -> arguments, and what makes inputs of b samples
TABLE: dict[str, tuple[Options, Callable[[int], Options]]] = {
    "AceStepTransformer1DModel": (
        {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 12, "in_channels": 6, "audio_acoustic_hidden_dim": 2,
         "sliding_window": 4, "encoder_hidden_size": 8},
        lambda b: {"hidden_states": x(b, 29, 2), "context_latents": x(b, 29, 4), "timestep": times(b),
                   "timestep_r": times(b) / 2, "encoder_hidden_states": x(b, TEXT, 8)}),
    "AllegroTransformer3DModel": (
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 24,
                 "sample_height": 4, "sample_width": 10, "sample_frames": 3, "caption_channels": 8},
        lambda b: video_and_text(b, encoder_attention_mask=valid(b), encoder_hidden_states=x(b, 1, TEXT, 8),
                                 image_rotary_emb=None)),
    "AnyFlowFARTransformer3DModel": (
        WAN | {"chunk_partition": (1, 2), "full_chunk_limit": 3},
        lambda b: video_and_text(b, hidden_states=video(b).transpose(1, 2), timestep=x(b, 3).abs(),
                                 r_timestep=x(b, 3).abs() / 2, chunk_partition=[1, 2])),
    "AnyFlowTransformer3DModel": (
        WAN, lambda b: video_and_text(b, hidden_states=video(b).transpose(1, 2), timestep=x(b, 3).abs(),
                                      r_timestep=x(b, 3).abs() / 2)),
    "AuraFlowTransformer2DModel": (
        HEADS | {"sample_size": 16, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
                 "joint_attention_dim": 8, "caption_projection_dim": 24, "pos_embed_max_size": 64},
        lambda b: image_and_text(b, timestep=times(b))),
    "BriaFibo2Transformer2DModel": (
        {"in_channels": 4, "patch_size": 2, "dim": 24, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
         "cap_feat_dim": 8, "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4,
         "max_num_gist_tokens": 6, "gist_step": 2, "gist_min_text_len": 4, "gist_max_text_len": 8,
         "axes_dims": (4, 4, 4), "axes_lens": (32, 32, 32)},
        lambda b: image_and_text(b, timestep=times(b), encoder_hidden_states=x(b, 2, TEXT, 8),
                                 encoder_attention_mask=valid(b, torch.bool))),
    "BriaFiboTransformer2DModel": (
        FLUX | {"text_encoder_dim": 8, "axes_dims_rope": [4, 4, 4]},
        lambda b: tokens_and_text(b, text_encoder_layers=[x(b, TEXT, 8), x(b, TEXT, 8)])),
    "BriaTransformer2DModel": (FLUX | {"axes_dims_rope": [4, 4, 4]}, tokens_and_text),
    "ChromaTransformer2DModel": (
        FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        tokens_and_text),
    "ChronoEditTransformer3DModel": (
        WAN | {"image_dim": 8, "added_kv_proj_dim": 24},
        lambda b: video_and_text(b, encoder_hidden_states=x(b, 512, 8), encoder_hidden_states_image=x(b, 3, 8))),
    "CogVideoXTransformer3DModel": (
        COGVIDEO, lambda b: video_and_text(b, hidden_states=video(b).transpose(1, 2),
                                           image_rotary_emb=angles(30, 16))),
    "CogView3PlusTransformer2DModel": (
        COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8}, lambda b: image_and_text(b, **sizes(b))),
    "CogView4Transformer2DModel": (
        COGVIEW | {"attention_head_dim": 16, "rope_axes_dim": (8, 8)}, lambda b: image_and_text(b, **sizes(b))),
    "ConsisIDTransformer3DModel": (
        COGVIDEO | {"is_train_face": True, "cross_attn_dim_head": 4, "cross_attn_num_heads": 2, "LFE_id_dim": 6,
                    "LFE_vit_dim": 8, "LFE_depth": 5, "LFE_dim_head": 4, "LFE_num_heads": 2, "LFE_num_id_token": 2,
                    "LFE_num_querie": 3, "LFE_output_dim": 21, "LFE_ff_mult": 1},
        lambda b: video_and_text(b, hidden_states=video(b).transpose(1, 2), image_rotary_emb=angles(30, 16),
                                 id_cond=x(b, 6), id_vit_hidden=[x(b, 2, 8) for _ in range(5)])),
    "Cosmos3OmniTransformer": (
        {"head_dim": 12, "hidden_size": 24, "intermediate_size": 16, "latent_channel": 4, "num_attention_heads": 2,
         "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 16, "vocab_size": 32,
         "rope_axes_dim": (2, 2, 2)},
        lambda b: {"input_ids": torch.arange(TEXT), "text_indexes": torch.arange(TEXT), "und_len": TEXT,
                   "sequence_length": 37, "position_ids": torch.arange(37).expand(3, -1), "vision_tokens": [video(1)],
                   "vision_token_shapes": [VIDEO], "vision_sequence_indexes": torch.arange(7, 37),
                   "vision_mse_loss_indexes": torch.arange(7, 37), "vision_timesteps": 500 * times(30),
                   "vision_noisy_frame_indexes": [torch.arange(3)]}),
    "CosmosTransformer3DModel": (
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 8,
                 "adaln_lora_dim": 4, "max_size": (3, 8, 16), "concat_padding_mask": False},
        video_and_text),
    "DiTTransformer2DModel": (
        PIXART | {"num_embeds_ada_norm": 8},
        lambda b: {"hidden_states": x(b, 4, 6, 6), "timestep": torch.arange(b) + 3, "class_labels": torch.arange(b)}),
    "DreamLiteTransformer2DModel": (
        HEADS | {"in_channels": 24, "num_layers": 1, "norm_num_groups": 2, "cross_attention_dim": 8},
        lambda b: {"hidden_states": x(b, 24, *IMAGE), "encoder_hidden_states": x(b, TEXT, 8)}),
    "EasyAnimateTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2,
         "sample_width": 10, "sample_height": 4, "num_layers": 2, "mmdit_layers": 1, "time_embed_dim": 8,
         "text_embed_dim": 8},
        video_and_text),
    "ErnieImageTransformer2DModel": (
        {"hidden_size": 24, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 16, "in_channels": 4,
         "out_channels": 4, "text_in_dim": 8, "rope_axes_dim": (4, 4, 4)},
        lambda b: {"hidden_states": x(b, 4, *IMAGE), "timestep": 500 * times(b), "text_bth": x(b, TEXT, 8),
                   "text_lens": valid(b).sum(1)}),
    "Flux2Transformer2DModel": (
        FLUX | {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 8},
        lambda b: tokens_and_text(b, guidance=times(b), img_ids=grid(IMAGE, 4).expand(b, -1, -1),
                                  txt_ids=torch.zeros(b, TEXT, 4).double())),
    "Flux3Transformer2DModel": (
        {"in_channels": 4, "cond_in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 8, "timestep_channels": 8, "axes_dims_rope": (4, 4, 4, 4)},
        lambda b: tokens_and_text(b, img_ids=grid(IMAGE, 4), txt_ids=torch.zeros(TEXT, 4).double())),
    "FluxTransformer2DModel": (
        FLUX | {"pooled_projection_dim": 8, "guidance_embeds": True},
        lambda b: tokens_and_text(b, pooled_projections=x(b, 8), guidance=times(b))),
    "GlmImageTransformer2DModel": (
        COGVIEW | {"attention_head_dim": 16, "prior_vq_quantizer_codebook_size": 8},
        lambda b: image_and_text(b, prior_token_id=torch.randint(8, (b, 15)), target_size=sizes(b)["target_size"],
                                 prior_token_drop=torch.zeros(b, 15, dtype=torch.bool),
                                 crop_coords=sizes(b)["crop_coords"])),
    "HeliosTransformer3DModel": (
        WAN | {"rope_dim": (4, 4, 4)},
        lambda b: video_and_text(
            b, indices_hidden_states=torch.arange(9, 12).expand(b, -1),
            **{f"latents_history_{age}": x(b, 4, n, 4, 10) for age, n in (("short", 2), ("mid", 2), ("long", 5))},
            **{f"indices_latents_history_{age}": torch.arange(n).expand(b, -1)
               for age, n in (("short", 2), ("mid", 2), ("long", 5))})),
    "HiDreamImageTransformer2DModel": (
        HEADS | {"patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
                 "caption_channels": [8, 6], "text_emb_dim": 8, "axes_dims_rope": (4, 4, 4),
                 "max_resolution": (8, 16), "llama_layers": [0, 1], "force_inference_output": True},
        lambda b: {"hidden_states": image(b), "timesteps": 500 * times(b), "encoder_hidden_states_t5": x(b, TEXT, 8),
                   "encoder_hidden_states_llama3": x(2, b, TEXT, 6), "pooled_embeds": x(b, 8)}),
    "HunyuanDiT2DModel": (
        HEADS | {"in_channels": 4, "patch_size": 2, "sample_size": 16, "hidden_size": 24, "num_layers": 4,
                 "mlp_ratio": 2.0, "cross_attention_dim": 8, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8,
                 "text_len": TEXT, "text_len_t5": 3, "use_style_cond_and_image_meta_size": False},
        lambda b: image_and_text(b, text_embedding_mask=valid(b), encoder_hidden_states_t5=x(b, 3, 16),
                                 text_embedding_mask_t5=valid(b, text=3), image_rotary_emb=angles(15, 12))),
    "HunyuanImageTransformer2DModel": (
        HUNYUAN | {"patch_size": (2, 2), "rope_axes_dim": (4, 8)},
        lambda b: image_and_text(b, encoder_attention_mask=valid(b))),
    "HunyuanVideo15Transformer3DModel": (
        {key: value for key, value in HUNYUAN.items() if key != "num_single_layers"}
        | {"patch_size": 2, "text_embed_2_dim": 6, "image_embed_dim": 5, "task_type": "t2v"},
        lambda b: video_and_text(b, encoder_attention_mask=valid(b), encoder_hidden_states_2=x(b, 3, 6),
                                 encoder_attention_mask_2=valid(b, text=3), image_embeds=0 * x(b, 4, 5))),
    "HunyuanVideoFramepackTransformer3DModel": (
        HUNYUAN | {"pooled_projection_dim": 8, "image_condition_type": None, "has_image_proj": True,
                   "image_proj_dim": 5, "has_clean_x_embedder": True},
        lambda b: video_and_text(
            b, encoder_attention_mask=valid(b), pooled_projections=x(b, 8), image_embeds=x(b, 2, 5),
            indices_latents=torch.arange(3, 6), guidance=times(b), latents_clean=x(b, 4, 1, 4, 10),
            indices_latents_clean=torch.arange(1),
            latents_history_2x=x(b, 4, 2, 4, 10), indices_latents_history_2x=torch.arange(2),
            latents_history_4x=x(b, 4, 4, 4, 10), indices_latents_history_4x=torch.arange(4))),
    "HunyuanVideoTransformer3DModel": (
        HUNYUAN | {"pooled_projection_dim": 8},
        lambda b: video_and_text(b, encoder_attention_mask=valid(b), pooled_projections=x(b, 8), guidance=times(b))),
    "Ideogram4Transformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 2,
         "intermediate_size": 16, "adaln_dim": 8, "llm_features_dim": 8, "mrope_section": (2, 2, 2)},
        lambda b: {"hidden_states": x(b, 22, 4), "timestep": times(b), "encoder_hidden_states": x(b, 22, 8),
                   "position_ids": torch.cat([torch.zeros(TEXT, 3), grid(IMAGE)]).long().expand(b, -1, -1),
                   "segment_ids": torch.ones(b, 22, dtype=torch.long),
                   "indicator": torch.tensor([3] * TEXT + [2] * 15).expand(b, -1)}),
    "JoyImageEditPlusTransformer3DModel": (
        JOY, lambda b: {"hidden_states": x(b, 30, 4, 1, 2, 2), "timestep": 500 * times(b),
                        "encoder_hidden_states": x(b, TEXT, 8), "encoder_hidden_states_mask": valid(b, torch.double),
                        "shape_list": [[(2, 2, 5), (1, 2, 5)]] * b}),
    "JoyImageEditTransformer3DModel": (JOY, video_and_text),
    "Kandinsky5Transformer3DModel": (
        {"in_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16, "out_visual_dim": 4,
         "model_dim": 24, "ff_dim": 16, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4)},
        lambda b: video_and_text(
            b, hidden_states=video(b).permute(0, 2, 3, 4, 1), pooled_projections=x(b, 8),
            visual_rope_pos=[torch.arange(n) for n in VIDEO], text_rope_pos=torch.arange(TEXT))),
    "Kandinsky6SRTransformer3DModel": (
        {"in_visual_dim": 2, "out_visual_dim": 4, "time_dim": 16, "model_dim": 24, "ff_dim": 16,
         "num_visual_blocks": 1, "axes_dims": (4, 4, 4)},
        lambda b: {"hidden_states": x(b, 1, 16, 8, 5), "timestep": 500 * times(b)}),
    "Kandinsky6Transformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16,
         "model_dim": 24, "ff_dim": 16, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
         "visual_cond": False, "in_audio_dim": 3, "out_audio_dim": 3},
        lambda b: video_and_text(
            b, hidden_states=video(b).permute(0, 2, 3, 4, 1), pooled_projections=x(b, 8),
            audio_hidden_states=x(b, 11, 3))),
    "Krea2Transformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 16, "timestep_embed_dim": 8, "text_hidden_dim": 8,
         "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
         "text_intermediate_size": 8, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
         "axes_dims_rope": (4, 4, 4)},
        lambda b: {"hidden_states": x(b, 15, 4), "encoder_hidden_states": x(b, TEXT, 2, 8), "timestep": times(b),
                   "position_ids": torch.cat([torch.zeros(TEXT, 3).double(), grid(IMAGE)]),
                   "encoder_attention_mask": valid(b, torch.bool)}),
    "LTX2VideoTransformer3DModel": (
        LTX2,
        lambda b: video_and_text(
            b, hidden_states=x(b, 30, 4), encoder_attention_mask=valid(b), audio_hidden_states=x(b, 11, 6),
            audio_encoder_hidden_states=x(b, TEXT, 8), num_frames=3, height=2, width=5, audio_num_frames=11)),
    "LTXVideoTransformer3DModel": (
        LTX, lambda b: video_and_text(b, hidden_states=x(b, 30, 4), encoder_attention_mask=valid(b), num_frames=3,
                                      height=2, width=5)),
    "LatteTransformer3DModel": (
        PIXART | {"cross_attention_dim": 24, "caption_channels": 8, "norm_type": "ada_norm_single",
                  "norm_elementwise_affine": False, "video_length": 3, "num_embeds_ada_norm": 1000},
        lambda b: video_and_text(b, timestep=torch.arange(b) + 3)),
    "LongCatAudioDiTTransformer": (
        {"dit_dim": 24, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 8, "latent_dim": 4},
        lambda b: {"hidden_states": x(b, 29, 4), "encoder_hidden_states": x(b, TEXT, 8), "timestep": times(b),
                   "encoder_attention_mask": valid(b, torch.bool)}),
    "LongCatImageTransformer2DModel": (FLUX | {"pooled_projection_dim": 8}, tokens_and_text),
    "Lumina2Transformer2DModel": (
        {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "axes_dim_rope": (4, 4, 4),
         "axes_lens": (16, 16, 16), "cap_feat_dim": 8},
        lambda b: image_and_text(b, timestep=times(b), encoder_attention_mask=valid(b))),
    "LuminaNextDiT2DModel": (
        {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_attention_heads": 2,
         "num_kv_heads": 1, "multiple_of": 8, "cross_attention_dim": 8},
        lambda b: image_and_text(b, timestep=times(b), encoder_mask=valid(b),
                                 image_rotary_emb=torch.polar(torch.ones(8, 8, 6), torch.randn(8, 8, 6)),
                                 cross_attention_kwargs={})),
    "MiniMaxH3Transformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2,
         "num_refiner_layers": 1, "ffn_dim": 16, "in_channels": 2, "audio_in_channels": 3, "text_dim": 8,
         "freq_dim": 8, "time_embed_hidden_dim": 8, "time_embed_dim": 8, "rope_freq_dim": 2},
        lambda b: {"hidden_states": x(b, 15, 8), "audio_hidden_states": x(b, 4, 3),
                   "encoder_hidden_states": x(b, TEXT, 8), "timestep": torch.tensor([0.0, 0.7]).double(),
                   "timestep_indices": torch.arange(26) % 2, "token_tags": torch.tensor([1] * 7 + [0] * 15 + [2] * 4),
                   "position_ids": x(26, 3).abs() * 9, "text_indices": torch.arange(7),
                   "video_indices": torch.arange(7, 22), "audio_indices": torch.arange(22, 26)}),
    "MiniMaxMusic3RVQDepthDecoder": (
        {"hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
         "audio_vocab_size": 8},
        lambda b: {"inputs_embeds": x(b, 11, 24)}),
    "MiniMaxMusic3Transformer1DModel": (
        {"in_channels": 4, "condition_dim": 8, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12,
         "ff_inner_dim": 16, "rotary_dim": 8, "fourier_embedding_dim": 8},
        lambda b: {"hidden_states": x(b, 4, 29), "timestep": times(b), "encoder_hidden_states": x(b, 29, 8)}),
    "MochiTransformer3DModel": (
        HEADS | {"num_layers": 2, "pooled_projection_dim": 24, "in_channels": 4, "text_embed_dim": 8,
                 "time_embed_dim": 8, "max_sequence_length": TEXT},
        lambda b: video_and_text(b, encoder_attention_mask=valid(b, torch.bool))),
    "MotifVideoTransformer3DModel": (
        {key: value for key, value in HUNYUAN.items() if key != "num_refiner_layers"},
        lambda b: video_and_text(b, encoder_attention_mask=valid(b))),
    "NucleusMoEImageTransformer2DModel": (
        QWEN | {"moe_enabled": False},
        lambda b: {"hidden_states": x(b, 15, 4), "encoder_hidden_states": x(b, TEXT, 8), "timestep": times(b),
                   "encoder_hidden_states_mask": valid(b), "img_shapes": [(1, *IMAGE)] * b}),
    "OmniGenTransformer2DModel": (
        {"in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 16, "num_layers": 2, "pad_token_id": 0, "vocab_size": 32, "time_step_dim": 8,
         "pos_embed_max_size": 16, "rope_scaling": {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6}},
        lambda b: {"hidden_states": image(b), "timestep": times(b), "input_ids": torch.randint(1, 32, (b, TEXT)),
                   "input_img_latents": [], "input_image_sizes": {}, "position_ids": torch.arange(23).expand(b, -1),
                   "attention_mask": torch.ones(b, 23, 23).double().index_fill(2, torch.arange(2), 0)}),
    "OvisImageTransformer2DModel": (FLUX | {"out_channels": 4}, tokens_and_text),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 8, "hidden_size": 24, "num_heads": 2, "depth": 2, "axes_dim": [4, 8]},
        lambda b: image_and_text(b, timestep=times(b), attention_mask=valid(b, torch.bool))),
    "PixArtTransformer2DModel": (
        PIXART | {"cross_attention_dim": 24, "caption_channels": 8, "use_additional_conditions": False},
        lambda b: image_and_text(b, encoder_attention_mask=valid(b), added_cond_kwargs={})),
    "PriorTransformer": (
        HEADS | {"num_layers": 2, "embedding_dim": 8, "num_embeddings": TEXT, "additional_embeddings": 4},
        lambda b: {"hidden_states": x(b, 8), "timestep": 3, "proj_embedding": x(b, 8),
                   "encoder_hidden_states": x(b, TEXT, 8), "attention_mask": valid(b, torch.bool)}),
    "QwenImage21Transformer2DModel": (
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "context_in_dim": 8,
                 "axes_dims_rope": (4, 4, 4)},
        lambda b: {"hidden_states": x(b, 16, 4), "encoder_hidden_states": x(b, TEXT, 8), "timestep": times(b),
                   "img_shapes": [[(1, 4, 4)]] * b, "img_mask": (torch.arange(TEXT + 4) >= TEXT).expand(b, -1),
                   "encoder_hidden_states_mask": valid(b, torch.bool)}),
    "QwenImageTransformer2DModel": (
        QWEN,
        lambda b: {"hidden_states": x(b, 15, 4), "encoder_hidden_states": x(b, TEXT, 8), "timestep": times(b),
                   "encoder_hidden_states_mask": valid(b), "img_shapes": [(1, *IMAGE)] * b}),
    "RFD4ProteinaTransformer": (
        {"nlayers": 2, "token_dim": 24, "nheads": 2, "dim_cond": 8, "pair_repr_dim": 6, "latent_dim": 4, "t_emb_dim": 8,
         "tri_mult_c": 4, "num_sequence_classes": 5, "xt_pair_dist_dim": 4,
         "feats_seq": ("xt_bb_ca", "xt_local_latents"),
         "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"), "feats_pair_repr": ("xt_bb_ca_pair_dists",),
         "feats_pair_cond": ("time_emb_bb_ca", "time_emb_local_latents")},
        lambda b: {"bb_ca": x(b, 15, 3), "local_latents": x(b, 15, 4), "bb_ca_time": times(b),
                   "local_latents_time": times(b), "padding_mask": valid(b, torch.bool, 15), "conditioning": {
                       "is_in_context_conditioning": torch.zeros(b, 15), "supports_local_latent": torch.ones(b, 15)}}),
    "SD3Transformer2DModel": (
        HEADS | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 8,
                 "caption_projection_dim": 24, "pooled_projection_dim": 8, "pos_embed_max_size": 8,
                 "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        lambda b: image_and_text(b, pooled_projections=x(b, 8))),
    "SanaTransformer2DModel": (
        SANA, lambda b: image_and_text(b, encoder_attention_mask=valid(b))),
    "SanaVideoTransformer3DModel": (SANA, lambda b: video_and_text(b, encoder_attention_mask=valid(b))),
    "SanaWMLTX2RefinerTransformer3DModel": (
        LTX2, lambda b: video_and_text(b, hidden_states=x(b, 30, 4), encoder_attention_mask=valid(b),
                                       video_rotary_emb=angles(30, 16))),
    "SanaWMTransformer3DModel": (
        {"in_channels": 4, "num_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "softmax_every_n": 2,
         "linear_head_dim": 12, "chunk_plucker_channels": 4, "caption_channels": 8, "patch_size": (1, 2, 2)},
        lambda b: video_and_text(b, timestep=500 * times(3 * b).view(b, 1, 3), encoder_attention_mask=valid(b),
                                 encoder_hidden_states=x(b, 1, TEXT, 8))),
    "SkyReelsV2Transformer3DModel": (
        WAN | {"inject_sample_info": True}, lambda b: video_and_text(b, fps=[0, 1][:b])),
    "StableAudio3DiTModel": (
        {"io_channels": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "cond_token_dim": 8, "global_cond_dim": 8,
         "local_add_cond_dim": 3, "timestep_features_dim": 8, "num_memory_tokens": 5},
        lambda b: {"hidden_states": x(b, 4, 29), "timestep": times(b), "encoder_hidden_states": x(b, TEXT, 8),
                   "global_hidden_states": x(b, 8), "local_add_cond": x(b, 3, 29)}),
    "StableAudioDiTModel": (
        HEADS | {"sample_size": 9, "in_channels": 4, "num_layers": 2, "num_key_value_attention_heads": 1,
                 "out_channels": 4, "cross_attention_dim": 12, "cross_attention_input_dim": 8,
                 "global_states_input_dim": 8, "time_proj_dim": 8},
        lambda b: {"hidden_states": x(b, 4, 29), "timestep": times(b), "encoder_hidden_states": x(b, TEXT, 8),
                   "global_hidden_states": x(b, 1, 8), "rotary_embedding": angles(30, 6)}),
    "T5FilmDecoder": (
        {"input_dims": 4, "targets_length": 29, "d_model": 24, "num_layers": 2, "num_heads": 2, "d_kv": 12, "d_ff": 16},
        lambda b: {"encodings_and_masks": [(x(b, TEXT, 24), valid(b, torch.double))],
                   "decoder_input_tokens": x(b, 29, 4), "decoder_noise_time": times(b)}),
    "Transformer2DModel": (
        HEADS | {"in_channels": 24, "num_layers": 2, "norm_num_groups": 2, "cross_attention_dim": 8},
        lambda b: {"hidden_states": x(b, 24, *IMAGE), "encoder_hidden_states": x(b, TEXT, 8)}),
    "TransformerTemporalModel": (
        HEADS | {"in_channels": 24, "num_layers": 1, "norm_num_groups": 2},
        lambda b: {"hidden_states": x(b * 9, 24, *IMAGE), "num_frames": 9}),
    "WanAnimateTransformer3DModel": (
        WAN | {"in_channels": 12, "latent_channels": 4, "image_dim": 8, "added_kv_proj_dim": 24,
               "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16,
               "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8,
               "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2},
        lambda b: video_and_text(
            b, hidden_states=video(b, 12), encoder_hidden_states=x(b, 512, 8),
            encoder_hidden_states_image=x(b, 3, 8), pose_hidden_states=x(b, 4, 2, 4, 10),
            face_pixel_values=x(b, 3, 8, 16, 16))),
    "WanTransformer3DModel": (WAN, video_and_text),
    "WanVACETransformer3DModel": (
        WAN | {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6},
        lambda b: video_and_text(b, control_hidden_states=video(b, 6),
                                 control_hidden_states_scale=torch.tensor([0.5, 2.0]).double())),
    "ZImageTransformer2DModel": (
        {"in_channels": 4, "dim": 24, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": 8, "axes_dims": [4, 4, 4], "axes_lens": [96, 64, 64]},
        lambda b: {"x": [x(4, 1, 6, 10) for _ in range(b)], "t": times(b), "cap_feats": [x(TEXT, 8)] * b}),
}  # fmt: skip


def classes() -> dict[str, type[nn.Module]]:
    """Every transformer of the installed release by its name."""
    found: dict[str, type[nn.Module]] = {}
    folder = diffusers.models.transformers
    for file in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        for name, value in vars(importlib.import_module(file.name)).items():
            if isinstance(value, type) and issubclass(value, diffusers.ModelMixin) and value.__module__ == file.name:
                found[name] = value
    return found


def made(
    name: str, samples: int = 2, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, Options]:  # fmt: skip
    """A model with random weights, and inputs of one call. options: more arguments of the constructor."""
    arguments, inputs = TABLE[name]
    torch.manual_seed(0)
    model = classes()[name](**arguments | options)
    for parameter in model.parameters():  # some start at zero, and with them the gradients of the others
        nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval(), inputs(samples)
