"""A comm whose exchanges somebody watches: meters, links that hold them back, traces, streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from seqpar.comm import Comm, Tag, Work

Side = Mapping[int, Sequence[Tensor]]


class Watcher(Protocol):
    """A watcher, which is called around every exchange."""

    def exchange(self, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag) -> Work:
        """The work of an exchange that ``post()`` starts."""


class Watched:
    """A comm whose exchanges, and those of its subs, go through a watcher."""

    def __init__(self, comm: Comm, watcher: Watcher) -> None:
        self._comm, self._watcher = comm, watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def sub(self, ranks: Sequence[int]) -> Comm:
        """The comm's own sub, with the same watcher."""
        return Watched(self._comm.sub(ranks), self._watcher)

    def exchange(self, sends: Side, recvs: Side, *, tag: Tag) -> Work:
        """The comm's own exchange, through the watcher."""
        return self._watcher.exchange(lambda: self._comm.exchange(sends, recvs, tag=tag), sends, recvs, tag)
