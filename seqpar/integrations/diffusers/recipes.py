"""Which models are known, and of each: the arguments that have tokens, and the modules that see them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.integrations.diffusers.forward import SharedForward, current
from seqpar.integrations.diffusers.tokens import TokenCounts
from seqpar.nn.dropout import active_dropout
from seqpar.nn.foreign_hooks import check_hooks
from seqpar.nn.kinds import name_of
from seqpar.nn.wrap import SURROUNDED


def attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules of a model that have an attention processor, by name."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "processor")]


def check_alone(model: nn.Module) -> None:
    """Raise NotImplementedError for a model under another wrapper of diffusers, or with hooks that see a share."""
    name = name_of(model)
    if getattr(model, "_parallel_config", None) is not None:
        raise NotImplementedError(
            f"diffusers: {name} is under enable_parallelism, which shares its tokens too; create it without that"
        )
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            f"diffusers: {name} is under enable_cache, which skips attention; call its disable_cache() first"
        )
    check_hooks(model)


def _unchanged(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelRecipe:
    """Which arguments of a model have tokens, in which dim, and which modules see them.

    processors: of its attention, by class. shared: argument -> (dim of the tokens, their stream). whole: other
    arguments. mask: the argument with the valid text. text: the argument whose tokens take part in joint attention, if
    any. cross: names of modules whose attention is over the whole text alone. modules: wrappers for other modules.
    count: the tokens of an image. change: adjusts arguments that depend on the forward. text_first: whether text comes
    before the image in joint attention. masks: whether the model counts the valid text, which comes first, and makes a
    mask of its own. settings: values of the model's config that are supported.
    """

    processors: tuple[str, ...]
    shared: Mapping[str, tuple[int, str]]
    whole: tuple[str, ...]
    mask: str | None = None
    text: str | None = None
    cross: tuple[str, ...] = ()
    modules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    count: Callable[[nn.Module, Tensor], int] = lambda model, x: x.shape[1]
    change: Callable[[SharedForward, dict[str, Any]], dict[str, Any]] = _unchanged
    text_first: bool = True
    masks: bool = False
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def surrounded(self, model: nn.Module) -> list[str]:
        """The names of modules whose forwards see that ranks have shares."""
        return ["proj_out", *self.modules, *(name for name, _ in attentions(model))]

    def check(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raise NotImplementedError for arguments, settings and modules that cannot be shared."""
        for name in self.surrounded(model):
            if not _is_surrounded(model.get_submodule(name)):
                raise NotImplementedError(
                    f"diffusers: {name} of {name_of(model)} was put there when the model was parallel, as by an "
                    "adapter, and would compute a rank's share alone; call undo() of the handle and parallelize the "
                    "model again"
                )
        known = {"hidden_states", "return_dict", *self.shared, *self.whole, *filter(None, [self.mask])}
        others = {name: value for name, value in arguments.items() if name not in known and value is not None}
        if missing := sorted(name for name, value in others.items() if not _is_default(model, name, value)):
            raise NotImplementedError(f"diffusers: {name_of(model)} with {', '.join(missing)} is not supported")
        for name in ("joint_attention_kwargs", "attention_kwargs"):
            if others := sorted(set(arguments.get(name) or {}) - {"scale"}):
                raise NotImplementedError(f"diffusers: {name} with {', '.join(others)} is not supported")
        for name, module in attentions(model):
            if (kind := type(module.processor).__name__) not in self.processors:
                raise NotImplementedError(f"diffusers: the processor {kind} of {name}, expected {self.processors}")
            if (kind := _backend(module.processor)) not in BACKENDS:
                raise NotImplementedError(
                    f"diffusers: the attention backend {kind} of {name}, expected {BACKENDS}; call "
                    "set_attention_backend('native')"
                )
        check_alone(model)
        if drops := active_dropout(model):
            raise NotImplementedError(
                f"diffusers: {drops}, which would drop other numbers of a rank's tokens than of all; set its p to 0"
            )
        for name, supported in self.settings.items():
            # other versions of diffusers may not have the setting
            if (value := model.config.get(name, supported[0])) not in supported:  # type: ignore[union-attr, operator]
                raise NotImplementedError(
                    f"diffusers: {name_of(model)} with {name}={value!r:.200}, expected one of {supported}"
                )

    def sizes(self, model: nn.Module, arguments: Mapping[str, Any], valid: Tensor | None) -> TokenCounts:
        """The tokens of a call.

        Raises: ValueError for inputs of another number of dims, or a mask whose shape differs from the text's.
        """
        x = arguments["hidden_states"]
        text = 0
        if self.text is not None:
            encoded = arguments[self.text]
            if encoded.dim() != 3 or encoded.shape[0] != x.shape[0]:
                raise ValueError(
                    f"diffusers: {self.text} {list(encoded.shape)} beside hidden_states {list(x.shape)}, expected "
                    "[samples, tokens, features]"
                )
            text = encoded.shape[1]
        seen = None
        if valid is not None:
            if tuple(valid.shape) != (x.shape[0], text):
                raise ValueError(f"diffusers: {self.mask} {list(valid.shape)}, expected {[x.shape[0], text]}")
            array = valid.detach().bool().cpu().numpy()
            if self.masks:
                array = np.arange(text) < valid.detach().sum(1, keepdim=True, dtype=torch.int).cpu().numpy()
            seen = None if array.all() else array.tobytes()
        return TokenCounts(x.shape[0], text, self.count(model, x), seen)


