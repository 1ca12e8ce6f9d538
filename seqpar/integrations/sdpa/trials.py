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
from seqpar.integrations.sdpa.calls import Key, ModelCall, key_of, outermost
from seqpar.plan import Plan
from seqpar.train import check_model
from seqpar.trial.modules import SEES, dropping, of_transformers, renorming

_NEVER_FILLED = (Tensor, bool, int, float, str, type(None))


class ModelUse(NamedTuple):
    """A model that a block has called: what it was then, and the arguments of its first call."""

    model: nn.Module
    key: Key
    args: Any
    kwargs: Any


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
        self.uses: dict[tuple[nn.Module, Key], ModelUse] = {}

    def notice(self) -> None:
        """Record the call of a module that attends inside this block, to try it when the block ends."""
        if (outer := outermost(self.below)) is None:
            return
        model, args, kwargs = outer
        if self.last is kwargs:  # another layer of the same call
            return
        self.last = kwargs
        key = key_of(model, self.comm)
        self.uses.setdefault((model, key), ModelUse(model, key, args, kwargs))

    @uncompiled
    def try_all(self) -> None:
        """Try the models, where such calls were not tried before. A collective if there are any.

        Raises: NotImplementedError on every rank if the rows of a model do not follow on some.
        """
        if not (uses := list(self.uses.values())):
            return
        every = self.comm.gather("sdpa: what models run", [use.key for use in uses])
        for number, use in enumerate(uses):
            keys = [others[number] for others in every if number < len(others)]
            call = ModelCall(use.model, self.plan, self.comm, keys, use.key)
            if call.is_due():
                self._try(call, use.args, use.kwargs)
            elif why := call.changed():
                warn_untried(use.model, why)

    def _try(self, call: ModelCall, args: Any, kwargs: Any) -> None:
        """Try a call of a model."""
        model = call.model
        check_model(model)
        reasons = of_transformers(model)
        if model.training:
            reasons += dropping(model) + renorming(model)
        if reasons:
            raise refused(model, reasons)
        verdict = call.tried(model, args, kwargs, self.block)
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
