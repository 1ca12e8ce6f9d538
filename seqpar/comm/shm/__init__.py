"""`ShmComm`: ranks that are processes of one machine, over shared memory."""

from seqpar.comm.shm.comm import ShmComm, missing

__all__ = ["ShmComm", "missing"]
