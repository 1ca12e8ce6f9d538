"""Models of `tests.dsp.models` and of diffusers with their specs and tiny inputs, by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqpar.dsp import Spec
from tests.dsp.models import PAIRS, WEATHER, DiT, PairStack, Weather, dit, made

SIZES = {"pairs": (5, 5), "weather": (5, 7), "core": (3, 5), "verb": (3, 5), "latte": (5, 6)}  # time and space
Case = tuple[nn.Module, Spec | None, dict[str, Tensor]]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def case(name: str, batch: int = 2, *sizes: int) -> Case:
    """A model, the same at every call, its spec (None: the shipped one) and what it is called with."""
    kind = name.split()[0]
    t, s = sizes or SIZES[kind]
    if kind == "pairs":
        return made(PairStack), PAIRS, {"z": rand(batch, s, s, 5), "mask": (rand(batch, s, s, 1) > -1).double()}
    if kind == "weather":
        return made(Weather, (t, s)), WEATHER, {"x": rand(batch, t, s, 3)}
    if kind == "latte":
        model = latte(s, t)
        if name == "latte checkpointed":
            model.enable_gradient_checkpointing()
        return model, None, clip(s, t, batch)
    return made(DiT, kind == "verb"), dit(kind == "verb"), {"x": rand(batch, t, s, 3), "t": rand(batch, 1)}


def small(name: str) -> Case:
    """A case of few samples, and more than ranks share evenly."""
    return case(name, {"core": 5}.get(name, 2 if name.startswith("latte") else 3))


def latte(size: int = 6, frames: int = 5, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    return made(_latte, size, frames, layers, dropout)


def _latte(size: int, frames: int, layers: int, dropout: float) -> nn.Module:
    import diffusers

    return diffusers.LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=layers,
        cross_attention_dim=16, attention_bias=True, sample_size=size, patch_size=2, activation_fn="gelu-approximate",
        norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=7, video_length=frames,
        dropout=dropout,
    )  # fmt: skip


def clip(size: int = 6, frames: int = 5, count: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(count, 3, frames, size, size, generator=g, dtype=torch.float64),
        "timestep": torch.arange(count) * 10 + 3,
        "encoder_hidden_states": torch.randn(count, 4, 7, generator=g, dtype=torch.float64),
    }
