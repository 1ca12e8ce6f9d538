"""`parallelize`: one call for every kind of model; what it does to each is in the modules beside this one."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from seqpar.comm import Comm


def parallelize(model: nn.Module, comm: Comm, *, sdpa: bool = False, **options: Any) -> Any:
    """A handle of the model, which from now on computes every batch on all ranks of comm. A collective.

    model: a transformers model, a diffusers model, or with ``sdpa=True`` any module whose attention is PyTorch's
    scaled_dot_product_attention. It is changed in place, and stays the object that optimizers and wrappers hold;
    ``handle.undo()`` restores it exactly, and so does the end of ``with parallelize(...):``.

    Options, by the kind of model: see `seqpar.integrations.transformers_model.parallelize`,
    `seqpar.integrations.diffusers.parallelize` and `seqpar.integrations.sdpa.parallelize`.

    Raises: NotImplementedError naming what of the model cannot be computed on several ranks; ValueError on every rank
    if ranks give other models or options; TypeError for an unknown option.
    """
    if sdpa:
        from seqpar.integrations.sdpa import parallelize as of_sdpa

        return of_sdpa(model, comm, **options)
    if _is(model, "transformers", "PreTrainedModel"):
        from seqpar.integrations.transformers_model import parallelize as of_transformers

        return of_transformers(model, comm, **options)
    if _is(model, "diffusers", "ModelMixin"):
        from seqpar.integrations.diffusers import parallelize as of_diffusers

        return of_diffusers(model, comm, **options)
    raise NotImplementedError(
        f"parallelize({type(model).__name__}): it is neither a transformers nor a diffusers model; for attention by "
        "PyTorch's scaled_dot_product_attention give sdpa=True"
    )


def _is(model: nn.Module, package: str, name: str) -> bool:
    """Whether a model is of a class of a package, which is loaded if it is."""
    base = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return base is not None and isinstance(model, base)
