"""Layers of multi-head latent attention hand their latents on, so that ranks exchange those instead of keys.

Their classes (transformers 5.24) make the keys and values of all heads in a method of their own, ``expand_kv``, right
before they call the attention function::

    latent, rotated  ──► expand_kv ──► keys, values ──► attention function          as written
    latent, rotated  ──────────────────────────────► attention function             in a parallel forward

The attention function gets the weights from the method itself: they are what it makes of the identity matrix. That
holds for adapters, quantised and scaled projections, and inside the forward of a sharded model, as long as the method
is linear in the latent and passes the rotated part on. Both are tried when a model becomes parallel; a layer that does
something else hands on keys as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.foreign import name_of
from seqpar.foreign.wrap import ForwardWrapper
from seqpar.private import torch as torch_private
from seqpar.trial.record import under_trial

EXPAND = "expand_kv"
INDEXER = "indexer"  # of layers that choose their keys (`seqpar.integrations.hf.indexed`); None if a layer before chose
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Latents:
    """What is put around the `expand_kv` of a layer.

    refusal: why the layer hands on keys; "" if it hands on latents, and until that is decided. made: what the method
    returned in a trial, until attention gets it.
    """

    refusal = ""
    made: tuple[Any, Any] = (None, None)

    def __call__(self, module: nn.Module, expand: Expand, latent: Tensor, rotated: Tensor) -> Any:
        """The arguments, or keys and values where the layer hands on these."""
        if not torch.compiler.is_compiling() and under_trial() is not None:
            self.made = expand(latent, rotated)
            return self.made
        return expand(latent, rotated) if self.refusal else (latent, rotated)

    def attends(self, key: Tensor, value: Tensor) -> None:
        """Note what the layer gives to attention in a trial."""
        if not (key is self.made[0] and value is self.made[1]):
            self.refusal = "it changes keys or values after expanding them"
        self.made = None, None


def latents_of(module: nn.Module) -> tuple[Latents, Expand] | None:
    """What is around the expansion of a layer, and the expansion; None for layers without, and outside a handle."""
    wrapper = module.__dict__.get(EXPAND)
    if not isinstance(wrapper, ForwardWrapper) or wrapper.inactive:
        return None
    return wrapper.around, wrapper.forward  # type: ignore[return-value]


def layers(model: nn.Module) -> list[Any]:
    """The layers that expand latents for attention to all keys that they see."""
    expanding = (module for module in model.modules() if callable(getattr(module, EXPAND, None)))
    return [module for module in expanding if not hasattr(module, INDEXER)]


def decide(model: PreTrainedModel, twin: nn.Module | None) -> None:
    """Decide which layers hand on latents. twin: a model whose layers are tried in place of those of the same class."""
    for layer in layers(model):
        latents, expand = vars(layer)[EXPAND].around, vars(layer)[EXPAND].forward
        if twin is not None:
            layer = next(other for other in layers(twin) if name_of(other) == name_of(layer))
            expand = layer.expand_kv
        latents.refusal = latents.refusal or refusal(layer, expand)


def described(model: nn.Module) -> list[str]:
    """What the layers of a parallel model that expand latents exchange, a line for each class and reason."""
    lines = Counter((type(layer).__name__, vars(layer)[EXPAND].around.refusal) for layer in layers(model))
    return [
        f"{count} layers ({name}) exchange " + (f"keys and values: {why}" if why else "latents")
        for (name, why), count in lines.items()
    ]


def hands_on_latents(model: PreTrainedModel) -> bool:
    """Whether all layers of a parallel model that expand latents hand these on."""
    found = [latents_of(layer) for layer in layers(model)]
    return bool(found) and all(each is not None and not each[0].refusal for each in found)


def weights(expand: Expand, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """w_k [H, D_n, R] and w_v [H, D_v, R] of an expansion of latents [..., R] and rotated parts [..., E] like these."""
    rank, turned = latent.shape[-1], rotated.shape[-1]
    identity = torch.eye(rank, dtype=latent.dtype, device=latent.device)[None, None]
    keys, values = expand(identity, rotated.new_zeros(1, 1, rank, turned))
    return keys[0, :, :, : keys.shape[-1] - turned].transpose(1, 2), values[0].transpose(1, 2)


@torch.no_grad()
def refusal(module: Any, expand: Expand) -> str:
    """Why an expansion cannot be taken apart into weights, or "", tried on a few rows."""
    if any(isinstance(part, torch_private.DropoutNd) and part.p > 0 for part in module.modules()):
        return "it drops parts of what it expands"
    rank, turned = (
        getattr(module, name, None) or getattr(module.config, name) for name in ("kv_lora_rank", "qk_rope_head_dim")
    )
    like = next(p for p in module.parameters() if p.is_floating_point())
    latent, rotated = (
        torch.linspace(-3, 3, 4 * n, dtype=torch.float64, device="cpu").cos().view(1, 1, 4, n).to(like)
        for n in (rank, turned)
    )
    w_k, w_v = weights(expand, latent, rotated)
    keys, values = expand(latent, rotated)
    if keys.shape[1] != module.config.num_attention_heads:
        return f"it expands {keys.shape[1]} heads for {module.config.num_attention_heads} of queries"
    nope = w_k.shape[1]
    if not torch.equal(keys[..., nope:], rotated.expand(-1, keys.shape[1], -1, -1).to(keys.dtype)):
        return "it changes the rotated part"
    for w, made in ((w_k, keys[..., :nope]), (w_v, values)):
        x, y = latent[0, 0].double(), w.double()
        by_weights, largest = (torch.einsum("nr,hdr->hnd", *pair) for pair in ((x, y), (x.abs(), y.abs())))
        # sums of absolute values bound the rounding of the sums
        if ((by_weights - made[0].double()).abs() > 8 * torch.finfo(like.dtype).eps * largest + 1e-300).any():
            return "its expansion is not linear in the latent"
    return ""
