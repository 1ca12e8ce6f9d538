"""`prefetch`: the shares of a loader's batches, planned ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from seqpar.comm import Comm
from seqpar.data.batch import Reading
from seqpar.data.share import Planner, Share, choose, take
from seqpar.data.snapshot import OverwrittenError, Snapshot
from seqpar.data.union import BatchUnion, announce
from seqpar.facts.value import integer
from seqpar.ops.core.precompute import recent_attention, recent_recurrent

if TYPE_CHECKING:
    from seqpar.planner import MicroBatch

T = TypeVar("T")
Epoch = Generator[tuple[T, bool], None, None]  # items, and whether each is the last
PLANNER = "seqpar plans ahead"


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
    batch, at an error, and on ``close``. A loop that begins after that is another epoch over the same loader; one that
    begins in mid-epoch continues it.

    Loaders may differ in length: a rank whose loader has ended contributes empty batches until all have ended (loaders
    of a replicated source must end together). The other arguments are those of `share`.

    Raises: at the batch's turn, as `share`; the error of a rank's loader on that rank, and ValueError on all others;
    ValueError on every rank for a batch that its loader, or the loop, has written to since it was read.
    """
    depth = integer("depth", depth, 1)
    how = Reading(shift, ignore_index, keep, device, mtp_depth)
    return Epochs(lambda: _shares(Loader(batches), comm, how, depth, source, plan))


def _shares(loader: Loader, comm: Comm, how: Reading, depth: int, source: str, planner: Planner | None) -> Epoch[Share]:
    """The shares of one epoch."""
    with planning_thread() as thread:

        def begin(_: object) -> tuple[BatchUnion, Snapshot, Future[Any]] | None:
            batch, error = loader.next()
            known = announce(batch, comm, source, how, error=error, ended=loader.ended, depth=depth)
            if known is None:
                return None
            values = *known.own.tensors.values(), *known.own.others.values()
            return known, Snapshot(values), thread.submit(_chosen, known, comm, planner)

        for (known, snapshot, planned), last in with_lookahead(begin, depth):
            chosen = planned.result()
            if not snapshot.holds():  # all ranks raise it, as an error of the planner
                chosen = OverwrittenError()
            (only,) = take(known, comm, how, chosen)
            yield only, last


def _chosen(known: BatchUnion, comm: Comm, planner: Planner | None) -> list[MicroBatch] | Exception:
    """The plan of a union, with all that its first layers would derive; or the error that prevents it."""
    chosen = choose(known, comm.size, planner)
    if not isinstance(chosen, Exception):
        for part in chosen:
            recent_attention.derive(part.plan, comm)
            recent_recurrent.derive(part.plan, comm)
    return chosen


def with_lookahead(begin: Callable[[Sequence[T]], T | None], depth: int) -> Epoch[T]:
    """The items that `begin` returns until it returns None; the next `depth` are begun before each is yielded.

    begin: is given the items that wait. Its error is raised at the turn of its item; `OverwrittenError`, which is about
    waiting items, at once.
    """
    waiting: deque[T] = deque()
    failure: Exception | None = None
    going = True
    while going or waiting:
        while going and len(waiting) <= depth:
            try:
                item = begin(waiting)
            except Exception as error:
                failure, going = error, False
                if isinstance(error, OverwrittenError):  # on all ranks; items before may be the overwritten ones
                    waiting.clear()
                break
            if item is None:
                going = False
            else:
                waiting.append(item)
        if waiting:
            item = waiting.popleft()
            yield item, not (going or waiting or failure)
    if failure is not None:
        raise failure


@contextmanager
def planning_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that plans ahead, and ends with the block. It may end the block itself, when it collects garbage."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=PLANNER)
    try:
        yield thread
    finally:
        thread.shutdown(wait=not threading.current_thread().name.startswith(PLANNER))


class Epochs(Generic[T]):
    """An iterator over an epoch; a loop after its last item, an error or ``close`` begins the next epoch."""

    def __init__(self, start: Callable[[], Epoch[T]]) -> None:
        self._start, self._epoch, self._ended = start, start(), False

    def __iter__(self) -> Epochs[T]:
        if self._ended:
            self._epoch.close()
            self._epoch, self._ended = self._start(), False
        return self

    def __next__(self) -> T:
        try:
            item, self._ended = next(self._epoch)
        except BaseException:
            self._ended = True
            raise
        return item

    def close(self) -> None:
        """End the epoch, and the thread that plans for it."""
        self._epoch.close()
        self._ended = True


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
            with suppress(AttributeError):  # of frozen ones
                error.rank_did = "got no batch from its loader"  # type: ignore[attr-defined]
            return None, error
