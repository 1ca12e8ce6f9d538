"""The names under which configs of transformers, or of models' own code, have their sizes.

Most name them as the first of each, or map that name to theirs by ``attribute_map``.
"""

from __future__ import annotations

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads", "attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
