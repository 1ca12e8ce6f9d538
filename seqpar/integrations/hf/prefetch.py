"""A loader's next batches, planned by a thread while one is computed.

The thread makes plans, and what the first layer derives from them. Ranks exchange the lengths of the next batches in
the calling thread, between two forwards, so collectives are the same on every rank and in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from seqpar.integrations.hf.plans import Plans
from seqpar.ops.core.agreement import gathering


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