def _is_default(model: nn.Module, name: str, value: Any) -> bool:
    """Whether an argument of a forward is what it would be anyway."""
    parameter = inspect.signature(type(model).forward).parameters.get(name)
    return parameter is not None and type(value) is type(parameter.default) and bool(value == parameter.default)


def _is_surrounded(module: nn.Module) -> bool:
    """Whether a module is parallel, or a wrapper of peft's that passes calls on to a copy of it."""
    saved = getattr(module, "modules_to_save", None)
    passes_on = isinstance(saved, nn.ModuleDict) and all(map(_is_surrounded, saved.values()))
    return SURROUNDED in module.__dict__ or passes_on


def _sharing_tuple(dim: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = current()
    return tuple(run.rows(x, dim) for x in forward(*args, **kwargs))


def _sharing_rows(
    stream: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Tensor:  # fmt: skip
    return current().rows(forward(*args, **kwargs), 1, stream)


def _sharing_text_and_patches(module: nn.Module, forward: Callable[..., Any], text: Tensor, x: Tensor) -> Tensor:
    """This rank's rows of text and of patches, which the module joins; it numbers both, so it gets the whole text."""
    run = current()
    whole = forward(run.whole["encoder_hidden_states"], x)
    text, image = whole.split([run.sizes.text, whole.shape[1] - run.sizes.text], 1)
    return torch.cat([run.rows(text, 1, "text"), run.rows(image, 1)], 1)


def _sharing_patches(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Tensor:
    return current().rows(forward(x).flatten(2), 2)


def _sharing_rope(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = current()
    # the model has only seen this rank's text
    image, text = forward(*args, **kwargs | {"max_txt_seq_len": run.sizes.text})
    return run.rows(image, 0), run.rows(text, 0, "text")


def _timesteps(run: SharedForward, arguments: dict[str, Any], flat: bool = False) -> dict[str, Any]:
    """The timesteps: one, one per sample, or one per token of the image. flat: whether a model takes any shape."""
    timestep, sizes = arguments["timestep"], run.sizes
    if flat:
        timestep = timestep.reshape(sizes.samples, -1) if timestep.numel() % sizes.samples == 0 else timestep.flatten()
    if timestep.dim() == 2 and timestep.shape[1] != 1:
        return {"timestep": run.rows(timestep, 1)}
    if timestep.numel() not in (1, sizes.samples):
        raise ValueError(
            f"diffusers: timestep {list(timestep.shape)}, expected one, {sizes.samples} of the samples, or "
            f"{[sizes.samples, sizes.image]} of the tokens"
        )
    return {}


def _rotary(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The angles of this rank's rows, cosines and sines."""
    angles = arguments.get("image_rotary_emb")
    return {} if angles is None else {"image_rotary_emb": tuple(run.rows(x, 0) for x in angles)}


def _patches(model: nn.Module, x: Tensor) -> int:
    """The tokens of x [B, C, (frames,) height, width]."""
    config: Any = model.config
    patch = config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    sizes = x.shape[2:]
    return int(np.prod([n // p for n, p in zip(sizes, patch[-len(sizes) :], strict=True)]))


def _patches_of_frames(model: nn.Module, x: Tensor) -> int:
    """The tokens of x [B, frames, C, height, width]."""
    return _patches(model, x.transpose(1, 2))


def _backend(processor: Any) -> str | None:
    """The attention backend of a processor, or the active one; None if diffusers does not tell."""
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        module = sys.modules.get("diffusers.models.attention_dispatch")
        backend = getattr(getattr(module, "_AttentionBackendRegistry", None), "_active_backend", None)
    return getattr(backend, "value", backend)


# None: unknown, so its calls are counted.
BACKENDS = (None, "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

_TEXT_AND_IMAGE = {"hidden_states": (1, "image"), "encoder_hidden_states": (1, "text")}
_IDS = {"img_ids": (-2, "image"), "txt_ids": (-2, "text")}
_TEXT_AND_PATCHES = {"encoder_hidden_states": (1, "text")}

_WAN = ModelRecipe(
    processors=("WanAttnProcessor",), shared={}, cross=("attn2",), count=_patches, change=_timesteps,
    modules={"rope": partial(_sharing_tuple, 1), "patch_embedding": _sharing_patches},
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
        mask="encoder_hidden_states_mask", modules={"pos_embed": _sharing_rope}, settings={"zero_cond_t": (False,)},
        whole=("timestep", "img_shapes", "guidance", "attention_kwargs", "additional_t_cond"),
    ),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(
        _WAN, modules={**_WAN.modules, "vace_patch_embedding": _sharing_patches},
        whole=(*_WAN.whole, "control_hidden_states", "control_hidden_states_scale"),
    ),
    "ChronoEditTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": replace(
        _WAN, processors=("SkyReelsV2AttnProcessor",), whole=(*_WAN.whole, "fps"),
        settings={"num_frame_per_block": (1,)},
    ),
    "CogVideoXTransformer3DModel": ModelRecipe(
        processors=("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"), shared=_TEXT_AND_PATCHES,
        text="encoder_hidden_states", count=_patches_of_frames, change=_rotary,
        modules={"patch_embed": _sharing_text_and_patches},
        whole=("timestep", "timestep_cond", "ofs", "image_rotary_emb", "attention_kwargs"),
    ),
    "HunyuanVideoTransformer3DModel": ModelRecipe(
        processors=("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0"), shared={}, text="encoder_hidden_states",
        cross=("context_embedder",), mask="encoder_attention_mask", masks=True, text_first=False, count=_patches,
        modules={
            "rope": partial(_sharing_tuple, 0), "x_embedder": partial(_sharing_rows, "image"),
            "context_embedder": partial(_sharing_rows, "text"),
        },
        whole=("timestep", "encoder_hidden_states", "pooled_projections", "guidance", "attention_kwargs"),
        settings={"image_condition_type": (None, "latent_concat")},
    ),
    "SD3Transformer2DModel": ModelRecipe(
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"), shared=_TEXT_AND_PATCHES,
        text="encoder_hidden_states", text_first=False, count=_patches,
        modules={"pos_embed": partial(_sharing_rows, "image")},
        whole=("timestep", "pooled_projections", "joint_attention_kwargs", "skip_layers"),
        settings={"dual_attention_layers": ((), [])},
    ),
    "LTXVideoTransformer3DModel": ModelRecipe(
        processors=("LTXVideoAttnProcessor",), shared={"hidden_states": (1, "image")}, cross=("attn2",),
        modules={"rope": partial(_sharing_tuple, 1)}, change=partial(_timesteps, flat=True),
        whole=(
            "timestep", "encoder_hidden_states", "encoder_attention_mask", "num_frames", "height", "width",
            "rope_interpolation_scale", "video_coords", "attention_kwargs",
        ),
    ),
}  # fmt: skip
