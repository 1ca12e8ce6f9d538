"""The owner of a comm: a fork of a rank's process has its memory and connections, but is not a rank."""

from __future__ import annotations

import ctypes
import os
import weakref

from seqpar.comm.protocol import PeerError

_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def in_some_comm() -> bool:
    """Whether this process is a rank of a comm of processes."""
    return any(owner.in_own_process for owner in _owners)


class Owner:
    """The process that created a comm.

    holder: the object that keeps a comm alive. held: resources released with it, at the latest when the process ends. A
    fork never releases them: destructors of torch.distributed wait for threads that a fork does not have.
    """

    def __init__(self, holder: object, rank: int, held: list[object]) -> None:
        self._process, self._rank = os.getpid(), rank
        weakref.finalize(holder, _let_go, self._process, held)
        _owners.add(self)

    @property
    def in_own_process(self) -> bool:
        """Whether this is the owner, not a fork of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise PeerError in a fork."""
        if os.getpid() != self._process:
            raise PeerError(
                f"the comm of rank {self._rank} belongs to process {self._process}, not to a fork of it; use it in "
                "that process alone"
            )


def _let_go(process: int, held: list[object]) -> None:
    if os.getpid() == process:
        held.clear()
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
