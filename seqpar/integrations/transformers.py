"""Importing this module registers ``attn_implementation="seqpar"`` with transformers; `unregister` removes it."""

from seqpar.integrations.hf.attention import KEY, attention_function, mask_of, register, unregister

__all__ = ["KEY", "attention_function", "mask_of", "register", "unregister"]
