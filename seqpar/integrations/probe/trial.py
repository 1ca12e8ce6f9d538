"""When a model is tried, and what stands in for its attention meanwhile: what `seqpar.integrations.probe` leaves open.

A model is tried when a comm first sees it called in some way, and again when a batch or a document is twice as long as
any before or half as long, as something may depend on the longest position, or on how many rows there are.

Weights that are zero or nearly so may hide what a model does: gates, adapters, tables of positions before a first step.
In tried runs others take their place, for this thread's calls alone: the model is not touched. What shows only after
some steps, or where ranks meet, is for another time: the 16th such call.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from seqpar.comm import Comm
from seqpar.integrations.probe.runs import READINGS, Positions, Verdict, tried, under_trial
from seqpar.plan import Plan

ASLEEP = 1e-3  # the largest element of a parameter that may hide what is done with it
AGAIN = 16  # the call at which a model that was found right is tried once more
KEPT = 64  # ways of calling a model that are kept, oldest first
Sizes = frozenset[tuple[str, int]]  # of batches and documents, in powers of 2


class Found(NamedTuple):
    """What is known of a way of calling a model: the sizes with which it was found right, and how often it came."""

    sizes: Sizes = frozenset()
    calls: int = 0


_seen: weakref.WeakKeyDictionary[Comm, weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Found]]]
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
    """A mode in which nothing is drawn: dropout drops nothing, and random numbers are all alike.

    awake: by their ids, what takes the place of parameters.
    """

    def __init__(self, awake: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.awake = awake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.awake:
            args, kwargs = (tree_map(self._woken, each) for each in (args, kwargs))
        if func in _DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        out = func(*args, **kwargs)
        return out.fill_(_RANDOM[func]) if func in _RANDOM and isinstance(out, Tensor) else out

    def _woken(self, x: Any) -> Any:
        return self.awake.get(id(x), x) if isinstance(x, nn.Parameter) else x


def awakened(model: nn.Module) -> dict[int, Tensor]:
    """Random weights by the ids of the parameters whose place they take: of those that are nearly zero.

    Biases of PyTorch's own modules are nobody's gates, and stay.
    """
    found: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, p in module._parameters.items():
            bias = name.endswith("bias") and type(module).__module__.startswith("torch.nn.")
            if p is None or id(p) in found or bias or not _is_asleep(p):
                continue
            drawn = torch.rand(p.shape, generator=generator)
            # vectors may be of what must be positive, sums over rows of a matrix are to stay as large as its input
            drawn = (drawn * 2 - 1) * p.shape[-1] ** -0.5 if p.dim() > 1 else drawn / 2 + 0.5
            found[id(p)] = drawn.to(p)
    return found


def _is_asleep(p: nn.Parameter) -> bool:
    """Whether a parameter is nearly zero, and may be drawn."""
    plain = type(p) is nn.Parameter and type(p.data) is Tensor and p.layout is torch.strided
    if not plain or p.is_meta or not p.numel() or not p.is_floating_point() or p.dtype.itemsize < 2:
        return False
    return bool(torch.linalg.vector_norm(p.detach(), torch.inf) <= ASLEEP)


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
        sizes = {"batch": plan.mask.tokens, "document": self.longest}
        self.sizes: Sizes = frozenset((what, max(0, n - 1).bit_length()) for what, n in sizes.items())
        self.known = _seen.setdefault(comm, weakref.WeakKeyDictionary()).setdefault(model, {})
        if model not in _together and self.is_new() and ranks_meet(model):
            _together.add(model)
        self.together = model in _together
        self.once = self.together and comm.size != dist.get_world_size()
        if self.together:
            self.key = model.training
        if self.once:  # ranks of other comms, which have other plans, may be in the same forward
            self.sizes = frozenset({("any", 0)})

    def is_new(self) -> bool:
        """Whether none like it has been tried."""
        return not self.sizes <= self.known.get(self.key, Found()).sizes

    def is_due(self) -> bool:
        """Whether it is to be tried; counts the calls of a kind that was found right."""
        if self.is_new():
            return True
        found = self.known[self.key]
        self.known[self.key] = found = found._replace(calls=found.calls + 1)
        return found.calls == AGAIN

    def try_(
        self, run: Callable[..., Any], args: Any, kwargs: Any, block: Callable[[], AbstractContextManager[Any]]
    ) -> Verdict:
        """What two runs show. block: reroutes attention. A collective if ranks meet in the model's forward."""
        plan, rank = self.plan, self.comm.rank
        own, every = plan.rope_positions(rank), plan.positions(rank)
        positions = [Positions(own, self.longest - 1), Positions(every, plan.mask.tokens - 1)]

        # what is asleep in a shard is that rank's affair, and who fails with others would run again alone
        awake = {} if self.together else awakened(self.model)

        def around() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(Steady(awake))
            stack.enter_context(block())
            return stack

        if not self.together:
            verdict = tried(self.model, run, args, kwargs, positions, around)
            if verdict.error and awake:
                awake.clear()
                verdict = tried(self.model, run, args, kwargs, positions, around)
            return verdict
        if self.once:
            self.settle()
        readings = 1 if self.once else READINGS
        return tried(self.model, run, args, kwargs, positions, around, told=self._told, readings=readings, alone=False)

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
        before = self.known.pop(self.key, Found(calls=1))
        self.known[self.key] = before._replace(sizes=before.sizes | self.sizes)
        if len(self.known) > KEPT:
            del self.known[next(iter(self.known))]

    def refusal(self, reason: str) -> NotImplementedError:
        """The error of a model that cannot be computed row by row."""
        return NotImplementedError(f"{type(self.model).__name__} cannot be computed on several ranks: {reason}")


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
