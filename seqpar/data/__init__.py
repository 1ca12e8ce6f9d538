"""Batches as shares: a loader's batch becomes the rows that this rank computes, and results go back to the batch."""

from seqpar.data.prefetch import prefetch
from seqpar.data.share import Share, back, micro_batches, share

__all__ = ["Share", "back", "micro_batches", "prefetch", "share"]
