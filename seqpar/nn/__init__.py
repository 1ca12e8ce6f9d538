"""Modules: attention under a plan that the call gives, that is bound to the layer, or that surrounds it."""

from seqpar.nn.attention import Attention
from seqpar.nn.checkpoint import save_attention
from seqpar.nn.multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention", "save_attention"]
