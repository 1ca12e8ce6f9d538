"""What errors say to do for models of transformers that are refused, done: results are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.testing import run_threads
from tests.advice.advised import advised

transformers = pytest.importorskip("transformers")

from tests.integrations.hf.models import batches, build  # noqa: E402

BATCH = batches("right", 1)[0]
ROW = {"input_ids": torch.arange(1, 13)[None], "position_ids": torch.arange(12)[None]}
MODEL = build("llama", num_hidden_layers=1)
with torch.no_grad():
    LOSS = float(MODEL(**BATCH).loss)


class Doubled(nn.Module):
    """An activation that the config does not name."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * 2.0


def test_a_model_with_modules_of_its_own_is_loaded_first() -> None:
    whole = copy.deepcopy(MODEL)
    whole.model.layers[0].mlp.act_fn = Doubled()
    model = copy.deepcopy(whole).to("meta")
    with advised(NotImplementedError, "load the weights on every rank, then call parallelize"):
        seqpar.parallelize(model, LocalComm())
    model.load_state_dict(whole.state_dict(), assign=True)
    model.model.rotary_emb = copy.deepcopy(whole.model.rotary_emb)  # buffers that no state dict has
    with torch.no_grad(), seqpar.parallelize(model, LocalComm()):
        assert float(model(**BATCH).loss) == pytest.approx(float(whole(**BATCH).loss), rel=1e-5)


TOKENS = 40
TINY = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def test_a_model_is_made_without_its_pooler() -> None:
    config = transformers.BertConfig(**TINY)
    pooling = transformers.BertModel(config)
    pooling.pooler = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(16))
    with advised(NotImplementedError, "make it with add_pooling_layer=False"):
        seqpar.parallelize(pooling, LocalComm())
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        expected = model(ROW["input_ids"]).last_hidden_state
        with seqpar.parallelize(model, LocalComm()):
            assert torch.allclose(model(ROW["input_ids"]).last_hidden_state, expected, atol=1e-5)


def test_a_model_that_predicts_some_tokens_alone_is_made_to_predict_all() -> None:
    config = transformers.ModernBertConfig(**TINY, pad_token_id=0, sparse_prediction=True)
    model = transformers.ModernBertForMaskedLM(config)
    with advised(NotImplementedError, "set sparse_prediction=False in its config"):
        seqpar.parallelize(model, LocalComm())
    with torch.no_grad():
        expected = float(model(**BATCH).loss)
        config.sparse_prediction = False
        made = transformers.ModernBertForMaskedLM(config)
        made.load_state_dict(model.state_dict())
        with seqpar.parallelize(made, LocalComm()):
            assert float(made(**BATCH).loss) == pytest.approx(expected, rel=1e-5)


class Counted(nn.Module):
    """A learned position for each of the rows [T] that it gets, counted as nanoGPT does, or told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.places = nn.Embedding(TOKENS, 16), nn.Embedding(TOKENS, 16)

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(len(ids)) if at is None else at)
        q = x.unflatten(-1, (2, 8)).transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1)


def test_a_model_that_counts_positions_takes_them_as_an_argument() -> None:
    model, ids = Counted(), torch.arange(TOKENS)
    plan = Plan(Mask([TOKENS]), Layout.zigzag([TOKENS], 2))

    def rank(comm: Comm, positions: Callable[[int], Any]) -> Tensor:
        own, rows = copy.deepcopy(model), seqpar.shard(ids, plan, comm.rank)
        with seqpar.parallelize(own, comm, sdpa=True, plan=plan), torch.no_grad():
            return seqpar.unshard(own(rows, *positions(comm.rank)), plan, comm)

    def refused(comm: Comm) -> None:
        with advised(NotImplementedError, "pass positions as an argument, plan.rope_positions(rank)"):
            rank(comm, lambda _: ())

    run_threads(2, refused)
    with torch.no_grad():
        expected = model(ids)
    for found in run_threads(2, rank, lambda number: (torch.from_numpy(plan.rope_positions(number)),)):
        assert torch.allclose(found, expected, atol=1e-6)
