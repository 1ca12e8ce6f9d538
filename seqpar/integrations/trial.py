"""When a model is tried, and what stands in for its attention meanwhile: what `seqpar.integrations.probe` leaves open.

A model is tried when a comm first sees it called in some way, and again when a batch or a document is twice as long as
any before, as something may begin to depend on the longest position.

Where ranks meet in the forward of a model, in FSDP's gathers or DDP's buffers, each of them must run it as often. So
whether such a model is tried, and how often it is run, follows from what all of them know: whether it is in training,
and the plan, if no others than its ranks meet; arguments, which may differ between ranks, do not decide.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.integrations.probe import READINGS, Positions, Verdict, tried, under_trial
from seqpar.plan import Plan

KEPT = 64  # ways of calling a model that are kept, oldest first
Sizes = tuple[int, int]
_seen: weakref.WeakKeyDictionary[Comm, weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Sizes]]]
_seen = weakref.WeakKeyDictionary()
_together: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models in whose forward ranks have been found to meet


def stand_in(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """What takes the place of attention, [T, H, D_v]: a function of each row of q, k and v alone, which are noted."""
    k, v = (x.repeat_interleave(q.shape[1] // max(1, x.shape[1]), 1) for x in (k, v))
    if plan.mask.tokens == plan.mask.kv_tokens and plan.kv_layout is plan.layout:
        out = (q.sum(-1, keepdim=True) + k.sum(-1, keepdim=True)) * q.shape[-1] ** -0.5 + v
    else:  # keys are other rows
        out, k, v = q.sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]), k[:0], v[:0]
    if (record := under_trial()) is not None:
        record.attends(q, k, v)
    return out


class Steady(TorchFunctionMode):
    """A mode in which nothing is drawn: dropout drops nothing, and random numbers are all alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        out = func(*args, **kwargs)
        return out.fill_(_RANDOM[func]) if func in _RANDOM and isinstance(out, Tensor) else out


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
_RANDOM: dict[Any, float] = {
    torch.rand: 0.5, torch.rand_like: 0.5, Tensor.uniform_: 0.5, Tensor.random_: 0, torch.randint: 0,
    torch.randint_like: 0, torch.randn: 0.0, torch.randn_like: 0.0, torch.normal: 0.0, Tensor.normal_: 0.0,
    torch.bernoulli: 1, Tensor.bernoulli: 1, Tensor.bernoulli_: 1, Tensor.exponential_: 1.0,
}  # fmt: skip


class Call:
    """A call of a model that is to be tried, unless one like it has been. key: how the model is called."""

    def __init__(self, model: nn.Module, plan: Plan, comm: Comm, key: Hashable) -> None:
        self.model, self.plan, self.comm, self.key = model, plan, comm, key
        self.longest = plan.memo("longest", lambda: int(plan.mask.lengths.max(initial=0)))
        self.sizes = tuple(max(0, n - 1).bit_length() for n in (plan.mask.tokens, self.longest))
        self.known = _seen.setdefault(comm, weakref.WeakKeyDictionary()).setdefault(model, {})
        if model not in _together and self.is_new() and ranks_meet(model):
            _together.add(model)
        self.together = model in _together
        self.once = self.together and comm.size != dist.get_world_size()
        if self.together:
            self.key = model.training
        if self.once:  # ranks of other comms, which have other plans, may be in the same forward
            self.sizes = 0, 0

    def is_new(self) -> bool:
        """Whether none like it has been tried."""
        before = self.known.get(self.key, (-1, -1))
        return any(now > then for now, then in zip(self.sizes, before))

    def try_(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]]
    ) -> Verdict:
        """What two runs show. block: reroutes attention. A collective if ranks meet in the model's forward."""
        plan, rank = self.plan, self.comm.rank
        own, every = plan.rope_positions(rank), plan.positions(rank)
        positions = [Positions(own, self.longest - 1), Positions(every, plan.mask.tokens - 1)]

        def around() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(Steady())
            stack.enter_context(block())
            return stack

        if not self.together:
            return tried(self.model, run, args, kwargs, positions, around)
        if self.once:
            self.settle()
        readings = 1 if self.once else READINGS
        return tried(self.model, run, args, kwargs, positions, around, told=self._told, readings=readings)

    def of_all(self, verdict: Verdict) -> Verdict:
        """What all ranks found, the same on each. A collective."""
        verdicts = self._told(verdict)
        reason = next((other.reason for other in verdicts if other.reason), "")
        error = next((other.error for other in verdicts if other.error), "")
        return Verdict(reason, error, any(other.saw for other in verdicts))

    def _told(self, value: Any) -> list[Any]:
        return self.comm.gather(f"sdpa: whether {type(self.model).__name__} mixes rows", value)

    def left_to_others(self) -> bool:
        """Whether this rank has too few rows to show anything, and another one has enough."""
        rows = [self.plan.rows(rank) for rank in range(self.plan.ranks)]
        return rows[self.comm.rank] < 2 <= max(rows)

    def settle(self) -> None:
        """Remember a call that was found right."""
        before = self.known.pop(self.key, (-1, -1))
        self.known[self.key] = max(self.sizes[0], before[0]), max(self.sizes[1], before[1])
        if len(self.known) > KEPT:
            del self.known[next(iter(self.known))]

    def refusal(self, reason: str) -> NotImplementedError:
        """The error of a model that cannot be computed row by row."""
        return NotImplementedError(
            f"{type(self.model).__name__} cannot be computed on several ranks: tried with its rows in another order, "
            f"{reason}"
        )


def ranks_meet(model: nn.Module) -> bool:
    """Whether ranks meet in the forward of a model: in a wrapper of PyTorch's, or because its parameters are shards."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)
    if fsdp is not None:
        kinds += fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    sharded = tensor is not None and any(isinstance(x, tensor.DTensor) for x in model.parameters())
    return sharded or any(isinstance(module, kinds) for module in model.modules())


def way_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Hashable:
    """How a model is called: the names and kinds of its arguments."""
    return tuple(map(_kind, args)), tuple((n, _kind(x)) for n, x in sorted(kwargs.items()) if x is not None), training


def _kind(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.dim(), x.dtype
    return x if x is None or isinstance(x, (bool, str)) else type(x)


def outermost(below: FrameType | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """The call of a module that this thread is in and that is in no other, among those made from a frame on."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None and frame is not below:
        if frame.f_code is _CALL:
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    return tuple(found.f_locals[name] for name in ("self", "args", "kwargs"))  # type: ignore[return-value]


_CALL = nn.Module._wrapped_call_impl.__code__
