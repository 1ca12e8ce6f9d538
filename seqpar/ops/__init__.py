"""The verbs: differentiable functions from local tensors to local tensors."""

from seqpar.kernels import merge
from seqpar.ops.attention.api import attention
from seqpar.ops.attention.latent import latent_attention
from seqpar.ops.attention.rotary import rotary
from seqpar.ops.core.handles import bind
from seqpar.ops.move.fetch import fetch, fetch_all
from seqpar.ops.move.relayout import relayout, shard, unshard
from seqpar.ops.move.switch import start_switch, switch, switch_all

__all__ = [
    "attention",
    "bind",
    "fetch",
    "fetch_all",
    "latent_attention",
    "merge",
    "relayout",
    "rotary",
    "shard",
    "start_switch",
    "switch",
    "switch_all",
    "unshard",
]
