"""When a model of plain PyTorch is tried, and by which ranks; the models that attend inside an `sdpa` block.

A model is tried when a comm first sees it, in training and in eval, and again when the class or forward of one of its
modules is another on some rank (`seqpar.trial.identity`). Ranks exchange this before each forward, so all of them try
it at the same time, and refuse it together.

Ranks may meet in a model's forward: in an exchange of its own, in FSDP's gathers, in DDP's buffers. Then each of them
must run it equally often. If ranks of several comms meet there, which may have other plans, each comm tries it once.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.plan import Plan
from seqpar.private.torch import wrapped_call
from seqpar.trial.compare import Verdict
from seqpar.trial.identity import identity
from seqpar.trial.modules import SEES, check_model, dropping, of_transformers, renorming
from seqpar.trial.rows import Positions
from seqpar.trial.runs import READINGS, try_model

Key = tuple[bool, int]  # whether a model is training, and its `identity`

_NEVER_FILLED = (Tensor, bool, int, float, str, type(None))
_CALL = wrapped_call(nn.Module).__code__
_passed: weakref.WeakKeyDictionary[Comm, weakref.WeakKeyDictionary[nn.Module, dict[Any, int]]]
_passed = weakref.WeakKeyDictionary()
_together: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models in whose forward ranks meet


def key_of(model: nn.Module, comm: Comm) -> Key:
    """What a trial of a model is valid for, on this rank."""
    return model.training, identity(comm.size, model.modules())


class ModelCall:
    """A call of a model, to be tried unless one like it was.

    keys: of the model on all ranks. own: this rank's.
    """

    def __init__(self, model: nn.Module, plan: Plan, comm: Comm, keys: Sequence[Key], own: Key) -> None:
        self.model, self.plan, self.comm, self.own = model, plan, comm, own
        self.passed = _passed.setdefault(comm, weakref.WeakKeyDictionary()).setdefault(model, {})
        if model not in _together and tuple(keys) not in self.passed and ranks_meet(model):
            _together.add(model)
        self.together = model in _together
        self.once = self.together and comm.size != dist.get_world_size()
        # ranks of other comms, with other plans and models, may be in the same forward
        self.key: Any = model.training if self.once else tuple(keys)

    def is_due(self) -> bool:
        """Whether to try it."""
        return self.key not in self.passed

    def tried(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]]
    ) -> Verdict:
        """The ranks' common verdict on the call. A collective.

        block: reroutes attention. Raises NotImplementedError on every rank if one refuses the model.
        """
        verdicts = self._gather(self._run(run, args, kwargs, block))
        reason, error = (next(filter(None, texts), "") for texts in list(zip(*verdicts))[:2])
        verdict = Verdict(reason, error, *(any(told) for told in zip(*(other[2:] for other in verdicts))))
        if verdict.reason:
            raise NotImplementedError(f"{type(self.model).__name__} cannot be computed on several ranks: {reason}")
        if not verdict.error and (verdict.saw or verdict.blind):  # else there may be more to see in another call
            self.passed[self.key] = self.own[1]
        return verdict

    def _run(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]]
    ) -> Verdict:
        """The verdict of this rank's runs. A collective if ranks meet in the model's forward."""
        plan, rank = self.plan, self.comm.rank
        longest = int(plan.mask.lengths.max(initial=0))
        positions = [Positions(plan.rope_positions(rank), longest - 1)]
        positions.append(Positions(plan.positions(rank), plan.mask.tokens - 1))

        if not self.together:
            return try_model(self.model, run, args, kwargs, positions, block)
        if self.once:
            self.passed[self.key] = self.own[1]
        readings = 1 if self.once else READINGS
        return try_model(
            self.model, run, args, kwargs, positions, block, gather=self._gather, readings=readings, alone=False
        )

    def _gather(self, value: Any) -> list[Any]:
        return self.comm.gather(f"sdpa: whether {type(self.model).__name__} mixes rows", value)

    def changed(self) -> str | None:
        """Why what was tried may be out of date, though it is not tried again."""
        if not self.once or self.passed.get(self.key) in (None, self.own[1]):
            return None
        return (
            "its modules or forwards were changed after it was tried, and it is not tried again, since ranks of other "
            "comms meet in its forward; change it before its first forward"
        )

    def untried(self, verdict: Verdict) -> str | None:
        """The reason why the trial was inconclusive, or None."""
        if verdict.error:
            return f"trying it with its rows in another order failed: {verdict.error}"
        if verdict.blind and not verdict.saw and self.comm.size > 1:
            return "none of its arguments has a dim of its rank's rows, which a trial would put in another order"
        if self.comm.size == 1 or any(self.plan.rows(rank) > 1 for rank in range(self.plan.ranks)):
            return None
        return f"a trial changes the order of a rank's rows, and no rank has two of the plan's {self.plan.mask.tokens}"


def ranks_meet(model: nn.Module) -> bool:
    """Whether ranks meet in a model's forward: in a wrapper of PyTorch's, or because its parameters are sharded."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)
    if fsdp is not None:
        kinds += fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    return any(map(is_dtensor, model.parameters())) or any(isinstance(module, kinds) for module in model.modules())


def outermost(below: FrameType | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """The outermost call of a module that this thread is in, among those above a frame."""
    frame: FrameType | None = sys._getframe(1)
    call = None
    while frame is not None and frame is not below:
        if frame.f_code is _CALL:
            call = frame
        frame = frame.f_back
    if call is None:
        return None
    return tuple(call.f_locals[name] for name in ("self", "args", "kwargs"))  # type: ignore[return-value]


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
        self.uses: dict[tuple[nn.Module, Key], tuple[Any, Any]] = {}  # the arguments of the first call of each

    def notice(self) -> None:
        """Record the call of a module that attends inside this block, to try it when the block ends."""
        if (outer := outermost(self.below)) is None:
            return
        model, args, kwargs = outer
        if self.last is kwargs:  # another layer of the same call
            return
        self.last = kwargs
        self.uses.setdefault((model, key_of(model, self.comm)), (args, kwargs))

    @uncompiled
    def try_all(self) -> None:
        """Try the models, where such calls were not tried before. A collective if there are any.

        Raises: NotImplementedError on every rank if the rows of a model do not follow on some.
        """
        if not self.uses:
            return
        every = self.comm.gather("sdpa: what models run", [key for _, key in self.uses])
        for number, ((model, key), (args, kwargs)) in enumerate(self.uses.items()):
            keys = [others[number] for others in every if number < len(others)]
            call = ModelCall(model, self.plan, self.comm, keys, key)
            if call.is_due():
                self._try(call, args, kwargs)
            elif why := call.changed():
                warn_untried(model, why)

    def _try(self, call: ModelCall, args: Any, kwargs: Any) -> None:
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
