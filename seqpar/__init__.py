"""Exact, balanced long-context attention over many ranks.

Facts say what is computed (`Mask`, `Layout`), a `Plan` chooses how, a comm moves bytes (`GroupComm`, `LocalComm`), and
verbs do it: `attention`, `switch`, `relayout`, `shard`, `unshard`, `merge`, `rotary`. `bind` names a plan for compiled
models.
"""

import logging

from seqpar.comm import Comm, GroupComm, LocalComm, PeerError
from seqpar.layout import Layout
from seqpar.mask import Mask
from seqpar.ops import attention, bind, merge, relayout, rotary, shard, switch, unshard
from seqpar.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Comm", "GroupComm", "Layout", "LocalComm", "Mask", "PeerError", "Plan", "attention", "bind", "merge", "relayout",
    "rotary", "shard", "switch", "unshard",
]  # fmt: skip

logging.getLogger("seqpar").addHandler(logging.NullHandler())
