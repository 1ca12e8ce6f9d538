"""Models that choose their keys by an indexer: what they exchange, and what is refused. Results: `test_latents`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf import indexed
from seqpar.integrations.hf.planning import ModelPlanner, shape_of, shape_of_chosen
from seqpar.testing import run_threads
from tests.ecosystem import architectures
from tests.ecosystem.architectures import TABLE
from tests.integrations.hf.hybrids import empty, zigzag
from tests.integrations.hf.models import batches
from tests.integrations.hf.test_planning import STATE

pytestmark = pytest.mark.skipif(not hasattr(transformers, "AXK2Config"), reason="since transformers 5.24")


def build(kind: str = "deepseek_v32", **config: Any) -> Any:
    row = TABLE[kind]
    return architectures.build(row._replace(config=row.config | config), dtype=torch.float32)


def sent(comm: Comm, plan: Any, whole: Any) -> tuple[int, int, Plan]:
    """Bytes of a forward of a copy of a model and of its backward, and the plan."""
    model, plans = copy.deepcopy(whole), []

    def planned(lengths: Any, ranks: int) -> Plan:
        plans.append(plan(lengths, ranks))
        return plans[-1]

    with seqpar.parallelize(model, comm, plan=planned, source="replicated"):
        before = comm.stats.bytes_sent
        loss = model(**batches("packed", 1)[0]).loss
        forward = comm.stats.bytes_sent - before
        loss.backward()
    return forward, comm.stats.bytes_sent - before - forward, plans[-1]


@pytest.mark.parametrize(("ranks", "plan"), [(2, zigzag), pytest.param(3, empty, marks=pytest.mark.exhaustive)])
def test_bytes_are_those_of_latents_and_of_an_indexers_key(ranks, plan) -> None:
    small, large = build(), build(index_head_dim=24, kv_lora_rank=32)
    every = zip(*(run_threads(ranks, sent, plan, model) for model in (small, large)), strict=True)
    for rank, ((forward, backward, made), more) in enumerate(every):
        layers, size = 2, 4
        fetched = made.fetch_bytes(rank, row_bytes=(8 + 16) * size)
        returned = made.fetch_bytes(rank, row_bytes=16 * size, backward=True)  # an indexer's keys get no gradient
        assert (more[0] - forward, more[1] - backward) == (layers * fetched, layers * returned)


def test_its_handle_says_what_layers_exchange() -> None:
    with seqpar.parallelize(build("mistral_large4"), LocalComm()) as handle:
        assert handle.describe().split("\n")[1:] == [
            "1 layers (MistralLarge4TextAttention) exchange latents and keys of an indexer",
            "1 layers (MistralLarge4TextAttention) exchange latents",
            "2 layers (MistralLarge4TextAttention) exchange keys of an indexer",
        ]
    model = build("glm_moe_dsa")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        handle = seqpar.parallelize(model, LocalComm())
        with handle.local():
            assert torch.equal(model(input_ids=ids).logits, before)
            assert model(input_ids=ids, use_cache=True).cache is not None
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, before, atol=1e-5)
        handle.undo()
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("few", [{"index_n_heads": 1}, {"index_n_heads": 2, "index_topk": 512}])
def test_an_indexer_whose_scores_tie_is_refused(few) -> None:
    with pytest.raises(NotImplementedError, match="its DeepseekV32Indexer gives several keys the same score, and choo"):
        seqpar.parallelize(build(**few), LocalComm())


def test_dropout_of_attention_is_refused_by_name() -> None:
    model = build(attention_dropout=0.5)
    seqpar.parallelize(model, LocalComm())
    with pytest.raises(NotImplementedError, match="DeepseekV32Attention passes dropout to its attention"):
        model(**batches("packed", 1)[0])
    model.eval()
    assert model(**batches("packed", 1)[0]).loss.isfinite()


def test_its_cache_is_not_split() -> None:
    with (
        seqpar.parallelize(build(), LocalComm()) as handle,
        pytest.raises(NotImplementedError, match="its layers choose their keys by an indexer"),
    ):
        handle.cache()


@pytest.mark.exhaustive
def test_compiled_layers_have_the_same_loss() -> None:
    model, batch = build(), batches("packed", 1)[0]
    with seqpar.parallelize(model, LocalComm()):
        plain = float(model(**batch).loss.detach())
        for layer in model.model.layers:
            layer.compile(backend="eager")
        loss = model(**batch).loss
        loss.backward()
    assert float(loss.detach()) == pytest.approx(plain, rel=1e-6)


def test_the_planner_counts_what_is_fetched_and_gives_each_rank_all_heads() -> None:
    for kind in ("deepseek_v32", "glm_moe_dsa", "axk2"):
        config = transformers.AutoConfig.for_model(kind)
        shape = shape_of_chosen(shape_of(config), config)
        row = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
        assert (shape.row_bytes, shape.kv_heads) == (2 * row, 1)
    plan = ModelPlanner(build(), causal=True)(torch.tensor([60_000, 300]).numpy(), 4, STATE, (1, 1, 0, 0))
    assert set(plan.widths.tolist()) == {1} and plan.layout.sizes().max() < 20_000


def test_layers_that_share_what_is_chosen_are_found() -> None:
    model = build("mistral_large4")
    assert len(indexed.layers(model)) == 4
    assert [layer.indexer is None for layer in indexed.layers(model)] == [False, True, False, False]


def test_a_mask_of_ones_own_is_refused() -> None:
    """Under registered attention it would let a rank see its own keys alone."""

    def rank(comm: Comm) -> None:
        model = copy.deepcopy(whole)
        model.set_attn_implementation("seqpar")
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        with seqpar.parallel(Plan(Mask([24]), Layout.zigzag([24], 2)), comm):
            model(input_ids=torch.arange(12)[None], attention_mask=mask, use_cache=False)

    whole = build()
    with pytest.raises(NotImplementedError, match=r"attention_mask=\[1, 1, 12, 12\], which is not seqpar's"):
        run_threads(2, rank)
