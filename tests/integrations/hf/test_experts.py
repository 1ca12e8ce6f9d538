"""Router logits and balance losses of mixtures of experts: those of one process, over all ranks' tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_threads
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import union
from tests.integrations.hf.hybrids import contiguous, gradients
from tests.integrations.hf.models import batches
from tests.integrations.hf.unions import agree, build, check, on_ranks, one

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
FAMILIES = {
    kind: Architecture(kind, "experts", ASKED)
    for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
}  # fmt: skip
MORE = {kind: Architecture(kind, "experts", ASKED)
        for kind in ("olmoe", "granitemoe", "minimax_m2", "ernie4_5_moe", "flex_olmo")}  # fmt: skip
MORE["phimoe"] = Architecture("phimoe", "experts", ASKED, training=False)
MORE["dbrx"] = Architecture("dbrx", "experts", {"output_router_logits": True})
ROUTERS = 2e-7  # fp32 sums in models of fp64


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
@pytest.mark.sampled(2)
def test_the_balance_loss_is_of_all_ranks_tokens(name: str) -> None:
    """Also without the product of the ranks' own means, which are others."""
    model = build((FAMILIES | MORE)[name])
    holes = batches("mixed", 2)[:1] + batches("right", 2)[1:]
    for every in (batches("left", 2), batches("packed", 3), *[batches("cu", 2), holes] * (name in MORE)):
        whole = agree(model, every, ROUTERS)
        without = one(model, every, torch.float64, output_router_logits=False)
        assert abs(whole[0] - without[0]) > 0.1 or name == "dbrx", "the balance loss matters"


def test_routers_of_checkpointed_layers() -> None:
    agree(build(FAMILIES["mixtral"], torch.float32), batches("right", 2), 2e-5, checkpoints=True)


def test_router_logits_come_home_and_the_whole_loss_with_them() -> None:
    model, every = build(FAMILIES["mixtral"], torch.float32).eval(), batches("right", 2)

    def rank(comm: Comm) -> tuple[tuple[Tensor, ...], Tensor]:
        own, batch = copy.deepcopy(model), every[comm.rank]
        with seqpar.parallelize(own, comm, plan=contiguous), torch.no_grad():
            out = own(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            assert own(**batch, output_router_logits=False).router_logits is None
        return out.router_logits, out.aux_loss

    found = run_threads(2, rank)
    with torch.no_grad():
        whole = model(**union(every))
    assert [float(loss) for _, loss in found] == pytest.approx([float(whole.aux_loss)] * 2, rel=1e-6)
    for (logits, _), batch in zip(found, every, strict=True):
        kept = batch["attention_mask"].bool().reshape(-1)
        with torch.no_grad():
            alone = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).router_logits
        for home, expected in zip(logits, alone, strict=True):
            assert home.shape == expected.shape and not home[~kept].any()
            torch.testing.assert_close(home[kept], expected[kept], rtol=0, atol=1e-5)


def test_a_caller_that_counts_items_and_one_that_averages() -> None:
    """Trainer divides by num_items_in_batch, and multiplies by the ranks that DDP divides by."""
    model, every = build(FAMILIES["qwen3_moe"]), batches("right", 2)
    valid = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in every)
    whole = one(model, every, torch.float64)

    def rank(comm: Comm, options: dict[str, Any], more: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
        return on_ranks(comm, model, every, torch.float64, more, options)

    counted = run_threads(2, rank, {}, {"num_items_in_batch": torch.tensor(valid)})
    assert sum(loss for loss, _ in counted) == pytest.approx(whole[0], rel=ROUTERS)
    check([(whole[0], grads) for _, grads in counted], whole, ROUTERS)
    averaged = run_threads(2, rank, {"average_over": 2}, {})
    check([(loss, {name: x / 2 for name, x in grads.items()}) for loss, grads in averaged], whole, ROUTERS)


def test_the_loss_by_itself_is_this_ranks_share() -> None:
    """A loop with a loss of its own adds ``weight * out.aux_loss``, and sums gradients over ranks."""
    model, every = build(FAMILIES["gpt_oss"]), batches("packed", 2)
    given = [{name: x for name, x in batch.items() if name != "labels"} for batch in every]

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous):
            loss = own(**given[comm.rank]).aux_loss
            loss.backward()
        return float(loss), gradients(own)

    whole = copy.deepcopy(model)
    loss = whole(**union(given), use_cache=False).aux_loss
    loss.backward()
    check(run_threads(2, rank), (float(loss), gradients(whole)), 2e-6)


def test_another_balance_loss_is_refused_when_it_is_asked_for() -> None:
    model = build(FAMILIES["mixtral"], torch.float32)
    model.num_experts_per_tok = 1  # the model chooses two
    batch = batches("right", 1)[0]
    forward = type(model).forward

    def other(self: Any, *args: Any, **named: Any) -> Any:
        out = forward(self, *args, **named)
        if out.aux_loss is not None:
            out.aux_loss = out.aux_loss**2
        return out

    model.__class__ = type("OtherForCausalLM", (type(model),), {"forward": other})
    with seqpar.parallelize(model, LocalComm()):
        with pytest.raises(NotImplementedError, match="output_router_logits=True for OtherForCausalLM: its balance"):
            model(**batch)
        assert model(**batch, output_router_logits=False).loss.isfinite()
