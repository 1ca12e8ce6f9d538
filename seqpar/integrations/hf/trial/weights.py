"""Whether a model's weights are loaded before it becomes parallel: a trial of empty weights shows nothing."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel


class NoWeights(NotImplementedError):
    """A model that cannot be tried, because its weights are elsewhere or not loaded yet."""


def check_weights(model: PreTrainedModel) -> None:
    """Raise NoWeights for a model with embeddings that tell no tokens apart."""
    for name, module in model.named_modules():
        # an embedding of two rows or fewer is of token types, which may be zero
        if isinstance(module, nn.Embedding) and len(module.weight) > 2:
            if not bool(module.weight.isfinite().all()):
                raise _later(model, f"{name}.weight has infinities or NaN")
            if bool((module.weight == module.weight[-1]).all()):
                raise _later(model, f"{name}.weight is the same for every token")


def check_shown(model: PreTrainedModel, apart: Tensor, together: Tensor) -> None:
    """Raise NoWeights if a trial showed nothing. Rows [1, T, n]: each token alone, and all in one document."""
    if not (apart.isfinite().all() and together.isfinite().all()):
        raise _later(model, "it gives infinities or NaN for a few tokens")
    if apart.equal(together):
        raise _later(model, "its attention changes nothing")


def _later(model: PreTrainedModel, what: str) -> NoWeights:
    return NoWeights(
        f"parallelize({type(model).__name__}): {what}, as if its weights were not loaded yet; "
        "load or initialise the weights, then call parallelize"
    )
