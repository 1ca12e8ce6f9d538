"""The verbs: differentiable, local tensors in, local tensors out."""

from seqpar.kernels import merge
from seqpar.ops import graph  # noqa: F401 registers the ops
from seqpar.ops.attention import attention
from seqpar.ops.handles import bind
from seqpar.ops.relayout import relayout, shard, unshard
from seqpar.ops.rotary import rotary
from seqpar.ops.switch import start_switch, switch, switch_all

__all__ = [
    "attention",
    "bind",
    "merge",
    "relayout",
    "rotary",
    "shard",
    "start_switch",
    "switch",
    "switch_all",
    "unshard",
]
