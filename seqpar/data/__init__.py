"""Batches as shares: what a loader gives becomes the rows that this rank computes, and results go home again."""

from seqpar.data.prefetch import prefetch
from seqpar.data.share import Share, back, micro_batches, share

__all__ = ["Share", "back", "micro_batches", "prefetch", "share"]
