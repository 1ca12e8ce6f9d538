"""Transformers of diffusers under a plan: pipelines call them as before, and each rank computes its share of tokens.

A pipeline's inputs are whole on every rank, and so are the outputs. In between a rank has an equal part of the tokens
of the image or video and, if text takes part in joint attention, of the text::

    whole inputs -> this rank's rows -> blocks, joint attention under a plan -> proj_out -> gather -> whole output
                                          cross attention over the whole text stays on its rank

Joint attention is full, so its tokens may be numbered freely: a sample's valid text, its image, its masked text. The
keys that are seen are then one interval, whatever the text mask.

**Gradients.** Every rank computes the same loss from the whole output, with the gradient of one process. Each rank
takes its rows of that gradient; the gradients of parameters and inputs are shares, whose sum over ranks
(`seqpar.train.sync_gradients`) is that of one process. Ranks compare the inputs, the output's gradient, and weights
that no step of an optimizer wrote: different noise on different ranks would go unnoticed otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.dsp.specs import SPECS
from seqpar.facts.value import integer
from seqpar.foreign import name_of
from seqpar.foreign.wrap import ParallelModel, check_makes_plans, refuse_unready
from seqpar.integrations.diffusers.forward import SharedForward
from seqpar.integrations.diffusers.recipe import ModelRecipe, check_alone
from seqpar.integrations.diffusers.recipes import RECIPES
from seqpar.integrations.diffusers.tokens import MakePlan, Sharing, TokenCounts
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks, gathering
from seqpar.ops.core.compared import hashed, leaves
from seqpar.ops.core.regions import known_regions
from seqpar.plan import Plan
from seqpar.train.checks import StepChecks

AVERAGE = "average_over"  # a fact of a forward


def parallelize(
    model: nn.Module, comm: Comm, *, plan: MakePlan = Plan, average_over: int = 1, accuracy: Accuracy = "exact",
    deterministic: bool = True,
) -> ParallelModel:  # fmt: skip
    """Share the tokens of every forward of a diffusers transformer among the ranks; returns a handle with ``undo()``.

    model: one of `RECIPES`. Calls stay as they are, with keywords for all but the first argument: all ranks pass the
    same whole tensors, of any size, and get the whole output. plan: ``(mask, layout) -> Plan``, such as
    ``functools.partial(seqpar.Plan, ulysses=2)``. accuracy, deterministic: as in `seqpar.attention`. Every rank
    computes the same loss; gradients are shares, to be summed by `seqpar.train.sync_gradients`, or to be averaged by a
    wrapper over ``average_over`` ranks, for which the model multiplies them by ``average_over``. Checkpointing works
    wherever backward runs. State dict, processors and hooks stay as they are; a copy of the model is parallelized too.

    Raises: NotImplementedError, with its name, for another model, an attention processor or backend that is not the
    default, a model under diffusers' own parallelism or cache, and arguments that cannot be shared, such as controlnet
    residuals; TypeError for a plan that is not a function; ValueError on every rank if inputs, gradients or weights
    differ between ranks.
    """
    recipe = RECIPES.get(name_of(model))
    if recipe is None:
        raise NotImplementedError(_unknown(name_of(model)))
    check_makes_plans(model, plan, "(mask, layout)")
    if any(queries != keys for queries, keys in recipe.attends.values()):
        _check_takes_key_layout(model, plan)
    numerics = Numerics.checked(accuracy, deterministic)
    average_over = integer("average_over", average_over, 1)
    named = list(model.named_modules())
    check_alone(named)
    refuse_unready(model)
    handle = ParallelModel(model, comm)
    handle.put_around(model, partial(_forward, recipe, Sharing(handle, comm, plan, numerics, average_over)))
    for name, wrapper in recipe.surrounding(named).items():
        handle.put_around(model.get_submodule(name), wrapper)
    return handle


def _check_takes_key_layout(model: nn.Module, plan: Callable[..., Any]) -> None:
    """Raise TypeError for a ``plan=`` that does not take ``kv_layout``."""
    try:
        inspect.signature(plan).bind(None, None, kv_layout=None)
    except TypeError as error:
        raise TypeError(
            f"parallelize({name_of(model)}, plan=): {error}, but some of its attention is from tokens of video to "
            "those of audio and back; give a function of (mask, layout, *, kv_layout=)"
        ) from None


def _unknown(name: str) -> str:
    if name in SPECS:
        return f"diffusers: {name} is parallel by stages; call seqpar.dsp.parallelize(model, comm)"
    return (
        f"diffusers: {name} is not one of {', '.join([*RECIPES, *SPECS])}; if its arguments are rows of tokens and "
        "their positions, and only attention mixes rows, shard them yourself and call it inside `seqpar.sdpa`"
    )


def _forward(
    recipe: ModelRecipe, sharing: Sharing, model: nn.Module, forward: Callable[..., Any], *args: Any, **arguments: Any
) -> Any:
    """The model's forward: compare all ranks' inputs, share them out, run."""
    arguments, sizes = _compared(recipe, sharing, model, args, arguments)
    with SharedForward(model, sharing, sizes, recipe.joint, whole=dict(arguments), masked=recipe.masks) as run:
        for name, (dim, stream) in recipe.shared.items():
            if arguments.get(name) is not None:
                arguments[name] = run.rows(arguments[name], dim, stream)
        arguments.update(recipe.change(run, arguments))
        return forward(**arguments)


@uncompiled
def _compared(
    recipe: ModelRecipe, sharing: Sharing, model: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[dict[str, Any], TokenCounts]:
    """The arguments by name, which all ranks have alike, and their numbers of tokens."""
    refuse_transforms(f"parallelize({name_of(model)})")
    if model is sharing.handle.model:
        for region in known_regions():
            region.run_again_inside(sharing.handle.reactivated, sharing.handle)
    if (checks := sharing.checks.get(model)) is None:
        checks = StepChecks(model, sharing.comm, average_over=sharing.average_over, within="the forward of parallelize")
        sharing.handle.on_undo(checks.close)
        sharing.checks[model] = checks
    modes = {"grad enabled": torch.is_grad_enabled()}
    gather = partial(checks.gather, "diffusers: forward", facts=modes)
    with gathering("diffusers: forward", sharing.comm, gather) as facts:
        if len(args) > 1:
            raise TypeError(f"diffusers: {name_of(model)} takes one positional argument, got {len(args)}")
        if args:
            arguments["hidden_states"] = args[0]
        named = list(model.named_modules())
        recipe.check(named, arguments)
        facts.own = {name: _fingerprint(value) for name, value in leaves(arguments)}
        facts.own[AVERAGE] = sharing.average_over
        recipe.expand_text(arguments)
        sizes = recipe.sizes(model, arguments)
        if recipe.mask and not recipe.masks:
            arguments.pop(recipe.mask, None)
    with errors_on_all_ranks("diffusers: plan=", sharing.comm):
        for queries, keys in ((recipe.joint, recipe.joint), *recipe.attends.values()):
            sharing.plan(sizes, queries, keys)  # here no compiler looks on
    for stream in recipe.exits.values():
        sharing.gathered(sizes, stream)
    _same_on_all(facts.every)
    if torch.is_grad_enabled():
        checks.wrapper()
        checks.check_average("diffusers")
    return arguments, sizes


def _fingerprint(value: object) -> object:
    """Equal for equal values, almost never for others."""
    return (tuple(value.shape), value.dtype, hashed(value)) if isinstance(value, Tensor) else repr(value)


def _same_on_all(facts: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if ranks differ in what they have gathered."""
    first = facts[0]
    for rank, other in enumerate(facts):
        for name in first | other:
            one, another = first.get(name), other.get(name)
            if one == another:
                continue
            if name == AVERAGE:
                raise ValueError(
                    f"diffusers: average_over is {one} on rank 0 and {another} on rank {rank}; give every rank the "
                    "same one"
                )
            raise ValueError(
                f"diffusers: {name} differs between rank 0 and rank {rank}: {one} and {another} (shape, dtype, "
                "fingerprint); pass the same whole tensors on every rank, drawn with the same seed"
            )
