"""Communicators: how bytes move between ranks. `protocol` states the contract, the other modules keep it."""

from seqpar.comm.local import LocalComm
from seqpar.comm.protocol import Comm, PeerError, Stats, Tag, Work

__all__ = ["Comm", "LocalComm", "PeerError", "Stats", "Tag", "Work"]
