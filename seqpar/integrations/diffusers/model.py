"""Diffusion transformers under a plan: pipelines call them as before, and each rank computes its share of tokens.

A pipeline's inputs are whole on every rank, and so are the outputs. Outside of the lists of blocks every rank computes
the same. At the first block of a list arguments with tokens are cut to this rank's rows, and what works row by row
stays there (`seqpar.integrations.rows`); which arguments these are, and the order of the tokens in each attention, a
trial of the block finds (`seqpar.trial.blocks`)::

    whole inputs -> embeddings -> this rank's rows -> blocks, attention under a plan -> norm, projection -> gather

**Gradients.** Every rank computes the same loss from the whole output, with the gradient of one process, of which each
rank passes on an equal share. The gradients of parameters and inputs are shares then, whose sum over ranks
(`seqpar.train.sync_gradients`) is that of one process. Ranks compare the inputs, the output's gradient, and weights
that no step of an optimizer wrote: different noise on different ranks would go unnoticed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.facts.value import integer
from seqpar.foreign import name_of
from seqpar.foreign.hooks import OF_BLOCKS, Named, check_hooks
from seqpar.foreign.wrap import ParallelModel, check_makes_plans, is_surrounded, refuse_unready
from seqpar.integrations.diffusers.attend import MakePlan, Sharing
from seqpar.integrations.diffusers.blocks import blocks_of, run_block
from seqpar.integrations.diffusers.forward import SharedForward
from seqpar.integrations.rows import whole as whole_of
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import gathering
from seqpar.ops.core.alike import refusing_shares, whole_output
from seqpar.ops.core.compared import hashed, leaves
from seqpar.ops.core.regions import known_regions
from seqpar.plan import Plan
from seqpar.private.diffusers import BACKENDS, backend_of, parallel_config
from seqpar.private.torch import tree_map_only, uncompiled_calls
from seqpar.train.checks import StepChecks
from seqpar.trial.identity import kinds_of

ALONE = "such as a controlnet; call that model inside its handle.local(), or detach its output"


def parallelize(
    model: nn.Module, comm: Comm, *, plan: MakePlan = Plan, blocks: tuple[str, ...] | None = None,
    whole: tuple[str, ...] = (), average_over: int = 1, accuracy: Accuracy = "exact", deterministic: bool = True,
) -> ParallelModel:  # fmt: skip
    """Share the tokens of every forward of a diffusion transformer among the ranks; returns a handle with ``undo()``.

    model: whose lists of blocks mix tokens by PyTorch's scaled_dot_product_attention alone, such as most transformers
    of diffusers. Calls stay as they are: all ranks pass the same whole tensors, of any size, and get the whole output.
    blocks: names of the lists whose blocks get a rank's rows, such as ``("transformer_blocks",)``; by default the
    outermost ones. whole: names of lists that every rank computes whole. plan: ``(mask, layout) -> Plan``, such as
    ``functools.partial(seqpar.Plan, ulysses=2)``. accuracy, deterministic: as in `seqpar.attention`. Every rank
    computes the same loss; gradients are shares, to be summed by `seqpar.train.sync_gradients`, or to be averaged by a
    wrapper over ``average_over`` ranks, for which the model multiplies them by ``average_over``. Checkpointing works
    wherever backward runs. State dict, processors and hooks stay as they are; a copy of the model is parallelized too.

    A block is tried before it first gets arguments of new shapes: a few rows, at most 16 times.

    Raises: ValueError for names of no list; TypeError for a plan that is not a function. From a forward:
    NotImplementedError for a block that mixes tokens otherwise, with its name and the reason, for an attention backend
    that is not PyTorch's, and for a model under diffusers' own parallelism; ValueError on every rank if inputs,
    gradients or weights differ between ranks.
    """
    check_makes_plans(model, plan, "(mask, layout)")
    numerics, average_over = Numerics.checked(accuracy, deterministic), integer("average_over", average_over, 1)
    parts = blocks_of(model, blocks, whole)
    if not any(shared for _, shared in parts.values()):
        raise NotImplementedError(
            f"diffusers: {name_of(model)} has no list of blocks (an nn.ModuleList) whose tokens could be shared; "
            "if its arguments are rows of tokens and their positions, and only attention mixes rows, shard them "
            "yourself and call it inside `seqpar.sdpa`"
        )
    check_hooks(list(model.named_modules()), OF_BLOCKS)
    refuse_unready(model)
    handle = ParallelModel(model, comm)
    sharing = Sharing(handle, comm, plan, numerics, average_over, [name for name, _ in parts.values()])
    handle.put_around(model, partial(_forward, sharing))
    for block, (name, shared) in parts.items():
        handle.put_around(block, partial(run_block, name, shared))
    return handle


@uncompiled
def _forward(sharing: Sharing, model: nn.Module, forward: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """The model's forward: compare all ranks' inputs, run, gather the outputs."""
    named = list(model.named_modules(remove_duplicate=False))
    _compare(sharing, named, args, arguments)
    kinds, calls = kinds_of(named, sharing.blocks), list(uncompiled_calls(named))
    given = refusing_shares((args, arguments), sharing.comm, "diffusers", name_of(model), ALONE)
    with SharedForward(model, sharing, kinds, calls) as run:
        out = forward(*given[0], **given[1])
        if not sharing.attended:
            run.refuse(
                f"{name_of(model)} calls no F.scaled_dot_product_attention, so every rank would compute all of it"
            )
        return tree_map_only(Tensor, partial(_gathered, sharing, model), out)


def _gathered(sharing: Sharing, model: nn.Module, out: Tensor) -> Tensor:
    """A whole output, whose gradient is compared and shared out."""
    x, factor = whole_of(out), sharing.average_over / sharing.comm.size
    return whole_output(x, sharing.comm, "diffusers", name_of(model), factor=factor) if x.requires_grad else x


def _compare(sharing: Sharing, named: Named, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
    """Raise ValueError if arguments differ between ranks, NotImplementedError for a model that cannot be shared."""
    model = named[0][1]
    refuse_transforms(f"parallelize({name_of(model)})")
    if model is sharing.handle.model:
        for region in known_regions():
            region.run_again_inside(sharing.handle.reactivated, sharing.handle)
    if (checks := sharing.checks.get(model)) is None:
        checks = StepChecks(model, sharing.comm, average_over=sharing.average_over, within="the forward of parallelize")
        sharing.handle.on_undo(checks.close)
        sharing.checks[model] = checks
    facts: dict[str, Any] = {"grad enabled": torch.is_grad_enabled(), "average_over": sharing.average_over}
    what = "diffusers: forward"
    with gathering(what, sharing.comm, partial(checks.gather, what, facts=facts)):
        _check_modules(named, sharing.blocks)
        for name, x in leaves({str(n): x for n, x in enumerate(args)} | arguments):
            facts[f"argument {name}"] = (tuple(x.shape), x.dtype, hashed(x)) if isinstance(x, Tensor) else x
    if torch.is_grad_enabled():
        checks.wrapper()
        checks.check_average("diffusers")


def _check_modules(named: Named, blocks: Collection[str]) -> None:
    """Raise NotImplementedError for a model that would compute a rank's rows otherwise than all of them."""
    model = named[0][1]
    if parallel_config(model, None) is not None:
        raise NotImplementedError(
            f"diffusers: {name_of(model)} is under enable_parallelism, which splits its tokens too"
        )
    check_hooks(named, OF_BLOCKS)
    for name, module in named:
        if name in blocks and not is_surrounded(module):
            raise NotImplementedError(
                f"diffusers: {name} of {name_of(model)} was put there when the model was parallel, as by an "
                "adapter, or a wrapper that it had before was taken off, and it would compute a rank's share "
                "alone; call undo() of the handle and parallelize the model again"
            )
        if "processor" in module.__dict__ and (kind := backend_of(module.processor)) not in BACKENDS:
            raise NotImplementedError(
                f"diffusers: the attention backend {kind} of {name}, expected {BACKENDS}; call "
                "set_attention_backend('native')"
            )
