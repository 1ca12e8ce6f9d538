"""The wrapper that averages a model's gradients: DistributedDataParallel around its forward, or FSDP2 inside it.

A rank's loss is a share, and shares are summed. So under a wrapper that averages, losses are `average_over` times as
large, or gradients are too small.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.train.dtensor import global_rank


class Averaging(NamedTuple):
    """A wrapper's effect on gradients: their sum over the global ranks ``ranks``, divided by ``divisor``.

    sharded: whether parameters are shards, and those that are not are left alone.
    """

    who: str
    ranks: frozenset[int]
    divisor: float
    sharded: bool

    def covers(self, ranks: frozenset[int], size: int) -> bool:
        """Whether all ranks of a comm are among the wrapper's, so that it reduces gradients over the comm.

        ranks: the comm's global ranks; if they are fewer than its size, they are not known, and the numbers decide.
        """
        return ranks <= self.ranks if len(ranks) == size else len(self.ranks) % size == 0

    def average_over(self, size: int) -> float:
        """The `average_over` for which gradients are the mean over comms of ``size`` ranks that the wrapper covers."""
        return self.divisor * size / len(self.ranks)

    def misfit(self, size: int, average_over: int) -> Misfit | None:
        """Why a loss for that `average_over` does not fit; None if it does."""
        expected = self.average_over(size)
        if expected % 1 or expected == average_over:
            return None
        why = (
            f"{self.who} divides the sum of {len(self.ranks)} ranks' gradients by {self.divisor:g}, so that they are "
            f"{average_over}/{expected:g} of this loss's"
        )
        return Misfit(why, int(expected))


class Misfit(NamedTuple):
    """Why a loss is not made for its wrapper, and the `average_over` that is."""

    why: str
    average_over: int


class WrapperCheck:
    """Finds the wrapper that reduces a model's gradients over the ranks of a comm.

    ranks: the comm's global ranks, as in `Averaging.covers`; size: of the comm.
    """

    def __init__(self, ranks: frozenset[int], size: int) -> None:
        self.ranks, self.size = ranks, size
        # with the class of the model at that time, which `fully_shard` changes
        self._fsdp: tuple[type[nn.Module], Averaging | None] | None = None
        self._checked = False

    def find(self, model: nn.Module) -> Averaging | None:
        """The wrapper around the forward that begins, or in its model, if it reduces gradients over the comm."""
        found = by_ddp(model)
        if found is None:
            if self._fsdp is None or self._fsdp[0] is not type(model):
                self._fsdp = type(model), by_fsdp(model, trained=True)
            found = self._fsdp[1]
        return found if found is not None and found.covers(self.ranks, self.size) else None

    def check(self, what: str, model: nn.Module, average_over: int) -> None:
        """Warn on one rank, in the first forward inside a wrapper, if it averages by another number than that."""
        if self._checked or not torch.is_grad_enabled() or (found := self.find(model)) is None:
            return
        self._checked = True
        if (misfit := found.misfit(self.size, average_over)) and global_rank() == min(self.ranks):
            warnings.warn(
                f"{what}: {misfit.why}; give seqpar.parallelize(..., average_over={misfit.average_over}), and leave "
                "the loss as it is",
                stacklevel=3,
            )


class LossCheck:
    """Warns once of a loss that is not made for the wrapper of its model, where the model's caller computes it.

    size: of the comm, over which the wrapper reduces gradients.
    """

    def __init__(self, size: int) -> None:
        self.size, self.told = size, False

    @contextmanager
    def inside(self, wrapper: Averaging) -> Iterator[None]:
        """A forward, which may compute the loss itself."""
        before, _inside.mark = _inside.mark, (self, wrapper)
        try:
            yield
        finally:
            _inside.mark = before

    def mark(self, wrapper: Averaging, results: Iterable[object]) -> None:
        """Mark the results of a forward, by which a loss of them is known."""
        global _marked_any
        _marked_any = True
        for x in results:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.metadata[MARK] = self, wrapper


_marked_any = False  # in this process; else losses need not look for marks
MARK = "seqpar: wrapper"  # a key of the metadata of autograd's nodes
FAR = 64  # nodes between a model's result and its loss


class _Inside(threading.local):
    """The forward that this thread is in."""

    mark: tuple[LossCheck, Averaging] | None = None


_inside = _Inside()


def check_average(what: str, rows: Tensor, average_over: int) -> None:
    """Warn of a loss of these rows that is for no wrapper, where a wrapper reduces the gradients of their model.

    A loss for another number than the comm's size may count the labels of other ranks too.
    """
    if average_over != 1 or torch.compiler.is_compiling() or not torch.is_grad_enabled() or rows.grad_fn is None:
        return
    if (mark := _inside.mark or _marked(rows)) is None or mark[0].told:
        return
    check, wrapper = mark
    check.told = True
    if misfit := wrapper.misfit(check.size, average_over):
        more = ""
        if len(wrapper.ranks) != check.size:
            more = f" (or {wrapper.divisor:g}, where `valid` counts the labels of all {len(wrapper.ranks)} ranks)"
        warnings.warn(
            f"{what}: {misfit.why}, unless you multiply it yourself; give it average_over={misfit.average_over}{more}",
            stacklevel=3,
        )


def _marked(x: Tensor) -> tuple[LossCheck, Averaging] | None:
    """The mark of the forward that x comes from, a few operations away."""
    found, seen = [x.grad_fn] if _marked_any else [], set[Any]()
    for node in found:
        if node is not None and node not in seen and len(seen) < FAR:
            seen.add(node)
            if MARK in node.metadata:
                return node.metadata[MARK]  # type: ignore[no-any-return]
            found += [each for each, _ in node.next_functions]
    return None


def by_ddp(model: nn.Module) -> Averaging | None:
    """The reduction of this pass's gradients by DistributedDataParallel, called inside its forward."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync or ddp._comm_hooks:
        return None  # only its author knows what a hook does
    if not any(module is model for module in ddp.module.modules()):
        return None
    ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
    return Averaging("DistributedDataParallel", ranks, len(ranks), sharded=False)


def by_fsdp(model: nn.Module, *, trained: bool = False) -> Averaging | None:
    """The reduction of a model's gradients by `fully_shard`, or of its first sharded part; if trained, not frozen."""
    for group in _groups(model):
        if trained and not any(p.sharded_param.requires_grad for p in group.fsdp_params):
            continue
        ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
        return Averaging("fully_shard", ranks, group.gradient_divide_factor or len(ranks), sharded=True)
    return None


def shards(model: nn.Module) -> dict[int, int]:
    """The ids of shards, which optimizers have, by those of the parameters that `fully_shard` makes whole of them."""
    every = (p for group in _groups(model) for p in group.fsdp_params)
    return {id(p._unsharded_param): id(p.sharded_param) for p in every if hasattr(p, "_unsharded_param")}


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that `fully_shard` was called for."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (module for module in model.modules() if isinstance(module, fsdp.FSDPModule)) if fsdp else iter(())


def in_flat(p: object) -> bool:
    """Whether a parameter holds a shard of `FullyShardedDataParallel` (FSDP1): a flat one, or one inside that."""
    return getattr(p, "_fsdp_flattened", False)


def _groups(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that `fully_shard` reduces together."""
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # of a PyTorch that has several for a module
        yield from filter(None, [state._fsdp_param_group] if several is None else several)
