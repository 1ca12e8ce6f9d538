"""`prefetch`: the shares of a loader's batches, planned ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from seqpar.comm import Comm
from seqpar.data.batch import Reading
from seqpar.data.share import Planner, Share, choose, take
from seqpar.data.union import Known, announce
from seqpar.facts.value import whole
from seqpar.ops.attention.ahead import derive
from seqpar.ops.recurrent.ahead import derive as derive_recurrent
from seqpar.planner import MicroBatch


def prefetch(
    batches: Iterable[Mapping[str, Any] | None],
    comm: Comm,
    *,
    depth: int = 1,
    source: str = "sharded",
    plan: Planner | None = None,
    shift: str = "row",
    ignore_index: int = -100,
    mtp_depth: int = 0,
    keep: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> Iterator[Share]:
    """The `share` of every batch; a thread plans the next `depth` batches while a share is computed.

    Each step of the iterator is a collective of the calling thread, which reads batches, exchanges lengths and moves
    rows. The planning thread calls `plan`, and derives what first layers would, for calls of attention and of recurrent
    layers like those with earlier plans; it uses no comm and no process group. It ends with the iterator: at the last
    batch, at an error, and on ``close``.

    Loaders may differ in length: a rank whose loader has ended contributes empty batches until all have ended (loaders
    of a replicated source must end together). The other arguments are those of `share`.

    Raises: at the batch's turn, as `share`; the error of a rank's loader on that rank, and ValueError on all others.
    """
    depth = whole("depth", depth, 1)
    how = Reading(shift, ignore_index, keep, device, mtp_depth)
    loader = Loader(batches)
    with ThreadPoolExecutor(1, thread_name_prefix="seqpar plans ahead") as thread:
        ahead: deque[tuple[Known, Future[Any]] | Exception] = deque()
        going = True
        while going or ahead:
            while going and len(ahead) <= depth:
                try:
                    batch, error = loader.next()
                    known = announce(batch, comm, source, how, error=error, ended=loader.ended, depth=depth)
                except Exception as failure:
                    ahead.append(failure)
                    going = False
                    break
                if known is None:
                    going = False
                else:
                    ahead.append((known, thread.submit(_chosen, known, comm, plan)))
            if ahead:
                item = ahead.popleft()
                if isinstance(item, Exception):
                    raise item
                known, chosen = item
                (only,) = take(known, comm, how, chosen.result())
                yield only


def _chosen(known: Known, comm: Comm, planner: Planner | None) -> list[MicroBatch] | Exception:
    """The plan of a union, with all that its first layers would derive; or the error that prevents it."""
    chosen = choose(known, comm.size, planner)
    if not isinstance(chosen, Exception):
        for part in chosen:
            derive(part.plan, comm)
            derive_recurrent(part.plan, comm)
    return chosen


class Loader:
    """Batches one by one, until they end; an exception of the loader is returned, not raised."""

    def __init__(self, batches: Iterable[Mapping[str, Any] | None]) -> None:
        self._batches, self.ended = batches, False
        self._iterator: Iterator[Mapping[str, Any] | None] | None = None

    def next(self) -> tuple[Mapping[str, Any] | None, Exception | None]:
        """The next batch, or None and the error, if there is one."""
        if self.ended:
            return None, None
        try:
            if self._iterator is None:
                self._iterator = iter(self._batches)
            return next(self._iterator), None
        except StopIteration:
            self.ended = True
            return None, None
        except Exception as error:
            return None, error
