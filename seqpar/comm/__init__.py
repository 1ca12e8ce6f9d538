"""Communicators: how bytes move between ranks. `protocol` is the contract; the other modules implement it."""

from seqpar.comm.group import GroupComm
from seqpar.comm.local import LocalComm
from seqpar.comm.peer import PeerComm
from seqpar.comm.protocol import Comm, PeerError, Stats, Tag, Work
from seqpar.comm.shm import ShmComm

__all__ = ["Comm", "GroupComm", "LocalComm", "PeerComm", "PeerError", "ShmComm", "Stats", "Tag", "Work"]
