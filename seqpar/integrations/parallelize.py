"""`parallelize`: one call for every kind of model; what it does to each is in the modules beside this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from seqpar.comm import Comm

if TYPE_CHECKING:
    from seqpar.nn.wrap import ParallelModel


def parallelize(model: nn.Module, comm: Comm, *, sdpa: bool = False, plan: Any = None, **options: Any) -> ParallelModel:
    """A handle of the model, which from now on computes every batch on all ranks of comm. A collective.

    model: one of the kinds below; of a PeftModel the model inside is meant. It is changed in place, and stays the
    object that optimizers and wrappers hold. ``handle.undo()`` restores it exactly, and so does the end of
    ``with parallelize(...):``; inside ``with handle.local():`` it runs as before, on this rank alone.

    plan: what plans its forwards, by default a plan that suits the model. What is given depends on who knows the batch:

        kind of model         plan                                        asked for    by default
        transformers          (lengths, ranks) -> Plan                    every batch  plan_batch of its shape
        diffusers, by tokens  (mask, layout) -> Plan                      new sizes    seqpar.Plan
        by stages             (stages, dims, ranks, *, end, training)     new shapes   seqpar.dsp.plan_stages
                                                           -> StagePlan
        sdpa=True             a Plan, of every forward                    -            seqpar.parallel's around it

    sdpa: the model is any module whose attention is PyTorch's scaled_dot_product_attention, and takes this rank's rows.
    By stages go the models of diffusers of which `seqpar.dsp` has a spec (Latte), and any with ``spec=``. Other options
    are those of the kind of model: see `seqpar.integrations.hf.model.parallelize`,
    `seqpar.integrations.diffusers.parallelize`, `seqpar.dsp.parallelize` and `seqpar.integrations.sdpa.parallelize`.

    Raises: NotImplementedError naming what of the model cannot be computed on several ranks; ValueError on every rank
    if ranks give other models or options, and for a model that is wrapped already; TypeError for an unknown option, a
    plan of another form, or for what is no model or no comm.
    """
    _check(model, comm)
    if not sdpa:
        _check_order(model)
        model = model.get_base_model() if _is(model, "peft", "PeftModel") else model  # type: ignore[operator]
    if plan is not None:
        options["plan"] = plan
    return _parallelize_of(model, sdpa, staged="spec" in options)(model, comm, **options)


def _parallelize_of(model: nn.Module, sdpa: bool, staged: bool) -> Callable[..., ParallelModel]:
    """What makes a model of this kind parallel; nothing of other kinds is imported.

    Raises: NotImplementedError for a model of no kind.
    """
    if sdpa:
        from seqpar.integrations.sdpa import parallelize as of_sdpa

        return of_sdpa
    if staged or (_is(model, "diffusers", "ModelMixin") and _has_spec(model)):
        from seqpar.dsp import parallelize as by_stages

        return by_stages
    if _is(model, "transformers", "PreTrainedModel"):
        from seqpar.integrations.hf.model import parallelize as of_transformers

        return of_transformers
    if _is(model, "diffusers", "ModelMixin"):
        from seqpar.integrations.diffusers import parallelize as by_tokens

        return by_tokens
    raise NotImplementedError(
        f"parallelize({type(model).__name__}): it is neither a transformers nor a diffusers model; for attention by "
        "PyTorch's scaled_dot_product_attention give sdpa=True"
    )


def _has_spec(model: nn.Module) -> bool:
    from seqpar.dsp.specs import SPECS

    return type(model).__name__ in SPECS


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
    for package, wrappers in AROUND.items():
        if any(_is(model, package, wrapper) for wrapper in wrappers):
            raise ValueError(
                f"parallelize({name}): a model is made parallel before {name} goes around it; call "
                f"parallelize(model, comm), with average_over where gradients are averaged, and then {name}(model)"
            )


def _is(model: object, package: str, name: str) -> bool:
    """Whether a model is of a class of a package, which is loaded if it is."""
    base = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return base is not None and isinstance(model, base)
