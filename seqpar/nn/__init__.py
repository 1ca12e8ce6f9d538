"""Modules: attention under a plan that the call gives, that is bound to the layer, or that surrounds it."""

from seqpar.nn.attention import Attention, save_attention
from seqpar.nn.multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention", "save_attention"]
