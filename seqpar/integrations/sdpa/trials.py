"""Trials of the models that attend inside an `sdpa` block, and the warning about models that cannot be tried."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.integrations.sdpa.calls import CallWay, ModelCall, outermost, way_of
from seqpar.plan import Plan
from seqpar.train import check_model
from seqpar.trial.code import Code, code_among, under_autocast
from seqpar.trial.modules import SEES, dropping, of_transformers, renorming

_NEVER_FILLED = (Tensor, bool, int, float, str, type(None))


class ModelUse(NamedTuple):
    """A model that a block has called: its code then, and the arguments of its first call in each way."""

    model: nn.Module
    code: Code
    ways: dict[CallWay, tuple[Any, Any]]


class ModelsInside:
    """The models that a block has called, to be tried when it ends.

    block: makes a block like it. entering: the frame that enters it; models are modules called below.
    """

    def __init__(
        self, plan: Plan, comm: Comm, block: Callable[[], AbstractContextManager[Any]], entering: FrameType | None
    ) -> None:  # fmt: skip
        self.plan, self.comm, self.block = plan, comm, block
        while entering is not None and entering.f_code.co_filename == contextlib.__file__:  # an ExitStack
            entering = entering.f_back
        self.below = entering
        self.last: dict[str, Any] | None = None  # the keyword arguments of the last call that attended
        self.uses: dict[tuple[nn.Module, bool], ModelUse] = {}  # by module and whether it was training

    def notice(self) -> None:
        """Record the call of a module that attends inside this block, to try it when the block ends."""
        if (outer := outermost(self.below)) is None:
            return
        model, args, kwargs = outer
        if self.last is kwargs:  # another layer of the same call
            return
        self.last = kwargs
        use = self.uses.get((model, model.training))
        if use is None:
            use = self.uses[model, model.training] = ModelUse(model, code_among(self.comm.size, model.modules()), {})
        use.ways.setdefault(way_of(args, kwargs, model.training), (args, kwargs))

    @uncompiled
    def try_all(self) -> None:
        """Try the models, where such calls were not tried before. A collective if there are any.

        Raises: NotImplementedError on every rank if the rows of a model do not follow on some.
        """
        if not (uses := list(self.uses.values())):
            return
        told = [(use.code, code_among(self.comm.size, use.model.modules()).written) for use in uses]
        every = self.comm.gather("sdpa: what models run", told)
        for number, use in enumerate(uses):
            found = [other[number] for other in every if number < len(other)]
            codes, first = [code for code, _ in found], True
            for way, (args, kwargs) in use.ways.items():
                calls = [ModelCall(use.model, self.plan, self.comm, each, codes, use.code) for each in (None, way)]
                calls = [calls[0]] * first + [call for call in calls[1:] if not call.shared]
                first, due = False, [call for call in calls if call.is_due()]
                if due:
                    with under_autocast(way.autocast):
                        self._try(due, args, kwargs)
                    if any(code.written != now for code, now in found):
                        warn_untried(use.model, "modules, hooks or modes were changed back before it was tried")
                elif why := calls[0].changed() if calls else None:
                    warn_untried(use.model, why)

    def _try(self, calls: list[ModelCall], args: Any, kwargs: Any) -> None:
        """Try a call of a model.

        calls: those that are due: what all ranks try, and the way that this one is called in.
        """
        call, *alike = calls
        model = call.model
        if call.shared:
            check_model(model)
            reasons = of_transformers(model)
            if model.training:
                reasons += dropping(model) + renorming(model)
            if reasons:
                raise refused(model, reasons)
        verdict = call.tried(model, args, kwargs, self.block, alike=alike)
        if why := call.untried(verdict):
            if verdict.error and not all(isinstance(x, _NEVER_FILLED) for x in (*args, *kwargs.values())):
                why += (
                    ", when arguments that the forward fills, such as a cache, were full already; give it to "
                    "seqpar.parallelize(model, comm, sdpa=True), which tries it before its forward"
                )
            warn_untried(model, why)


def refused(model: nn.Module, reasons: list[str]) -> NotImplementedError:
    """The error for a model that cannot be computed row by row."""
    told = f"{type(model).__name__} cannot be computed on several ranks: {', and '.join(reasons)}"
    if reasons[-1].startswith(SEES) and "(Conv1d)" in reasons[-1]:
        told += (
            "; compute a causal depthwise convolution by seqpar.recurrent.causal_conv1d, or train with data "
            "parallelism, whole sequences on each rank"
        )
    return NotImplementedError(told)


def warn_untried(model: nn.Module, why: str) -> None:
    """Warn about a model whose trials show nothing, at the line of the program that called it."""
    message = f"it is not known whether {type(model).__name__} mixes rows outside its attention: {why}"
    frame, level, inside = sys._getframe(1), 2, ("seqpar.", "torch.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
