"""When a model is tried, and by which ranks.

A model is tried when a comm first sees it called in some way, and again when a batch or a document is twice as long or
half as long as any before, since something may depend on the longest position or on the number of rows. For effects
that only show after some steps it is tried again at the 16th such call. A call of a model whose code has changed, by
another module, forward, hook, mode or flag, is a new one.

Ranks may meet in a model's forward, in an exchange of its own or of a wrapper. So they tell each other the code of
their models before each forward, and a change on one rank, such as a hook, is tried by all. In FSDP's gathers and DDP's
buffers each rank must run a model equally often. Whether such a model is tried, and how often, follows from facts that
all ranks know: training mode, and the plan and the codes if only ranks of the comm meet. Arguments do not decide, as
they may differ between ranks: a rank that is called in a new way tries other models alone, and the next exchange tells
the others if it refuses.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.plan import Plan
from seqpar.trial.code import Code, KnownCodes, autocast_dtypes
from seqpar.trial.compare import Verdict
from seqpar.trial.near_zero import in_place_of_zeros
from seqpar.trial.rows import Positions
from seqpar.trial.runs import READINGS, try_model
from seqpar.trial.stand_ins import Deterministic

AGAIN = 16  # the call at which a model that passed is tried once more
KEPT = 64  # remembered ways of calling models, and codes of a model; the oldest go first
BatchSizes = frozenset[tuple[str, int]]  # batch and document sizes, in powers of 2


class CallWay(NamedTuple):
    """The way in which a model is called. autocast: the dtypes of `autocast_dtypes`."""

    arguments: tuple[Hashable, ...]
    named: tuple[Hashable, ...]
    training: bool
    autocast: tuple[Any, ...]


Key = CallWay | bool  # what decides whether a call is new: the way, or for all ranks whether the model is training


class CallHistory(NamedTuple):
    """A way of calling a model: the sizes with which it passed, and the number of calls."""

    sizes: BatchSizes = frozenset()
    calls: int = 0


class ModelHistory:
    """What a comm knows of a model. codes: its code on each rank -> the ways in which it was called since.

    tried: of a model that is tried once for each mode, whether it was training -> `Code.written` then.
    """

    def __init__(self) -> None:
        self.codes: dict[Hashable, dict[Key, CallHistory]] = {}
        self.tried: dict[bool, int] = {}
        self._known = KnownCodes()

    def of(self, codes: Sequence[Code]) -> dict[Key, CallHistory]:
        """The ways in which a model of such codes was called, the same on all ranks, which ask for the same codes."""
        found = self.codes.setdefault(self._known.key(codes), {})
        if len(self.codes) > KEPT:  # the same one on all ranks
            del self.codes[next(iter(self.codes))]
        return found


_histories: weakref.WeakKeyDictionary[Comm, weakref.WeakKeyDictionary[nn.Module, ModelHistory]]
_histories = weakref.WeakKeyDictionary()
_together: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models in whose forward ranks meet


def history_of(model: nn.Module, comm: Comm) -> ModelHistory:
    """What a comm knows of a model."""
    return _histories.setdefault(comm, weakref.WeakKeyDictionary()).setdefault(model, ModelHistory())


class ModelCall:
    """A call of a model, to be tried unless one like it was.

    way: that in which this rank calls the model; None for what all ranks know, and so try at a time. codes: those of
    the model on all ranks. own: this rank's.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, comm: Comm, way: CallWay | None, codes: Sequence[Code], own: Code
    ) -> None:  # fmt: skip
        self.model, self.plan, self.comm, self.own = model, plan, comm, own
        self.longest = plan.memo("longest", lambda: int(plan.mask.lengths.max(initial=0)))
        sizes = {"batch": plan.mask.tokens, "document": self.longest}
        self.sizes: BatchSizes = frozenset((what, max(0, n - 1).bit_length()) for what, n in sizes.items())
        self.history = history_of(model, comm)
        self.key: Key = model.training if way is None else way
        self.known = self.history.of(codes)
        if model not in _together and self.is_new() and ranks_meet(model):
            _together.add(model)
        self.together = model in _together
        self.once = self.together and comm.size != dist.get_world_size()
        self.shared = way is None or self.together  # whether all ranks try it at a time
        if self.together:
            self.key = model.training
        if self.once:  # ranks of other comms, with other plans and codes, may be in the same forward
            self.sizes, self.known = frozenset({("any", 0)}), self.history.of([])

    def is_new(self) -> bool:
        """Whether no call like it has been tried."""
        return not self.sizes <= self.known.get(self.key, CallHistory()).sizes

    def is_due(self) -> bool:
        """Whether to try it; counts the calls of a way that passed."""
        if self.is_new():
            return True
        history = self.known[self.key]
        self.known[self.key] = history = history._replace(calls=history.calls + 1)
        return history.calls == AGAIN

    def tried(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]], *,
        alike: Sequence[ModelCall] = (),
    ) -> Verdict:  # fmt: skip
        """The verdict on the call, the common one if all ranks try it; remembered for it and for those that are alike.

        block: reroutes attention. Raises NotImplementedError on every rank if one refuses the model.
        """
        verdict = self._run(run, args, kwargs, block)
        if self.shared:
            verdict = self._of_all(verdict)
        if verdict.reason:
            with nullcontext() if self.shared else errors_on_all_ranks("sdpa", self.comm):
                raise self.refusal(verdict.reason)
        if self._is_settled_by(verdict):
            for each in (self, *alike):
                each._settle()
        return verdict

    def _run(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]]
    ) -> Verdict:
        """The verdict of this rank's runs. A collective if ranks meet in the model's forward."""
        plan, rank = self.plan, self.comm.rank
        own, every = plan.rope_positions(rank), plan.positions(rank)
        positions = [Positions(own, self.longest - 1), Positions(every, plan.mask.tokens - 1)]

        # a shard's frozen part concerns its rank only, and a rank that fails with others would run again alone
        weights = {} if self.together else in_place_of_zeros(self.model)

        def replacing() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(Deterministic(weights))
            stack.enter_context(block())
            return stack

        if not self.together:
            verdict = try_model(self.model, run, args, kwargs, positions, replacing)
            if verdict.error and weights:
                weights.clear()
                verdict = try_model(self.model, run, args, kwargs, positions, replacing)
            return verdict
        if self.once:
            self._settle()
        readings = 1 if self.once else READINGS
        return try_model(
            self.model, run, args, kwargs, positions, replacing, gather=self._gather, readings=readings, alone=False
        )

    def _of_all(self, verdict: Verdict) -> Verdict:
        """The ranks' common verdict, the same on each. A collective."""
        verdicts = self._gather(verdict)
        reason = next((other.reason for other in verdicts if other.reason), "")
        error = next((other.error for other in verdicts if other.error), "")
        return Verdict(reason, error, *(any(told) for told in zip(*(other[2:] for other in verdicts))))

    def _gather(self, value: Any) -> list[Any]:
        return self.comm.gather(f"sdpa: whether {type(self.model).__name__} mixes rows", value)

    def changed(self) -> str | None:
        """Why what was tried may be out of date, though it is not tried again."""
        if not self.once or self.history.tried.get(self.model.training) in (None, self.own.written):
            return None
        return (
            "its modules, forwards or hooks were changed after it was tried, and it is not tried again, since ranks of "
            "other comms meet in its forward; change it before its first forward"
        )

    def _is_settled_by(self, verdict: Verdict) -> bool:
        """Whether such calls need no other trial: it saw rows, there were none to see, or another rank has more."""
        rows = [self.plan.rows(rank) for rank in range(self.plan.ranks)]
        left_to_others = not self.shared and rows[self.comm.rank] < 2 <= max(rows)
        return not verdict.error and (verdict.saw or verdict.blind or left_to_others)

    def untried(self, verdict: Verdict) -> str | None:
        """Why the trial shows nothing, None if it shows something."""
        if verdict.error:
            return f"trying it with its rows in another order failed: {verdict.error}"
        if verdict.blind and not verdict.saw and self.comm.size > 1:
            return "none of its arguments has a dim of its rank's rows, which a trial would put in another order"
        if self.comm.size == 1 or any(self.plan.rows(rank) > 1 for rank in range(self.plan.ranks)):
            return None
        return f"a trial changes the order of a rank's rows, and no rank has two of the plan's {self.plan.mask.tokens}"

    def _settle(self) -> None:
        """Remember a call that passed."""
        before = self.known.pop(self.key, CallHistory(calls=1))
        self.known[self.key] = before._replace(sizes=before.sizes | self.sizes)
        if self.once:
            self.history.tried.setdefault(self.model.training, self.own.written)
        # what all ranks know is never forgotten, as not all of them would
        ways = [key for key in self.known if not isinstance(key, bool)]
        if len(ways) > KEPT:
            del self.known[ways[0]]

    def refusal(self, reason: str) -> NotImplementedError:
        """The error for a model that cannot be computed row by row."""
        return NotImplementedError(f"{type(self.model).__name__} cannot be computed on several ranks: {reason}")


def ranks_meet(model: nn.Module) -> bool:
    """Whether ranks meet in a model's forward: in a wrapper of PyTorch's, or because its parameters are sharded."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)
    if fsdp is not None:
        kinds += fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    sharded = tensor is not None and any(isinstance(x, tensor.DTensor) for x in model.parameters())
    return sharded or any(isinstance(module, kinds) for module in model.modules())


def way_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> CallWay:
    """The way in which a model is called: the names and kinds of its arguments, the values of flags, and autocast."""
    named = tuple((n, _kind(x)) for n, x in sorted(kwargs.items()) if x is not None)
    return CallWay(tuple(map(_kind, args)), named, training, autocast_dtypes())


def _kind(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.dim(), x.dtype
    is_flag = x is None or isinstance(x, (bool, str, Enum)) or (isinstance(x, int) and x in (0, 1))
    return (type(x), x) if is_flag else type(x)


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


_CALL = nn.Module._wrapped_call_impl.__code__
