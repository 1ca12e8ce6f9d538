"""Communicators: how bytes move between ranks. `protocol` is the contract; the other modules implement it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seqpar.comm.group import GroupComm
from seqpar.comm.local import LocalComm
from seqpar.comm.protocol import Comm, PeerError, Stats, Tag, Work

if TYPE_CHECKING:
    from seqpar.comm.peer import PeerComm
    from seqpar.comm.shm import ShmComm

__all__ = ["Comm", "GroupComm", "LocalComm", "PeerComm", "PeerError", "ShmComm", "Stats", "Tag", "Work"]

# Comms of one machine, loaded when they are asked for.
_LATER = {"PeerComm": "seqpar.comm.peer", "ShmComm": "seqpar.comm.shm"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
