"""What becomes of a transformer of diffusers on several ranks: exact, refused by name, or a bug.

In fp64, with the parts that a model computes in fp32 in fp64 too: `tests.ecosystem.ways.Wide`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.ecosystem.ways import Wide

TOLERANCE = 1e-10  # of an output beside its largest element, of a gradient beside its own and a part of all of them
PART = 1e-4
FIT = ("exact", "refused", "alone")  # what a verdict may begin with

Case = Callable[[int], tuple[nn.Module, dict[str, Any]]]  # number of samples -> a model, and what it is called with


class Setting(NamedTuple):
    """How a case runs."""

    ranks: int
    samples: int
    checkpointed: bool

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.samples} samples{', checkpointed' if self.checkpointed else ''}"


SETTINGS = [Setting(*each) for each in product((2, 3), (1, 2), (False, True))]


class Outcome(NamedTuple):
    """Every output of a call, and every gradient by name: None for what is not used."""

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]


def outcome(model: nn.Module, inputs: dict[str, Any], backward: bool = True) -> Outcome:
    """Of one process or a rank. backward: gradients too."""
    inputs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, copy.deepcopy(inputs))
    # diffusers writes into angles, and sums masks as integers
    used = tree_leaves({name: x for name, x in inputs.items() if "rotary" not in name and "mask" not in name})
    given = [x for x in used if isinstance(x, Tensor) and x.is_floating_point() and backward]
    for x in given:
        x.requires_grad_()
    with Wide(), torch.set_grad_enabled(backward):
        outputs = [x for x in tree_leaves(model(**inputs)) if isinstance(x, Tensor)]
        if backward:
            g = torch.Generator().manual_seed(5)
            sum((x * torch.randn(x.shape, generator=g)).sum() for x in outputs if x.requires_grad).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.numel()}
    return Outcome([x.detach() for x in outputs], grads | {f"input {i}": x.grad for i, x in enumerate(given)})


def verdict(make: Case, setting: Setting, parallelize: Callable[..., Any] = seqpar.parallelize) -> str:
    """The verdict on a case, a model of which every rank has a copy that ``parallelize(copy, comm)`` changes.

    "exact"; "refused: ...", by an error of the package that says why; "alone: ...", why one process does not run it.
    Anything else is a bug: "WRONG ..." or "CRASHED ...".
    """
    try:
        model, inputs = make(setting.samples)
        if setting.checkpointed:
            model.enable_gradient_checkpointing(_checkpoint)
        one, backward = _alone(model, inputs)
    except Exception as error:
        return f"alone: {said(error)}"

    def rank(comm: Comm) -> Outcome:
        own = copy.deepcopy(model)
        handle = parallelize(own, comm)  # noqa: F841
        return outcome(own, inputs, backward)

    try:
        every = run_threads(setting.ranks, rank, timeout=600.0)
    except NotImplementedError as error:
        return f"refused: {said(error)}"
    except Exception as error:
        return f"CRASHED: {said(error)}"
    where, apart = max(differences(one, every).items(), key=lambda item: item[1])
    return "exact" if apart <= TOLERANCE else f"WRONG by {apart:.1e} in {where}"


def work(make: Case, ranks: int, parallelize: Callable[..., Any] = seqpar.parallelize) -> float:
    """What the first rank multiplies in a forward outside of its attention, as a part of what one process does."""
    model, inputs = make(1)

    def multiplied(comm: Comm) -> int:
        own = copy.deepcopy(model)
        handle = parallelize(own, comm) if comm.size > 1 else None  # noqa: F841
        outcome(own, inputs, backward=False)  # without what comes once
        with FlopCounterMode(display=False) as counter:
            outcome(own, inputs, backward=False)
        counts = counter.get_flop_counts()["Global"].items()
        return sum(flops for op, flops in counts if "attention" not in str(op))

    return run_threads(ranks, multiplied)[0] / max(run_threads(1, multiplied)[0], 1)


def _checkpoint(module: Any, *args: Any, **named: Any) -> Any:
    """As diffusers checkpoints a block; modes are off inside of `Tensor.backward`."""
    return checkpoint(module.__call__, *args, **named, use_reentrant=False, context_fn=lambda: (nullcontext(), Wide()))


def _alone(model: nn.Module, inputs: dict[str, Any]) -> tuple[Outcome, bool]:
    """What one process makes, and whether it has a backward: flex attention has none on CPUs."""
    try:
        return outcome(copy.deepcopy(model), inputs), True
    except NotImplementedError:
        return outcome(copy.deepcopy(model), inputs, backward=False), False


def differences(one: Outcome, every: list[Outcome]) -> dict[str, float]:
    """By how much ranks' outputs, and their sum of gradients, are off those of one process, relative to the largest."""
    found = {}
    if any(len(rank.outputs) != len(one.outputs) for rank in every):
        return {"the number of outputs": float("inf")}
    for number, x in enumerate(one.outputs):
        found[f"output {number}"] = max(_apart(rank.outputs[number], x, float(x.abs().max())) for rank in every)
    largest = max((float(g.abs().max()) for g in one.grads.values() if g is not None), default=0.0)
    for name, grad in one.grads.items():
        parts = [g for rank in every if (g := rank.grads[name]) is not None]
        whole = sum(parts, start=torch.zeros(()))
        scale = PART * largest if grad is None else max(float(grad.abs().max()), PART * largest)
        found[name] = _apart(whole, torch.zeros(()) if grad is None else grad, scale)
    return found


def _apart(x: Tensor, y: Tensor, scale: float) -> float:
    if x.shape != y.shape and x.dim() and y.dim():
        return float("inf")
    off = float((x.detach().double() - y.double()).abs().max()) / max(scale, 1e-300)
    return off if off == off else float("inf")


def said(error: BaseException) -> str:
    """The kind and message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
