"""The plans of a model's batches: those that were made already, and those that a thread makes ahead.

The thread makes plans, and what the first layer derives from them. Ranks exchange the lengths of the next batches in
the calling thread, between two forwards, so collectives are the same on every rank and in one order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.data.host import moved
from seqpar.data.prefetch import Epoch, Epochs, Loader, planning_thread, with_lookahead
from seqpar.data.snapshot import OverwrittenError, Snapshot
from seqpar.data.union import Brought
from seqpar.facts.value import Ints, frozen, integer
from seqpar.integrations.hf.config import PlanState
from seqpar.ops.core.agreement import gathering
from seqpar.plan import Plan
from seqpar.train.activations import is_recomputed

Planner = Callable[[Ints, int], Plan]

KEPT = 8  # plans of short batches to keep
SHORT = 1 << 15  # tokens of a short batch; longer ones take long to compute anyway, and their plans take memory


class Plans:
    """Plans of a model's batches; looks among those it has made first.

    plan: the planner, which is asked for every batch; None for that of `planning`. derive: what a thread does with a
    plan that it made ahead. repeats: whether equal documents and states always have equal plans.
    """

    def __init__(
        self, model: PreTrainedModel, *, causal: bool, plan: Planner | None, derive: Callable[[Plan], None]
    ) -> None:  # fmt: skip
        self._model, self._causal, self._plan, self._derive = model, causal, plan, derive
        self.repeats = plan is None
        # cached: it is asked for every batch, and walking a model takes long
        self._recomputing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._coming: OrderedDict[Hashable, Future[Plan]] = OrderedDict()
        self._kept: OrderedDict[Hashable, Plan] = OrderedDict()

    @cached_property
    def _make(self) -> Callable[[Ints, int, PlanState, Brought | None], Plan]:
        """The planner, of lengths, ranks, the state, and the number of documents that each rank brings."""
        own = self._plan
        if own is not None:
            return lambda lengths, ranks, *_: own(lengths, ranks)
        from seqpar.integrations.hf.planning import ModelPlanner  # loads the package's planner, at the first batch

        return ModelPlanner(self._model, causal=self._causal)

    @property
    def state(self) -> PlanState:
        """The inputs of a plan other than the batch."""
        recomputed = any([module.gradient_checkpointing or is_recomputed(module) for module in self._recomputing])
        return PlanState(recomputed, self._model.device.type)

    def __call__(self, lengths: Ints, ranks: int, *, brought: Brought | None) -> Plan:
        """The plan of documents of these lengths. brought: how many each rank brings; None if all bring the same."""
        key = lengths.tobytes(), ranks, self.state, brought
        if key in self._coming:
            return self._coming.pop(key).result()
        if not self.repeats or int(lengths.sum()) > SHORT:
            return self._make(lengths, *key[1:])
        if key not in self._kept:
            self._kept[key] = self._make(lengths, *key[1:])
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def start(self, lengths: Ints, ranks: int, thread: ThreadPoolExecutor, *, brought: Brought | None) -> None:
        """Start a thread on the plan of documents that come later, unless the plan is kept."""
        key = lengths.tobytes(), ranks, self.state, brought
        if key not in self._kept:
            self._coming[key] = thread.submit(self._ahead, lengths, *key[1:])
        if len(self._coming) > KEPT:  # the oldest was never asked for
            self._coming.popitem(last=False)

    def _ahead(self, lengths: Ints, *facts: Any) -> Plan:
        plan = self._make(lengths, *facts)
        self._derive(plan)
        return plan

    def forget(self) -> None:
        """Drop the plans made ahead that were not asked for."""
        self._coming.clear()


def prefetched(
    batches: Iterable[Any], comm: Comm, plans: Plans, read: Callable[[Mapping[str, Any]], Ints], *, depth: int,
    device: torch.device | str | None, replicated: bool,
) -> Iterator[Any]:  # fmt: skip
    """A loader's batches, as `seqpar.integrations.hf.model.ParallelTransformer.prefetch` says.

    read: a batch -> the lengths of its documents. replicated: all ranks have the same batches.
    """

    def bring(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Ints]:
        lengths = read(batch)
        if device is None:
            return batch, lengths
        return {name: moved(x, device) if isinstance(x, Tensor) else x for name, x in batch.items()}, lengths

    depth = integer("depth", depth, 1)
    return Epochs(lambda: _planned(Loader(batches), comm, plans, bring, depth=depth, replicated=replicated))


def _planned(
    loader: Loader, comm: Comm, plans: Plans, bring: Callable[[Any], tuple[Any, Ints]], *, depth: int, replicated: bool
) -> Epoch[Any]:
    """The batches of one epoch in order, and whether each is the last. bring: the batch to yield, and its lengths."""
    with planning_thread() as thread:

        def begin(waiting: Sequence[tuple[Any, Snapshot]]) -> tuple[Any, Snapshot] | None:
            snapshots = [snapshot for _, snapshot in waiting]
            batch, union, counts = _told(loader, comm, bring, snapshots, depth=depth, replicated=replicated)
            if union is None:
                return None
            plans.start(union, comm.size, thread, brought=counts)
            return batch, Snapshot(batch.values())

        try:
            for (batch, _), last in with_lookahead(begin, depth):
                yield batch, last
        finally:
            plans.forget()


def _told(
    loader: Loader, comm: Comm, bring: Callable[[Any], tuple[Any, Ints]], waiting: Sequence[Snapshot], *, depth: int,
    replicated: bool,
) -> tuple[Any, Ints | None, Brought | None]:  # fmt: skip
    """This rank's next batch, the lengths of all ranks' documents, and the number of documents of each rank.

    The lengths are None if all loaders have ended, the numbers None for a replicated batch. waiting: of the batches
    that this rank's loader gave before.
    """
    batch, error = loader.next()
    with gathering(f"prefetch(depth={depth}): lengths of the next batches", comm) as told:
        if error is not None:
            raise error
        lengths, holds = None, all(snapshot.holds() for snapshot in waiting)
        if holds and not loader.ended:
            batch, lengths = bring(batch)
        told.own = lengths, holds
    every, held = zip(*told.every, strict=True)
    if not all(held):
        raise OverwrittenError
    ended = [rank for rank, each in enumerate(every) if each is None]
    if len(ended) == comm.size:
        return None, None, None
    if ended:
        raise ValueError(
            f"prefetch: the loader of rank {ended[0]} ended before that of rank "
            f"{next(rank for rank in range(comm.size) if rank not in ended)}, but every forward needs all "
            "ranks; give every rank the same number of batches, as drop_last=True of a DataLoader does"
        )
    if replicated:
        return batch, frozen(every[0]), None
    return batch, frozen(np.concatenate(every)), tuple(each.size for each in every)
