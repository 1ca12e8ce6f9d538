"""Attention that does not go through transformers' interface: Falcon, Bloom, MPT, GPT-J, GPT-Neo, CodeGen.

And Llama 4's layers without rotary embeddings, which scale queries by their place, and Gemma 4's with keys of others.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import unpacked, verdict
from tests.integrations.hf.hybrids import contiguous
from tests.integrations.hf.models import batches, holes, packed
from tests.integrations.hf.unions import agree, build, check, one
from tests.ranks import on_copies

OLD = {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {}),
    "gpt_neo": ("gpt_neo", {}),
    "codegen": ("codegen", {}),
    "bloom": ("bloom", {"n_head": 4}),
    "mpt": ("mpt", {}),
    "falcon": ("falcon", {}),
    "llama4": ("llama4_text", {"floor_scale": 4}),
    "gemma4": ("gemma4_text", {}),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom of 5 heads": ("bloom", {"n_head": 5, "hidden_size": 40}),
    "mpt of 5 heads": ("mpt", {"n_heads": 5, "d_model": 40}),
    "falcon of one key head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon of key heads": ("falcon", OLD),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    kind, config = (FAMILIES | MORE)[name]
    return build(Architecture(kind, "dense", config | more), dtype)


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
@pytest.mark.sampled(4)
def test_a_model_on_ranks_is_the_model_of_one_process(name: str) -> None:
    model = model_of(name)
    for kind, ranks in (("left", 2), ("packed", 3), *[("cu", 2)] * (name in MORE)):
        agree(model, batches(kind, ranks))


@pytest.mark.parametrize("name", ["gpt_neo", "bloom", "gemma4"])
def test_checkpointed_layers_find_their_plan_again(name: str) -> None:
    """In the backward passes of two batches, which come after both forwards."""
    model = model_of(name, torch.float32)
    steps = [batches("right", 2), batches("packed", 2)]

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        own.gradient_checkpointing_enable({"use_reentrant": False})
        with seqpar.parallelize(own, comm, plan=contiguous):
            losses = [own(**every[comm.rank]).loss for every in steps]
            sum(losses).backward()
        return float(sum(losses)), {n: p.grad if p.grad is not None else 0 * p for n, p in own.named_parameters()}

    wholes = [one(model, every, torch.float32) for every in steps]
    grads = {name: sum(grads[name] for _, grads in wholes) for name in wholes[0][1]}
    check(run_threads(2, rank), (sum(loss for loss, _ in wholes), grads), 2e-5)


@pytest.mark.parametrize("name", ["gptj", "bloom", "gpt_neo"])
@pytest.mark.sampled(3)
def test_the_same_pairs_are_dropped_on_any_number_of_ranks(name: str) -> None:
    rates = {"gptj": "attn_pdrop", "bloom": "attention_dropout", "gpt_neo": "attention_dropout"}
    model, batch = model_of(name, **{rates[name]: 0.5}), packed(torch.Generator().manual_seed(3), [11, 23])
    torch.manual_seed(5)

    def losses_of(own: Any, comm: Comm) -> list[float]:
        return [float(own(**batch).loss.detach()) for _ in range(2)]

    (alone,) = on_copies(model, losses_of, ranks=1, source="replicated", plan=contiguous)
    assert abs(alone[0] - alone[1]) > 1e-4, "another batch, other pairs"
    for losses in on_copies(model, losses_of, ranks=3, source="replicated", plan=contiguous):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_a_registered_model_whose_layers_share_keys_keeps_its_rows() -> None:
    assert verdict(Architecture("gemma4_text", "dense"), "registered zigzag") == "exact"


def test_falcons_alibi_is_refused() -> None:
    model = build(Architecture("falcon", "dense", OLD | {"alibi": True}), torch.float32)
    with pytest.raises(NotImplementedError, match="does not go through transformers' AttentionInterface"):
        seqpar.parallelize(model, LocalComm())


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt_neo"])
def test_holes(name: str) -> None:
    """Bloom counts tokens; MPT's biases and GPT-Neo's windows are by places, holes included."""
    model, every = model_of(name), [holes(torch.Generator().manual_seed(2), 17)]
    if name == "bloom":
        agree(model, every)
        return
    with (
        seqpar.parallelize(model, LocalComm()),
        pytest.raises(NotImplementedError, match="count as places in some attention layers; leave them out"),
    ):
        model(**every[0])


def test_undo_and_local_leave_the_classes_own_attention() -> None:
    for name in ("gptj", "bloom"):
        model = model_of(name, torch.float32).eval()
        before = {path: dict(module.__dict__) for path, module in model.named_modules()}
        batch = unpacked(packed(torch.Generator().manual_seed(1), [9, 5]))
        batch.pop("labels")
        expected = model(**batch).logits
        with seqpar.parallelize(model, LocalComm()) as handle:
            with handle.local():
                assert torch.equal(model(**batch).logits, expected)
            assert not torch.equal(model(**batch).logits, expected)  # pads are zeros
        assert torch.equal(model(**batch).logits, expected)
        assert all(module.__dict__.keys() == before[path].keys() for path, module in model.named_modules())


def sharded(comm: Comm, name: str) -> float:
    """The loss of a model whose attention or layers `fully_shard` has given classes of other names."""
    model = model_of(name, torch.float32)
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer" if name == "llama4" else "Attention"):
            fully_shard(module)
    fully_shard(model)
    seqpar.parallelize(model, comm, plan=contiguous, average_over=comm.size)
    loss = model(**batches("left", 1)[0]).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("name", ["bloom", "gptj", "llama4"])
@pytest.mark.sampled(1)
def test_layers_that_are_sharded_before_are_known_by_their_own_class(name: str) -> None:
    expected = float(model_of(name, torch.float32)(**batches("left", 1)[0]).loss)
    for loss in run_processes(2, sharded, name):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_model_with_a_tower_of_its_own_attention_may_be_told_the_name() -> None:
    """Where another class of the same file looks its layers up by the name of their attention."""
    module = pytest.importorskip("transformers.models.deepseek_ocr2.modeling_deepseek_ocr2")
    model = module.DeepseekOcr2TextModel(
        module.DeepseekOcr2TextConfig(
            vocab_size=61, hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
            topk_group=1, mlp_layer_types=["dense"],
        )
    )  # fmt: skip
    model.set_attn_implementation("seqpar")
    assert model.config._attn_implementation == "seqpar"
