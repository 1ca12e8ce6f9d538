"""Modules: attention under a plan that is given, bound, or surrounds the layers, recomputed activations included."""

from seqpar.nn.attention import Attention
from seqpar.nn.checkpoint import save_attention
from seqpar.nn.multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention", "save_attention"]
