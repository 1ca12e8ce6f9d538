"""`parallelize`: one call for every kind of model; what it does to each is in the modules beside this one."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from seqpar.comm import Comm


def parallelize(model: nn.Module, comm: Comm, *, sdpa: bool = False, **options: Any) -> Any:
    """A handle of the model, which from now on computes every batch on all ranks of comm. A collective.

    model: a transformers model (of a PeftModel the model inside is meant), a diffusers model, or with ``sdpa=True`` any
    module whose attention is PyTorch's scaled_dot_product_attention. It is changed in place, and stays the object that
    optimizers and wrappers hold; ``handle.undo()`` restores it exactly, and so does the end of
    ``with parallelize(...):``.

    Options, by the kind of model: see `seqpar.integrations.hf.model.parallelize`,
    `seqpar.integrations.diffusers.parallelize` (`seqpar.dsp.parallelize` where that has a spec of the model's class)
    and `seqpar.integrations.sdpa.parallelize`.

    Raises: NotImplementedError naming what of the model cannot be computed on several ranks; ValueError on every rank
    if ranks give other models or options, and for a model that is wrapped already; TypeError for an unknown option, or
    for what is no model or no comm.
    """
    _check(model, comm)
    if not sdpa:
        _check_order(model)
    if not sdpa and _is(model, "peft", "PeftModel"):
        model = model.get_base_model()  # type: ignore[operator]
    if sdpa:
        from seqpar.integrations.sdpa import parallelize as of_sdpa

        return of_sdpa(model, comm, **options)
    if _is(model, "transformers", "PreTrainedModel"):
        from seqpar.integrations.hf.model import parallelize as of_transformers

        return of_transformers(model, comm, **options)
    if _is(model, "diffusers", "ModelMixin"):
        from seqpar.dsp.specs import SPECS

        if type(model).__name__ in SPECS:
            from seqpar.dsp import parallelize as by_stages

            return by_stages(model, comm, **options)
        from seqpar.integrations.diffusers import parallelize as of_diffusers

        return of_diffusers(model, comm, **options)
    raise NotImplementedError(
        f"parallelize({type(model).__name__}): it is neither a transformers nor a diffusers model; for attention by "
        "PyTorch's scaled_dot_product_attention give sdpa=True"
    )


# What goes around a parallel model, by where its class is: what to do first is said by name.
AROUND = {
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed.fsdp": ("FullyShardedDataParallel",),
    "torch._dynamo": ("OptimizedModule",),
}


def _check(model: object, comm: object) -> None:
    """Raise TypeError for what is no model and no comm."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize takes a model, an nn.Module, got {type(model).__name__}")
    if not isinstance(comm, Comm):
        raise TypeError(
            f"parallelize({type(model).__name__}, {comm!r:.200}): expected a comm of the ranks; give "
            "seqpar.GroupComm(), or seqpar.LocalComm() for one rank"
        )


def _check_order(model: nn.Module) -> None:
    """Raise ValueError for a model that has something around it too early."""
    name = type(model).__name__
    for package, names in AROUND.items():
        if any(_is(model, package, each) for each in names):
            raise ValueError(
                f"parallelize({name}): a model is made parallel before {name} goes around it; call "
                f"parallelize(model, comm), with average_over where gradients are averaged, and then {name}(model)"
            )


def _is(model: object, package: str, name: str) -> bool:
    """Whether a model is of a class of a package, which is loaded if it is."""
    base = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return base is not None and isinstance(model, base)
