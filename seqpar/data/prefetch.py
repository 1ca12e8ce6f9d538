"""`prefetch`: the shares of a loader's batches, planned ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from seqpar.comm import Comm
from seqpar.data.batch import Reading
from seqpar.data.share import Planner, Share, choose, take
from seqpar.data.union import Known, announce
from seqpar.facts.value import whole
from seqpar.ops.attention.ahead import derive
from seqpar.ops.recurrent.ahead import derive as derive_recurrent
from seqpar.planner import MicroBatch

T = TypeVar("T")


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
    batch, at an error, and on ``close``. A loop that begins after that is another epoch over the same loader.

    Loaders may differ in length: a rank whose loader has ended contributes empty batches until all have ended (loaders
    of a replicated source must end together). The other arguments are those of `share`.

    Raises: at the batch's turn, as `share`; the error of a rank's loader on that rank, and ValueError on all others.
    """
    depth = whole("depth", depth, 1)
    how = Reading(shift, ignore_index, keep, device, mtp_depth)
    return Epochs(lambda: _shares(Loader(batches), comm, how, depth, source, plan))


def _shares(
    loader: Loader, comm: Comm, how: Reading, depth: int, source: str, planner: Planner | None
) -> Generator[Share, None, None]:
    """The shares of one epoch."""
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
                    ahead.append((known, thread.submit(_chosen, known, comm, planner)))
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


class Epochs(Generic[T]):
    """An iterator over an epoch; a loop that begins after its end, an error or ``close`` begins the next epoch."""

    def __init__(self, start: Callable[[], Generator[T, None, None]]) -> None:
        self._start, self._epoch, self._ended = start, start(), False

    def __iter__(self) -> Epochs[T]:
        if self._ended:
            self._epoch, self._ended = self._start(), False
        return self

    def __next__(self) -> T:
        try:
            return next(self._epoch)
        except BaseException:
            self._ended = True
            raise

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
            return None, error
