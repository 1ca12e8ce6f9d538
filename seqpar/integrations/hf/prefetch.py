"""Plans made ahead: kept ones of short batches that come again, and a loader's next batches planned by a thread.

The thread makes plans, and what the first layer derives from them. Ranks exchange the lengths of the next batches in
the calling thread, between two forwards, so collectives are the same on every rank and in one order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.data.host import moved
from seqpar.data.prefetch import Epoch, Epochs, Loader, planning_thread, with_lookahead
from seqpar.data.snapshot import OverwrittenError, Snapshot
from seqpar.data.union import Brought
from seqpar.facts.value import Ints, frozen, integer
from seqpar.ops.core.agreement import gathering
from seqpar.plan import Plan

KEPT = 8  # plans of short batches to keep
SHORT = 1 << 15  # tokens of a short batch; longer ones take long to compute anyway, and their plans take memory


class Plans:
    """A planner that first looks among the plans it has made.

    make: the planner, of lengths, ranks, a state, and the number of documents that each rank brings. state: the other
    inputs of plans; None for planners that must be asked for every batch.
    """

    def __init__(
        self, make: Callable[[Ints, int, Hashable, Brought | None], Plan], state: Callable[[], Hashable] | None
    ) -> None:
        self._make, self._state = make, state
        self._coming: OrderedDict[Hashable, Future[Plan]] = OrderedDict()
        self._kept: OrderedDict[Hashable, Plan] = OrderedDict()

    @property
    def repeats(self) -> bool:
        """Whether equal documents and states always have equal plans."""
        return self._state is not None

    def __call__(self, lengths: Ints, ranks: int, *, brought: Brought | None) -> Plan:
        """The plan of documents of these lengths."""
        state = None if self._state is None else self._state()
        key = (lengths.tobytes(), ranks, state, brought)
        if key in self._coming:
            return self._coming.pop(key).result()
        if self._state is None or int(lengths.sum()) > SHORT:
            return self._make(lengths, ranks, state, brought)
        if key not in self._kept:
            self._kept[key] = self._make(lengths, ranks, state, brought)
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def start(
        self, lengths: Ints, ranks: int, thread: ThreadPoolExecutor, derive: Callable[[Plan], None], *,
        brought: Brought | None,
    ) -> None:  # fmt: skip
        """Start a thread on the plan of documents that come later, unless the plan is kept."""
        state = None if self._state is None else self._state()
        key = (lengths.tobytes(), ranks, state, brought)
        if key not in self._kept:
            self._coming[key] = thread.submit(self._derived, derive, lengths, ranks, state, brought)
        if len(self._coming) > KEPT:  # the oldest was never asked for
            self._coming.popitem(last=False)

    def _derived(self, derive: Callable[[Plan], None], *batch: Any) -> Plan:
        plan = self._make(*batch)
        derive(plan)
        return plan

    def forget(self) -> None:
        """Drop the plans made ahead that were not asked for."""
        self._coming.clear()


def prefetched(
    batches: Iterable[Any], comm: Comm, plans: Plans, read: Callable[[Mapping[str, Any]], Ints],
    derive: Callable[[Plan], None], *, depth: int, device: torch.device | str | None, replicated: bool,
) -> Iterator[Any]:  # fmt: skip
    """A loader's batches, as `seqpar.integrations.hf.model.ParallelTransformer.prefetch` says.

    read: a batch -> the lengths of its documents. derive, replicated: as for `planned_batches`.
    """

    def bring(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Ints]:
        lengths = read(batch)
        if device is None:
            return batch, lengths
        return {name: moved(x, device) if isinstance(x, Tensor) else x for name, x in batch.items()}, lengths

    depth = integer("depth", depth, 1)
    return Epochs(
        lambda: planned_batches(Loader(batches), comm, plans, bring, derive, depth=depth, replicated=replicated)
    )


def planned_batches(
    loader: Loader, comm: Comm, plans: Plans, bring: Callable[[Any], tuple[Any, Ints]],
    derive: Callable[[Plan], None], *, depth: int, replicated: bool,
) -> Epoch[Any]:  # fmt: skip
    """The batches of one epoch in order, and whether each is the last. A collective.

    While one is computed, the next `depth` are planned.

    bring: a batch of the loader -> the batch to yield, and the lengths of its documents. derive: is called in the
    thread with each plan, to derive what the first layer needs. replicated: all ranks have the same batches.

    Raises: at the batch's turn, the error of a rank's loader on that rank, and ValueError on the others; ValueError on
    all ranks if some loaders have ended and others have not, and at once if a batch that was read ahead is overwritten.
    """
    with planning_thread() as thread:

        def begin(waiting: Sequence[tuple[Any, Snapshot]]) -> tuple[Any, Snapshot] | None:
            snapshots = [snapshot for _, snapshot in waiting]
            batch, union, counts = _told(loader, comm, bring, snapshots, depth=depth, replicated=replicated)
            if union is None:
                return None
            plans.start(union, comm.size, thread, derive, brought=counts)
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
            "ranks; give every rank as many batches, as by drop_last=True of a DataLoader"
        )
    if replicated:
        return batch, frozen(every[0]), None
    return batch, frozen(np.concatenate(every)), tuple(each.size for each in every)
