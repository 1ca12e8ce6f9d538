"""`PeerComm`: ranks on the GPUs of one node, which write into each other's memory."""

from seqpar.comm.peer.comm import PeerComm

__all__ = ["PeerComm"]
