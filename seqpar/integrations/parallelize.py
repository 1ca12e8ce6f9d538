"""`parallelize`: one call for every kind of model; the other modules here do the work for each kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from seqpar.comm import Comm, PeerError
from seqpar.comm.base import is_group
from seqpar.comm.local import warn_alone
from seqpar.integrations.adapters import is_of, unwrapped

if TYPE_CHECKING:
    from seqpar.foreign.wrap import ParallelModel


def parallelize(model: nn.Module, comm: Comm, *, sdpa: bool = False, plan: Any = None, **options: Any) -> ParallelModel:
    """Make a model compute every batch on all ranks of comm; returns its handle.

    model: one of the kinds below; for a PeftModel, the model inside it. The model is changed in place and stays the
    object that optimizers and wrappers hold. ``handle.undo()`` restores it exactly, and so does the end of a block
    ``with parallelize(...):``. Inside ``with handle.local():`` it runs as before, on this rank alone. For transformers
    the call is a collective, which compares models and options; those of other kinds are compared in forwards.

    plan: plans the forwards; the default suits the model. Its form depends on the kind of model:

        kind of model         plan                                        called for   by default
        transformers          (lengths, ranks) -> Plan                    every batch  plan_batch of its shape
        diffusers, or blocks= (mask, layout) -> Plan                      new sizes    seqpar.Plan
        by stages             (stages, dims, ranks, *, end, training)     new shapes   seqpar.dsp.plan_stages
                                                           -> StagePlan
        sdpa=True             a Plan, of every forward                    -            seqpar.parallel's around it

    sdpa: the model is any module whose attention is PyTorch's scaled_dot_product_attention; it takes this rank's rows.
    Planned by stages are the models of diffusers for which `seqpar.dsp` has a spec (Latte), and any model with
    ``spec=``. Any module with lists of blocks is computed as those of diffusers with ``blocks=`` or ``whole=``. Other
    options depend on the kind of model: see `seqpar.integrations.hf.model.ParallelTransformer`,
    `seqpar.integrations.diffusers.parallelize`, `seqpar.dsp.parallelize` and `seqpar.integrations.sdpa.parallelize`.

    Raises: NotImplementedError naming the part of the model that several ranks cannot compute; ValueError on every rank
    if ranks pass transformers or options that differ, and for a model that is wrapped already; TypeError for an unknown
    option, a plan of the wrong form, or an argument that is not a model or not a comm.
    """
    _check(model, comm)
    _check_order(model)
    if not sdpa:
        model = unwrapped(model)
    if plan is not None:
        options["plan"] = plan
    make = _parallelize_of(
        model, sdpa, staged="spec" in options, blocks=not options.keys().isdisjoint(("blocks", "whole"))
    )
    name = type(model).__name__
    try:
        if sdpa and "average_over" in options:
            raise TypeError(
                f"parallelize({name}, sdpa=True, average_over=): its loss is computed outside of it; "
                "give average_over to seqpar.train.cross_entropy or linear_cross_entropy"
            )
        _, _, *known = inspect.signature(make).parameters
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"parallelize({name}) got {unknown}, its options are {known}")
    except TypeError as error:
        with suppress(PeerError):
            comm.gather("parallelize", None, error)  # the others are in a gathering too, here or in a forward
        raise
    return make(model, comm, **options)


def _parallelize_of(model: nn.Module, sdpa: bool, staged: bool, blocks: bool) -> Callable[..., ParallelModel]:
    """The `parallelize` of this kind of model; nothing of other kinds is imported.

    Raises: NotImplementedError for any other model.
    """
    if sdpa:
        from seqpar.integrations.sdpa import parallelize as of_sdpa

        return of_sdpa
    if blocks and not staged:
        from seqpar.integrations.diffusers import parallelize as by_blocks

        return by_blocks
    if staged or (is_of(model, "diffusers", "ModelMixin") and _has_spec(model)):
        from seqpar.dsp import parallelize as by_stages

        return by_stages
    if is_of(model, "transformers", "PreTrainedModel"):
        from seqpar.integrations.hf.config import text_of

        if text_of(model) is not model:  # type: ignore[arg-type]
            from seqpar.integrations.hf.vision import ParallelVision

            return ParallelVision
        from seqpar.integrations.hf.model import ParallelTransformer

        return ParallelTransformer
    if is_of(model, "diffusers", "ModelMixin"):
        from seqpar.integrations.diffusers import parallelize as by_tokens

        return by_tokens
    raise NotImplementedError(
        f"parallelize({type(model).__name__}): it is neither a transformers nor a diffusers model; for attention by "
        "PyTorch's scaled_dot_product_attention give sdpa=True"
    )


def _has_spec(model: nn.Module) -> bool:
    from seqpar.dsp.specs import SPECS
    from seqpar.foreign import name_of

    return name_of(model) in SPECS


# Wrappers of a parallel model, by their modules; the error names them.
AROUND = {
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed.fsdp": ("FullyShardedDataParallel",),
    "torch._dynamo": ("OptimizedModule",),
}


def _check(model: object, comm: object) -> None:
    """Raise TypeError unless these are a model and a comm."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize: expected a model, an nn.Module, got {type(model).__name__}")
    if not isinstance(comm, Comm):
        told = f"parallelize({type(model).__name__}, {comm!r:.200}): expected a comm of the ranks"
        if is_group(comm):
            raise TypeError(f"{told}; give seqpar.GroupComm(group), of that group or mesh of one dimension")
        raise TypeError(f"{told}; give seqpar.GroupComm(), or seqpar.LocalComm() for one rank")
    warn_alone(comm, f"parallelize({type(model).__name__})", stacklevel=4)


def _check_order(model: nn.Module) -> None:
    """Raise ValueError for a model that was wrapped too early."""
    name = type(model).__name__
    for package, wrappers in AROUND.items():
        if any(is_of(model, package, wrapper) for wrapper in wrappers):
            around = "torch.compile" if name == "OptimizedModule" else name
            raise ValueError(
                f"parallelize({name}): a model becomes parallel before {name} wraps it; call "
                f"parallelize(model, comm), with average_over where gradients are averaged, and then {around}(model)"
            )
