"""Tools for tests: a program on one rank and on several, ranks as threads or processes, dense oracles, errors."""

from seqpar.launch import COMMS, run_processes, run_threads
from seqpar.testing.comparison import Comparison, compare
from seqpar.testing.oracle import ERROR_GROWTH, dense_attention, dense_linear_attention, relative_rms, seen_pairs

__all__ = [
    "COMMS",
    "ERROR_GROWTH",
    "Comparison",
    "compare",
    "dense_attention",
    "dense_linear_attention",
    "relative_rms",
    "run_processes",
    "run_threads",
    "seen_pairs",
]
