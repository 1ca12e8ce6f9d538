"""What ranks agree on around a forward: the call that begins, and after a first one what it showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.dsp.checks import check_modules, check_results, kept
from seqpar.dsp.runner import ForwardState
from seqpar.dsp.spec import Spec
from seqpar.dsp.trial import COUNTS
from seqpar.foreign.hooks import CACHING, Named, check_hooks
from seqpar.ops.core.agreement import agreement, gathering
from seqpar.ops.core.compared import hashed, leaves
from seqpar.ops.core.device import autocast_dtype
from seqpar.train.checks import StepChecks
from seqpar.trial.identity import identity
from seqpar.trial.randomness import active_dropout


class SeenModel:
    """What was checked of a model: its modules, its training steps, kinds of calls, batch shapes, and stages tried.

    A copy of the model starts empty.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.steps: StepChecks | None = None
        self.forget()

    def forget(self) -> None:
        """Forget what was checked, since modules are others now."""
        self.shapes: set[object] = set()  # each with a kind
        self.sizes: set[object] = set()  # the same, known before the first stage
        self.tried: dict[object, int] = {}  # stages, each with a dimension and a kind -> rows in a trial

    def __deepcopy__(self, memo: dict[int, Any]) -> SeenModel:
        return SeenModel()


@dataclass(frozen=True)
class ForwardChecks:
    """The checks of a model's forwards, each a collective.

    names: of all stages. values: whether ranks compare values, and not shapes alone.
    """

    comm: Comm
    spec: Spec
    names: Sequence[str]
    grad: str
    average_over: int
    values: bool

    def before(
        self, named: Named, seen: SeenModel, arguments: Mapping[str, Any], cached: Sequence[str]
    ) -> object:  # fmt: skip
        """Check that ranks make the same call, with nothing active that must not be.

        Returns the kind of call: the mode of the model, and what its modules run on each rank.
        """
        model, what, facts = named[0][1], f"a forward of {type(named[0][1]).__name__}", dict[str, object]()
        if seen.steps is None:
            seen.steps = StepChecks(
                model, self.comm, average_over=self.average_over, within="the forward of parallelize"
            )
        gather = seen.steps.gather if self.values else self.comm.gather
        with gathering(what, self.comm, lambda code, error: gather(what, code, error, facts=facts)) as codes:
            self._check_changes(named, seen)
            facts |= {"grad enabled": torch.is_grad_enabled(), "training": model.training}
            facts |= {
                name: self._fact(value) if isinstance(value, Tensor) else value for name, value in leaves(arguments)
            }
            facts |= {"grad": self.grad, "average_over": self.average_over}
            facts |= {"autocast": tuple(map(autocast_dtype, ("cpu", "cuda"))), "stages with a cache": cached}
            facts["modules in training"] = sum([module.training for module in seen.modules])
            codes.own = identity(self.comm.size, seen.modules)
        if torch.is_grad_enabled():
            seen.steps.wrapper()
            if self.grad == "replicated":
                seen.steps.check_average(f"dsp: {type(model).__name__}")
        return model.training, tuple(codes.every)

    def _fact(self, x: Tensor) -> tuple[object, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad, hashed(x) if self.values else None

    def _check_changes(self, named: Named, seen: SeenModel) -> None:
        """Raise for modules changed since, for active dropout, and for hooks that see a share."""
        modules = [module for _, module in named]
        if len(modules) != len(seen.modules) or any(a is not b for a, b in zip(modules, seen.modules)):
            check_modules(modules[0], self.spec, self.names)
            seen.forget()
            seen.modules = modules
        check_hooks(named, CACHING)
        if drops := active_dropout(named):
            raise NotImplementedError(
                f"{drops}, which would draw other numbers for a shard than for the whole; set its p to 0"
            )

    def after(self, state: ForwardState, seen: SeenModel, out: Any) -> None:
        """Raise for what a first forward shows: stages that mix or write to more, shares that it returns, buffers."""
        what = type(state.model).__name__
        with agreement(f"a forward of {what}", self.comm, every=True) as call:
            if state.mixed:
                name, dim, how = state.mixed[0]
                when = "they move to other places or are more" if how == COUNTS else f"other rows of {dim} do"
                remedy = (
                    f"list {dim} in the whole of its block" if name in self.names else f"leave {dim} out of its rest"
                )
                raise NotImplementedError(
                    f"{name} {how} {dim}, along which ranks share its rows: rows change when {when}; {remedy}"
                )
            seen.tried.update(state.tried)
            if state.written and self.comm.size > 1:
                name, argument = state.written[0]
                raise NotImplementedError(
                    f"{name} writes to {argument}, and each rank would change its own share or copy; let it write to a "
                    f"copy, as {argument}.clone() is"
                )
            if self.comm.size > 1:
                before = state.kept
                new = [] if before is None else [each for each in kept(state.model) if each[1].grad_fn not in before]
                check_results(state.model, out, state.ends, state.shards, self.grad, new)
            if state.uneven:
                raise NotImplementedError(
                    f"{state.uneven[:4]} change in a forward, which each rank must make once: plan these stages "
                    "with rows for all ranks, or change them outside of stages"
                )
            values = {name: hashed(x) for name, x in state.changed.items() if self.values}
            call.facts = {"buffers that stages changed": values}
