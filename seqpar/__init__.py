"""Exact, balanced long-context attention over many ranks.

Facts describe a batch (`Mask`, `Layout`), a `Plan` chooses how to compute it, a comm moves bytes (`GroupComm`,
`ShmComm`, `PeerComm`, `LocalComm`), and verbs compute: `attention`, `latent_attention`, `switch`, `relayout`, `shard`,
`unshard`, `fetch`, `fetch_all`, `merge`, `merge_ranks`, `rotary`. `bind` names a plan for compiled models.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from seqpar.comm import Comm, GroupComm, LocalComm, PeerError
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops import (
    attention,
    bind,
    fetch,
    fetch_all,
    latent_attention,
    merge,
    relayout,
    rotary,
    shard,
    switch,
    unshard,
)
from seqpar.parallel import parallel
from seqpar.plan import Plan

if TYPE_CHECKING:
    from seqpar import data as data
    from seqpar import dsp as dsp
    from seqpar import nn as nn
    from seqpar import planner as planner
    from seqpar import recurrent as recurrent
    from seqpar import train as train
    from seqpar.comm import PeerComm, ShmComm
    from seqpar.integrations.parallelize import parallelize
    from seqpar.integrations.sdpa import sdpa
    from seqpar.ops.attention.merging import merge_ranks
    from seqpar.planner import Forecast, Hardware, MicroBatch, ModelShape, plan_batch, plan_step

__version__ = "0.1.0"

__all__ = [
    "Comm", "Forecast", "GroupComm", "Hardware", "Layout", "LocalComm", "Mask", "MicroBatch", "ModelShape", "PeerComm",
    "PeerError", "Plan", "ShmComm", "attention", "bind", "fetch", "fetch_all", "latent_attention", "merge",
    "merge_ranks", "nn", "parallel", "parallelize", "plan_batch", "plan_step", "relayout", "rotary", "sdpa", "shard",
    "switch", "unshard",
]  # fmt: skip

# What attention under a given plan does without, loaded when it is asked for: models under a plan, the planner, and
# comms of one machine.
_MODULES = ("data", "dsp", "nn", "planner", "recurrent", "train")
_LATER = {
    "parallelize": "seqpar.integrations.parallelize",
    "sdpa": "seqpar.integrations.sdpa",
    "merge_ranks": "seqpar.ops.attention.merging",
    **dict.fromkeys(("PeerComm", "ShmComm"), "seqpar.comm"),
    **dict.fromkeys(("Forecast", "Hardware", "MicroBatch", "ModelShape", "plan_batch", "plan_step"), "seqpar.planner"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"seqpar.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


logging.getLogger("seqpar").addHandler(logging.NullHandler())
