"""The sizes of a config are found whatever its names for them are: by the planner, and to make a small model of it."""

from __future__ import annotations

import copy
from itertools import zip_longest

import pytest
from transformers import PreTrainedConfig

from seqpar.integrations.hf.planning import shape_of
from seqpar.integrations.hf.trial.twin import WIDTH, _shrink

LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]
HEADS = ["num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads", "attention_heads"]
KEY_HEADS = ["num_key_value_heads", "num_kv_heads"]
HIDDEN = ["hidden_size", "n_embd", "d_model", "dim", "emb_dim"]
FFN = ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"]


@pytest.mark.parametrize("names", [*zip_longest(LAYERS, HEADS, KEY_HEADS, HIDDEN, FFN)])
def test_each_name_of_a_size_is_known_to_the_planner_and_made_small(names: tuple[str | None, ...]) -> None:
    every = (LAYERS, HEADS, KEY_HEADS, HIDDEN, FFN)
    layers, heads, key_heads, hidden, ffn = (name or some[0] for name, some in zip(names, every, strict=True))
    config = PreTrainedConfig(**{layers: 6, heads: 12, key_heads: 4, hidden: 96, ffn: 100, "vocab_size": 500})
    shape = shape_of(config)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.hidden, shape.ffn) == (6, 12, 4, 96, 100)
    small = copy.deepcopy(config)
    _shrink(small)
    assert [getattr(small, name) for name in (layers, heads, key_heads, hidden, ffn)] == [2, 2, 1, 16, WIDTH]
