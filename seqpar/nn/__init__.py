"""Modules: attention under a plan that the call gives, that is bound to the layer, or that surrounds it."""

from seqpar.nn.attention import Attention, MultiheadAttention, save_attention

__all__ = ["Attention", "MultiheadAttention", "save_attention"]
