"""`ShmComm`: ranks that are processes of one machine, over memory that they share."""

from seqpar.comm.shm.comm import ShmComm, missing

__all__ = ["ShmComm", "missing"]
