"""Towers of models of images, video or sound: their inputs, and runs on blank ones.

If only other ranks have images, a rank runs its towers on a blank image of the shape of one of theirs, and adds 0 times
the result. So its towers have gradients, and take part in collectives of DDP and FSDP2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from seqpar.comm import Comm
from seqpar.integrations.hf.config import MEDIA
from seqpar.private.torch import tree_leaves

EXACT = 4096  # values of a media input that ranks exchange; of larger ones only the shape


class Towers(NamedTuple):
    """The towers of a model. text: the model of tokens inside it, which gets their features."""

    model: PreTrainedModel
    text: PreTrainedModel
    comm: Comm

    def blank_runs(self, what: str, own: Mapping[str, Any], error: Exception | None) -> list[Callable[[], Any]]:
        """Dummy runs of the towers for the modalities that only other ranks have. A collective."""
        media = {kind: self._media(kind, own) for kind in MEDIA}
        sizes = {kind: x.numel() for kind, x in media.items() if x is not None}
        every = self.comm.gather(f"{what}: images", sizes, error)
        kinds = [kind for kind in MEDIA if 0 < sum(kind in each for each in every) < len(every)]
        if not kinds:
            return []
        lend, missing, runs = {}, None, self._run_without_input()
        for kind in kinds if runs else ():
            # the smallest input is the cheapest
            lender = min((rank for rank, each in enumerate(every) if kind in each), key=lambda r: every[r][kind])
            if lender != self.comm.rank:
                continue
            if (features := self._features(kind)) is None:
                missing = NotImplementedError(
                    f"{type(self.model).__name__} has no get_{kind}_features, so a rank without {kind} cannot run its "
                    f"towers on a blank input; supply {kind} on every rank, or freeze all parameters outside the text "
                    "model"
                )
            else:
                lend[kind] = _lent(features, own)
        lent = self.comm.gather(f"{what}: shapes of images", (runs, lend), missing)
        training = [rank for rank, (runs, _) in enumerate(lent) if runs]
        if 0 < len(training) < self.comm.size:
            raise ValueError(
                f"{what}: parameters outside the text model are trained on ranks {training} alone; freeze the "
                "same parameters on all ranks, and use torch.no_grad on all or none"
            )
        found = {kind: shapes for _, each in lent for kind, shapes in each.items() if kind not in sizes}
        return [
            partial(features, **{n: _like(x, self.model.device) for n, x in found[kind].items()})
            for kind in MEDIA if kind in found and (features := self._features(kind))
        ]  # fmt: skip

    def _run_without_input(self) -> bool:
        """Whether a rank without images runs its towers: for gradients, and for collectives in their forward."""
        text, head = set(self.text.modules()), self.model.get_output_embeddings()
        apart = [m for m in self.model.modules() if m not in text and m is not head and self.text not in m.modules()]
        trained = torch.is_grad_enabled() and any(p.requires_grad for m in apart for p in m.parameters(recurse=False))
        return trained or any(isinstance(m, FSDPModule) for m in apart)

    def _media(self, kind: str, own: Mapping[str, Any]) -> Tensor | None:
        """The inputs of a kind: by `MEDIA`'s name, or by another that the model's function for their features takes."""
        if isinstance(x := own.get(MEDIA[kind]), Tensor):
            return x
        floats = [n for n, x in own.items() if isinstance(x, Tensor) and x.is_floating_point()]
        others, features = sorted({*floats} - {*MEDIA.values()}), self._features(kind)
        if not others or features is None:
            return None
        taken = inspect.signature(features).parameters
        return next((own[name] for name in others if name in taken), None)

    def _features(self, kind: str) -> Callable[..., Any] | None:
        """The function that makes features of a kind of inputs, up to what replaces embeddings of tokens, or None."""
        name = f"get_{kind}_features"
        owner = next((m for m in (self.model.base_model, self.model) if hasattr(m, name)), None)
        features: Callable[..., Any] | None = getattr(owner, name, None)
        if features is None or self.model.config.model_type != "llama4":
            return features

        def projected(pixel_values: Tensor) -> Any:  # which Llama 4 does outside of that function
            seen = features(pixel_values=pixel_values).last_hidden_state
            return self.model.multi_modal_projector(seen.flatten(0, -2))

        return projected


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor that others make anew."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _lent(features: Callable[..., Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of this rank's inputs that other ranks need for blank ones, by names."""
    named = inspect.signature(features).parameters
    lent = {n: _shape(own[n]) for n in named if isinstance(own.get(n), (Tensor, np.ndarray, list, tuple))}
    needed = {n: None for n, p in named.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return needed | lent  # an input that the forward hands on even if it was not given is None


def _shape(x: Any) -> Any:
    """An input as others can make one like it: itself, if towers read its values as sizes, or its shape."""
    if isinstance(x, (list, tuple)):  # as sizes are given too
        return [_shape(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    large = x.is_floating_point() and x.numel() > EXACT
    return TensorSpec(x.dtype, tuple(x.shape)) if large else x.detach().cpu()


def _like(told: Any, device: torch.device) -> Any:
    """The input that `_shape` describes, or one like it of numbers that no norm divides by 0 for; None stays None."""
    if isinstance(told, TensorSpec):
        x = torch.linspace(-1, 1, int(np.prod(told.shape)), device=device)
        return x.reshape(told.shape).to(told.dtype)
    if isinstance(told, list):
        return [_like(each, device) for each in told]
    return told.to(device) if isinstance(told, Tensor) else told


def zero_of(features: Any) -> Any:
    """0, depending on all features that reach the text model: not on hidden states next to them."""
    if isinstance(features, ModelOutput):
        features = [getattr(features, name, None) for name in ("pooler_output", "deepstack_features")]
    every = (x for x in tree_leaves(features) if isinstance(x, Tensor))
    return sum(0 * x.sum() for x in every if x.is_floating_point())
